"""The options of the plug-in: from `torch.compile(options=...)`, then from the environment, then the defaults."""

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
        zero_copy_bytes: Values of at least this size, in bytes, are written directly into symmetric memory by the
            kernel that computes them, and are communicated from there. Smaller ones are faster through the slots of the
            core. 0 applies this to all values.
        bucket_bytes: Neighbouring collectives of one kind whose inputs have at most this many bytes are issued as one
            call. 0 disables this.
        overlap_ns: A collective whose result is needed only after computations of at least this estimated time, in
            nanoseconds, is started early and waited for at the first use. 0 disables this.
        overlap_bytes: Limit of the bytes in flight at a time.
        strict: Raise an error for a collective that stays with torch.distributed, or that is large and copied.

    Example:
        >>> Config(strict=True).strict, Config().bucket_bytes
        (True, 8192)
    """

    zero_copy_bytes: int = 512 << 10
    bucket_bytes: int = 8 << 10
    overlap_ns: int = 50_000
    overlap_bytes: int = 64 << 20
    strict: bool = False

    def key(self) -> tuple[tuple[str, Any], ...]:
        """The part of a cache key that stands for the options."""
        return tuple(sorted(asdict(self).items()))


_NAMES = {field.name: field.type for field in fields(Config)}


def _parse(name: str, text: str) -> Any:
    if name not in _NAMES:
        raise ValueError(f"{_ENVIRONMENT}: unknown option '{name}'; expected one of {', '.join(_NAMES)}")
    if isinstance(getattr(Config, name), bool):
        if text.lower() not in ("0", "1", "true", "false"):
            raise ValueError(f"{_ENVIRONMENT}: {name} is '{text}'; it must be 0, 1, true or false")
        return text.lower() in ("1", "true")
    if not text.isdecimal():
        raise ValueError(f"{_ENVIRONMENT}: {name} is '{text}'; it must be an integer that is not negative")
    return int(text)


def from_environment() -> Config:
    """The defaults, with the changes in the variable PHALANX_COMPILE: `name=value`, separated by spaces.

    Raises:
        ValueError: An option does not exist, or its value is not allowed.

    Example:
        >>> os.environ["PHALANX_COMPILE"] = "strict=1 bucket_bytes=0"
        >>> config = from_environment()
        >>> config.strict, config.bucket_bytes
        (True, 0)
        >>> del os.environ["PHALANX_COMPILE"]
    """
    changes = {}
    for part in os.environ.get(_ENVIRONMENT, "").split():
        name, separator, text = part.partition("=")
        if not separator:
            raise ValueError(f"{_ENVIRONMENT}: '{part}' has no value; write name=value, as in {part}=1")
        changes[name] = _parse(name, text)
    return replace(Config(), **changes)


def split_options(options: Mapping[str, Any]) -> tuple[Config, dict[str, Any]]:
    """Separate the options of the plug-in ("phalanx.strict") from those of Inductor (all others).

    Args:
        options: As for torch.compile.

    Returns:
        The configuration, and the options of Inductor.

    Raises:
        ValueError: An option of the plug-in does not exist, or its value is not allowed.

    Example:
        >>> config, theirs = split_options({"phalanx.strict": True, "max_autotune": False})
        >>> config.strict, theirs
        (True, {'max_autotune': False})
    """
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    for key, value in options.items():
        if not key.startswith(_PREFIX):
            theirs[key] = value
            continue
        name = key.removeprefix(_PREFIX)
        if name not in _NAMES:
            raise ValueError(
                f"backend 'phalanx': unknown option '{key}'; expected one of "
                f"{', '.join(_PREFIX + known for known in _NAMES)}"
            )
        wanted = bool if isinstance(getattr(Config, name), bool) else int
        if type(value) is not wanted or (wanted is int and value < 0):
            raise ValueError(
                f"backend 'phalanx': option '{key}' is {value!r}; it must be "
                f"{'True or False' if wanted is bool else 'an int of 0 or more'}"
            )
        ours[name] = value
    return replace(from_environment(), **ours), theirs
