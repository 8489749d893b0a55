"""Fills local tensors with their elements of a random tensor: `state` has keys, phalanx.core.random the values."""

from functools import cache, lru_cache
from math import sqrt
from typing import Any, NamedTuple

import torch

from phalanx.core import PhalanxError
from phalanx.core.dtypes import DType
from phalanx.core.random import Box, Kind, fill, fill_integers
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._layout import Runs, boxes, contiguous_stride
from phalanx.dtensor._mesh import coordinate_of

DTYPES = {getattr(torch, one.name.lower()): one for one in DType if one <= DType.BOOL}


class Distribution(NamedTuple):
    """The law of the elements: a kind with its two numbers, or integers (kind None): the smallest, and how many."""

    kind: Kind | None
    a: float
    b: float = 0.0


@lru_cache(maxsize=4096)
def _boxes(shape: tuple[int, ...], runs: tuple[Runs, ...], stride: tuple[int, ...]) -> tuple[tuple[int, Box], ...]:
    """The boxes of a local tensor, each with its place in it: one for every choice of a run of each dim."""
    steps = [int(step) for step in contiguous_stride(shape)]
    found = []
    for box in boxes(runs):
        place = sum(position * step for position, step in zip(box.source, stride, strict=True))
        first = sum(start * step for start, step in zip(box.target, steps, strict=True))
        found.append((place, Box(first, box.shape, steps, stride)))
    return tuple(found)


def fill_local(local: torch.Tensor, spec: DTensorSpec, distribution: Distribution, key: int) -> None:
    """Fill this rank's local tensor of a spec; nothing on a rank outside its mesh. Not collective.

    The tensor has any stride, and a dtype that need not be that of the spec. Partial counts as Replicate.
    """
    if local.numel() and coordinate_of(spec.mesh) is not None:
        fill_runs(local, tuple(spec.shape), spec.local_runs, distribution, key)


def fill_runs(
    local: torch.Tensor, shape: tuple[int, ...], runs: tuple[Runs, ...], distribution: Distribution, key: int
) -> None:
    """Fill a tensor with the elements of `runs` of a whole of `shape`; see `fill_local`."""
    if local.is_complex() and distribution.kind is Kind.NORMAL:
        # As torch: real and imaginary part with half the variance each.
        real = torch.view_as_real(local.resolve_conj())
        fill_runs(real, (*shape, 2), (*runs, ((0, 2),)), distribution._replace(b=distribution.b / sqrt(2)), key)
        if local.is_conj():
            local.copy_(torch.view_as_complex(real))
        return
    where = _where(local.device)
    if where is None or local.is_neg():
        made = torch.empty(local.shape, dtype=local.dtype, device="cpu" if where is None else local.device)
        fill_runs(made, shape, runs, distribution, key)
        local.copy_(made)
        return
    dtype = DTYPES.get(local.dtype)
    if dtype is None:
        raise RuntimeError(f"random numbers of {local.dtype} are not implemented: make float32 ones and convert them")
    address, itemsize = local.data_ptr(), local.element_size()
    for place, box in _boxes(shape, runs, local.stride()):
        kind, a, b = distribution
        start = address + place * itemsize
        if kind is None:
            fill_integers(start, dtype, int(a), int(b), key, box, **where)
        else:
            fill(start, dtype, kind, a, b, key, box, **where)


def _where(device: torch.device) -> dict[str, Any] | None:
    """The keyword arguments of the core for memory of a device, with the current stream of a GPU; None: not served."""
    if device.type == "cpu":
        return {}
    if device.type != "cuda" or not _fills_on(device.index):
        return None
    stream: Any = torch.cuda.current_stream(device)
    return {"device": (device.type, device.index), "stream": int(stream.cuda_stream)}


@cache
def _fills_on(gpu: int) -> bool:
    """Whether the core can run kernels on a GPU of this process. Found out once."""
    number = torch.empty(1, dtype=torch.float32, device=torch.device("cuda", gpu))
    stream: Any = torch.cuda.current_stream(number.device)
    where: dict[str, Any] = {"device": ("cuda", gpu), "stream": int(stream.cuda_stream)}
    try:
        fill(number.data_ptr(), DType.FLOAT32, Kind.UNIFORM, 0.0, 1.0, 0, Box(0, (1,), (1,), (1,)), **where)
    except PhalanxError:
        return False
    return True
