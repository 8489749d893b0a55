"""What the plug-in is told: by `torch.compile(options=...)`, and by the environment for what that leaves open."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

_ENVIRONMENT = "PHALANX_COMPILE"
_PREFIX = "phalanx."


@dataclass(frozen=True)
class Config:
    """The options of the plug-in. All ranks of a group must be given the same.

    Attributes:
        zero_copy_bytes: Values of at least this size are written straight into symmetric memory by what computes them,
            and communicated where they lie. Smaller ones are faster through the slots of the core. 0 for all.
        bucket_bytes: Neighbouring collectives of one kind whose inputs are at most this large are issued as one. 0 for
            none.
        overlap_ns: A collective whose result is needed only after computations of at least this estimated time is
            started there and waited for where it is needed. 0 for none.
        overlap_bytes: How much may be in flight at a time.
        epilogue_bytes: Sums of at most this size are written as additions over the memory of the peers, so that
            Inductor fuses what follows into the same kernel. 0, the default, for none: measured, a fused kernel that
            reads the peers is slower than the core's reduction and one more kernel.
        pipeline_bytes: Products next to a collective whose result is at least this large are computed in pieces, each
            communicated while the next is computed. 0, the default, for none: it wins where ranks have cores to spare.
        strict: Raise where a collective stays with torch.distributed, or is copied although it is large.
    """

    zero_copy_bytes: int = 512 << 10
    bucket_bytes: int = 8 << 10
    overlap_ns: int = 50_000
    overlap_bytes: int = 64 << 20
    epilogue_bytes: int = 0
    pipeline_bytes: int = 0
    strict: bool = False

    def key(self) -> tuple[tuple[str, Any], ...]:
        """What tells compiled graphs of different options apart."""
        return tuple(sorted(asdict(self).items()))


_NAMES = {field.name: field.type for field in fields(Config)}


def _parse(name: str, text: str) -> Any:
    if name not in _NAMES:
        raise ValueError(f"{_ENVIRONMENT}: there is no option '{name}'; options are {', '.join(_NAMES)}")
    if isinstance(getattr(Config, name), bool):
        if text.lower() not in ("0", "1", "true", "false"):
            raise ValueError(f"{_ENVIRONMENT}: {name} must be 0, 1, true or false, but is '{text}'")
        return text.lower() in ("1", "true")
    if not text.isdecimal():
        raise ValueError(f"{_ENVIRONMENT}: {name} must be a number that is not negative, but is '{text}'")
    return int(text)


def from_environment() -> Config:
    """The defaults, but for what the variable PHALANX_COMPILE says: `name=value`, separated by spaces.

    Raises:
        ValueError: It names an option that does not exist, or has a value that cannot be.
    """
    given = {}
    for part in os.environ.get(_ENVIRONMENT, "").split():
        name, separator, text = part.partition("=")
        if not separator:
            raise ValueError(f"{_ENVIRONMENT}: '{part}' must be name=value")
        given[name] = _parse(name, text)
    return replace(Config(), **given)


def split_options(options: Mapping[str, Any]) -> tuple[Config, dict[str, Any]]:
    """Tell the options of the plug-in ("phalanx.strict") from those of Inductor (all others).

    Returns:
        The configuration, and the options of Inductor.

    Raises:
        ValueError: An option of ours does not exist, or has a value that cannot be.
    """
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    for key, value in options.items():
        if not key.startswith(_PREFIX):
            theirs[key] = value
            continue
        name = key.removeprefix(_PREFIX)
        if name not in _NAMES:
            raise ValueError(f"there is no option '{key}'; options are {', '.join(_PREFIX + one for one in _NAMES)}")
        wanted = bool if isinstance(getattr(Config, name), bool) else int
        if type(value) is not wanted or (wanted is int and value < 0):
            raise ValueError(
                f"option '{key}' must be {'True or False' if wanted is bool else 'an int >= 0'}: {value!r}"
            )
        ours[name] = value
    return replace(from_environment(), **ours), theirs
