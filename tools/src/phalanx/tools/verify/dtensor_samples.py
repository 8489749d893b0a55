"""What the sweep of DTensor tries: samples of OpInfo entries, and placements of the tensors among their arguments."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy
import torch

from phalanx.dtensor import _layout
from phalanx.dtensor.placement_types import Partial, Placement, Replicate, Shard, as_placement
from phalanx.tools._torch_compat import sample_sizes
from phalanx.tools.verify.simulate import coordinates

# Larger samples show nothing that smaller ones do not, and cost much.
_MOST_ELEMENTS = 20_000
# Some entries have hundreds of samples.
_MOST_SEEN = 64
# More inputs than this all get the same placements: one at a time would be too many.
_MOST_ALONE = 5
# Their samples say sizes by numbers, which others would contradict: kernels then read beyond the end.
_OF_OWN_SIZE = ("_segment_reduce",)

Placed = tuple[tuple[Placement, ...], ...]
"""For each tensor among the arguments, one placement for each mesh dim."""


@dataclass
class Case:
    """One sample: its arguments, with the tensors apart.

    Attributes:
        tensors: The tensors among the arguments, in order.
        make: The (args, kwargs) with other tensors in their place.
        process: What makes comparable what the op returns (of a decomposition with free signs).
        in_place: Whether the in-place variant can be tried: the input is one tensor and is not broadcast.
    """

    tensors: list[torch.Tensor]
    make: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    process: Callable[[Any], Any]
    in_place: bool


def seed(number: int) -> None:
    """Let everything that draws numbers on this rank begin anew."""
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def leaves_of(value: Any) -> list[Any]:
    """What a nest of lists, tuples and dicts holds, in order."""
    if isinstance(value, (list, tuple)):
        return [leaf for one in value for leaf in leaves_of(one)]
    if isinstance(value, dict):
        return [leaf for one in value.values() for leaf in leaves_of(one)]
    return [value]


def replaced(value: Any, tensors: Iterator[Any]) -> Any:
    """The nest with other tensors in the place of its tensors."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, dict):
        return {name: replaced(one, tensors) for name, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(replaced(one, tensors) for one in value))
    if isinstance(value, (list, tuple)):
        return type(value)(replaced(one, tensors) for one in value) if type(value) in (list, tuple) else value
    return value


# ---- samples --------------------------------------------------------------------------------------------------------


def dtype_of(info: Any) -> torch.dtype | None:
    """The dtype in which an entry is swept: float32, else another that it has on a CPU."""
    for dtype in (torch.float32, torch.int64, torch.complex64, torch.bool, torch.uint8, torch.int8):
        if dtype in info.dtypes:
            return dtype
    return None


def cases(info: Any, dtype: torch.dtype, ranks: int, count: int) -> list[Case]:
    """Samples of an entry: a third in torch's own sizes (5, 10), in sizes that the ranks divide, and in uneven ones.

    Of those the last rank has less than the others. If there are none, one more: torch's first that is uneven.

    Args:
        info: The OpInfo entry.
        dtype: The dtype of its samples.
        ranks: The number that sizes shall divide, or not.
        count: The most samples to take.

    Raises:
        Exception: What torch's generator of samples raises.
    """
    if info.name in _OF_OWN_SIZE:
        return _some(info, dtype, count)
    found = _some(info, dtype, (count + 2) // 3)
    for less, share in ((0, (count + 1) // 3), (1, count // 3)):
        times = {"XS": 1 + less, "S": 2 + less, "M": 4, "L": 8}
        try:
            with sample_sizes({name: each * ranks - less for name, each in times.items()}):
                found += _some(info, dtype, share)
        except Exception:  # a generator that knows its sizes
            continue
    if not any(_is_uneven(one, ranks) for one in found):
        found += [one for one in _some(info, dtype, _MOST_SEEN) if _is_uneven(one, ranks)][:1]
    return found


def _is_uneven(case: Case, ranks: int) -> bool:
    sizes = [size for one in case.tensors for size in one.shape]
    return any(size % ranks and size > -(-size // ranks) * (ranks - 1) for size in sizes)


def _some(info: Any, dtype: torch.dtype, count: int) -> list[Case]:
    seed(3)
    grad = bool(info.supports_autograd) and (dtype.is_floating_point or dtype.is_complex)
    found: list[Case] = []
    for sample in info.sample_inputs("cpu", dtype, requires_grad=grad):
        case = _case(sample)
        if case is not None:
            found.append(case)
        if len(found) == _MOST_SEEN:
            break
    return found if len(found) <= count else [found[index * len(found) // count] for index in range(count)]


def _case(sample: Any) -> Case | None:
    nest = (sample.input, *sample.args), sample.kwargs
    tensors = [one for one in leaves_of(nest) if isinstance(one, torch.Tensor)]
    if any(type(one) not in (torch.Tensor, torch.nn.Parameter) or one.layout != torch.strided for one in tensors):
        return None
    if not tensors or sum(one.numel() for one in tensors) > _MOST_ELEMENTS:
        return None

    def make(others: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = replaced(nest, iter(others))
        return args, kwargs

    in_place = isinstance(sample.input, torch.Tensor) and not sample.broadcasts_input
    return Case(tensors, make, sample.output_process_fn_grad, in_place)


# ---- placements -----------------------------------------------------------------------------------------------------


def placings(tensors: Sequence[torch.Tensor], mesh: Sequence[int], count: int) -> list[Placed]:
    """Placements of tensors on a mesh, spread evenly over all that are tried.

    On one mesh dim: all tensors cut in the same way, each alone cut on each of its dims, the first a Partial, nothing
    cut. On several: pairs of these.

    Args:
        tensors: The tensors.
        mesh: The mesh.
        count: The most placings to give.
    """
    single = _single(tensors)
    if len(mesh) == 1:
        return [tuple((one,) for one in placed) for placed in _spread(single, count)]
    pairs = list(product(single, repeat=len(mesh)))
    random.Random(7).shuffle(pairs)
    return [tuple(zip(*placed, strict=True)) for placed in pairs[:count]]


def _spread(values: list[Any], count: int) -> list[Any]:
    return values if len(values) <= count else [values[index * len(values) // count] for index in range(count)]


def _single(tensors: Sequence[torch.Tensor]) -> list[tuple[Placement, ...]]:
    whole: list[Placement] = [Replicate()] * len(tensors)
    found: list[tuple[Placement, ...]] = []
    if tensors[0].dtype != torch.bool:
        found.append((Partial("sum"), *whole[1:]))
    ranks = max(one.ndim for one in tensors)
    for back in range(1, ranks + 1):  # the same for all, as broadcasting aligns dims: counted from the last
        found.append(tuple(Shard(one.ndim - back) if one.ndim >= back else Replicate() for one in tensors))
    if 1 < len(tensors) <= _MOST_ALONE:
        for index, one in enumerate(tensors):
            for dim in range(one.ndim):
                found.append((*whole[:index], Shard(dim), *whole[index + 1 :]))
        if tensors[0].ndim > 1 and tensors[1].ndim:
            found.append((Shard(0), Shard(tensors[1].ndim - 1), *whole[2:]))
    found.append(tuple(whole))
    return list(dict.fromkeys(found))


def kind_of(tensors: Sequence[torch.Tensor], placed: Placed, mesh: Sequence[int]) -> str:
    """`even` if all ranks have as much of every tensor, `empty` if one has nothing, else `uneven`."""
    kind = "even"
    for tensor, placements in zip(tensors, placed, strict=True):
        own = tuple(map(as_placement, placements))
        sizes = {tuple(_layout.local_shape(tensor.shape, mesh, own, coordinate)) for coordinate in coordinates(mesh)}
        if tensor.numel() and any(0 in one for one in sizes):
            return "empty"
        if len(sizes) > 1:
            kind = "uneven"
    return kind


def shown(tensors: Sequence[torch.Tensor], placed: Placed) -> str:
    """Tensors and their placements in few words."""
    return ", ".join(
        f"{str(one.dtype)[6:]}{list(one.shape)}{''.join(map(str, placements))}"
        for one, placements in zip(tensors, placed, strict=True)
    )
