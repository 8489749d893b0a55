"""Where one algorithm takes over from another."""

import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from phalanx.core._handle import UINT64_MAX, c_integer
from phalanx.core._lib import ffi, lib, new_struct
from phalanx.core.cache import cache_path
from phalanx.core.errors import InvalidArgumentError, check


@dataclass(frozen=True)
class Tuning:
    """The values by which a group chooses its algorithms, all in bytes. Zero means the built-in value.

    Attributes:
        one_shot_bytes: all_reduce: the largest input for which every rank reduces everything.
        chunk_bytes: What moves of larger inputs between two barriers: 4 KiB to 1 GiB. The group's staging area
            bounds it.
        streaming_bytes: Results from this size on are written around the cache; near it, calls find what is faster.
        push_bytes: all_reduce in place on symmetric memory among more than four ranks: the piece that is pushed to the
            peers while it is in the cache; 64 bytes to 1 GiB. Fewer ranks write sums everywhere at once.

    Example:
        >>> Tuning(one_shot_bytes=4096)
        Tuning(one_shot_bytes=4096, chunk_bytes=0, streaming_bytes=0, push_bytes=0)
    """

    one_shot_bytes: int = 0
    chunk_bytes: int = 0
    streaming_bytes: int = 0
    push_bytes: int = 0


@dataclass(frozen=True)
class GpuTuning:
    """The values by which collectives on GPUs choose their kernels, in bytes. Zero means the built-in value.

    Sizes are at most `NEVER`, which no input has.

    Attributes:
        line_bytes: all_reduce: the largest input that is sent with flags. The signal pads have room for 32 KiB.
        two_shot_bytes: all_reduce of ordinary memory: from this input on each rank reduces a part.
        multicast_bytes: all_gather into symmetric memory: results from this size on go by NVLink switches, where there
            are some.
        copy_bytes: all_gather of symmetric memory: other results from this size on are copied by the GPU's copy
            engines, between two barriers, and not by a kernel.
        thread_bytes: Work for which a launch has one more thread, as long as there is room: a multiple of 16, up to
            4096.

    Example:
        >>> GpuTuning(line_bytes=4096).line_bytes
        4096
    """

    line_bytes: int = 0
    two_shot_bytes: int = 0
    multicast_bytes: int = 0
    copy_bytes: int = 0
    thread_bytes: int = 0


NEVER = 1 << 62  # as a size from which on something is done


@dataclass(frozen=True)
class GpuRow:
    """Which groups a row of the table is for.

    Attributes:
        gpu: Its name in one word, as NVIDIA_H100_80GB_HBM3.
        ranks: The group's size.
        shared: Whether ranks have a GPU in common.
    """

    gpu: str
    ranks: int
    shared: bool


def table_path() -> Path | None:
    """The table that new groups read: $PHALANX_TUNING, else phalanx/tuning in the user's cache directory.

    Returns:
        The path, whether or not there is such a file; None where no table is read.
    """
    return cache_path("PHALANX_TUNING", "tuning")


def row_of(line: str) -> dict[str, str]:
    """What a line of the table says, by key."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def rows_of_host(text: str) -> dict[int, dict[str, str]]:
    """The rows of a table that are for this host.

    Args:
        text: The text of the table.

    Returns:
        By group size, what is written there by key.
    """
    here = ffi.string(lib.phx_tuning_host()).decode()
    found: dict[int, dict[str, str]] = {}
    for row in map(row_of, text.splitlines()):
        ranks = row.pop("ranks", "")
        if row.pop("host", None) == here and ranks.isdecimal():
            found[int(ranks)] = row
    return dict(sorted(found.items()))


def rows_of_gpus(text: str) -> dict[GpuRow, dict[str, str]]:
    """The rows of a table that are for GPUs, whatever host they are in.

    Args:
        text: The text of the table.

    Returns:
        What is written there by key.
    """
    found: dict[GpuRow, dict[str, str]] = {}
    for row in map(row_of, text.splitlines()):
        gpu, ranks, shared = (row.pop(key, "") for key in ("gpu", "ranks", "shared"))
        if gpu and ranks.isdecimal() and shared in ("0", "1"):
            found[GpuRow(gpu, int(ranks), shared == "1")] = row
    return dict(sorted(found.items(), key=lambda item: (item[0].gpu, item[0].shared, item[0].ranks)))


def one_word(name: str) -> str:
    """The name of a GPU as rows have it."""
    return "".join(chr(each) if 32 < each < 127 and each != ord("=") else "_" for each in name.encode())


_Values = TypeVar("_Values", Tuning, GpuTuning)


def get_tuning(group: Any, kind: type[_Values]) -> _Values:
    """The values of a phx_group, for the host or for GPUs."""
    gpu = kind is GpuTuning
    out = new_struct("phx_gpu_tuning" if gpu else "phx_tuning")
    check((lib.phx_group_get_gpu_tuning if gpu else lib.phx_group_get_tuning)(group, out))
    return kind(**{field.name: int(getattr(out, field.name)) for field in fields(kind)})


def c_tuning(tuning: Tuning | GpuTuning, kind: type[Tuning | GpuTuning]) -> Any:
    """A phx_tuning or phx_gpu_tuning pointer.

    Raises:
        InvalidArgumentError: It is not of that kind, or a value is not a size.
    """
    if not isinstance(tuning, kind):
        raise InvalidArgumentError(f"tuning is {tuning!r}; give a phalanx.core.{kind.__name__}")
    made = new_struct("phx_gpu_tuning" if kind is GpuTuning else "phx_tuning")
    for name, value in asdict(tuning).items():
        setattr(made, name, c_integer(value, name, 0, UINT64_MAX))
    return made


def c_path(path: str | os.PathLike[str] | None) -> Any:
    """A path for C; NULL is the usual place.

    Raises:
        InvalidArgumentError: It is not a path.
    """
    if path is None:
        return ffi.NULL
    try:
        raw = os.fsencode(path)
    except TypeError:
        raise InvalidArgumentError(f"path is {path!r}; give a str or a Path, or None for the usual place") from None
    if not raw or b"\0" in raw:
        raise InvalidArgumentError(f"path is {path!r}, which names no file; leave it out for the usual place")
    return raw
