"""torch.ops.phalanx.*: loading the native ops, their fake kernels, and the road through torch.distributed.

The ops and their kernels for CPU and CUDA are in libphalanx_torch.so of phalanx-core. For a group that it does not
know, an op calls its namesake in phalanx_c10d, which is here: the first such call on a group is where its ranks meet.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from phalanx.collectives import _autograd, _compiled_ops, _torch_compat, bits
from phalanx.collectives._reductions import check_reduction
from phalanx.core import load_torch_ops
from phalanx.core.torch_ops import TorchOps

_unregistered: list[ImportError] = []  # why `register` failed


@cache
def _load() -> TorchOps | ImportError:
    try:
        return load_torch_ops()
    except ImportError as error:
        return error


def _found() -> TorchOps | ImportError:
    return _unregistered[0] if _unregistered else _load()


def loaded() -> TorchOps:
    """The phxt_* functions.

    Raises:
        ImportError: The ops could not be registered.
    """
    found = _found()
    if isinstance(found, ImportError):
        raise found
    return found


def refusal() -> str:
    """Why this process cannot use the core, or ""."""
    found = _found()
    return str(found) if isinstance(found, ImportError) else ""


# ---- fake kernels: what torch.compile knows of the results -----------------------------------------------------------


def _contiguous_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _rows(tensor: torch.Tensor, rows: Any) -> torch.Tensor:
    return tensor.new_empty([rows, *tensor.size()[1:]])


def _fake_all_reduce(tensor: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    check_reduction(reduce_op)
    return _contiguous_like(tensor)


def _fake_all_gather(tensor: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    return _rows(tensor, group_size * (tensor.size(0) if tensor.dim() else 1))


def _fake_reduce_scatter(tensor: torch.Tensor, reduce_op: str, group_size: int, group_name: str) -> torch.Tensor:
    check_reduction(reduce_op)
    return _rows(tensor, tensor.size(0) // group_size)


def _fake_all_to_all(
    tensor: torch.Tensor, output_split_sizes: Sequence[Any], input_split_sizes: Sequence[Any], group_name: str
) -> torch.Tensor:
    return _rows(tensor, sum(output_split_sizes)) if output_split_sizes else _contiguous_like(tensor)


def _fake_all_gather_v(tensor: torch.Tensor, sizes: Sequence[Any], group_name: str) -> torch.Tensor:
    return _rows(tensor, sum(sizes))


def _fake_reduce_scatter_v(
    tensor: torch.Tensor, reduce_op: str, sizes: Sequence[Any], own: Any, group_name: str
) -> torch.Tensor:
    check_reduction(reduce_op)
    return _rows(tensor, own)


def _each(fake: Any) -> Any:
    """The fake kernel of the coalesced form of an op that has this one."""
    return lambda tensors, *args: [fake(tensor, *args) for tensor in tensors]


def _fake_broadcast(tensor: torch.Tensor, src: int, group_name: str) -> torch.Tensor:
    return _contiguous_like(tensor)


def _fake_wait(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor)


def _fake_in_place(*_: Any, **__: Any) -> None:
    return None


_FAKES: dict[str, Any] = {
    "all_reduce": _fake_all_reduce,
    "all_gather_into_tensor": _fake_all_gather,
    "reduce_scatter_tensor": _fake_reduce_scatter,
    "all_gather_v": _fake_all_gather_v,
    "reduce_scatter_v": _fake_reduce_scatter_v,
    "all_to_all_single": _fake_all_to_all,
    "broadcast": _fake_broadcast,
    "broadcast_backward": _fake_broadcast,
    "wait_tensor": _fake_wait,
    "all_reduce_": _fake_in_place,
    "broadcast_": _fake_in_place,
    "all_gather_into_tensor_out": _fake_in_place,
    "reduce_scatter_tensor_out": _fake_in_place,
    "wait_tensor_": _fake_in_place,
    "all_reduce_coalesced": _each(_fake_all_reduce),
    "all_reduce_coalesced_": _fake_in_place,
    "all_gather_into_tensor_coalesced": _each(_fake_all_gather),
    "reduce_scatter_tensor_coalesced": _each(_fake_reduce_scatter),
}
_FAKES.update({blocking: _FAKES[name] for blocking, name in _autograd.BLOCKING.items()})


# ---- the road through torch.distributed ------------------------------------------------------------------------------


def text(number: int) -> str:
    """What the native ops mean by this number, where they have to hand on a text."""
    ops = loaded()
    return str(bytes(ops.ffi.string(ops.lib.phxt_text(number))).decode())


def _all_gather_v_through_torch(tensor: torch.Tensor, sizes: Sequence[int], group_name: str) -> torch.Tensor:
    everywhere = torch.cat([tensor] * len(sizes))
    started: torch.Tensor = torch.ops._c10d_functional.all_to_all_single(
        everywhere, sizes, [tensor.size(0)] * len(sizes), group_name
    )
    return started


def _reduce_scatter_v_through_torch(
    tensor: torch.Tensor, reduce_op: str, sizes: Sequence[int], own: int, group_name: str
) -> torch.Tensor:
    from phalanx.collectives import _registry  # it needs this module

    before = sum(sizes[: _registry.entry_named(group_name).group_rank])
    whole = torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_reduce(tensor, check_reduction(reduce_op), group_name)
    )
    part: torch.Tensor = whole.narrow(0, before, own).clone()
    return part


_THROUGH_TORCH: dict[str, Any] = {
    "all_gather_v": _all_gather_v_through_torch,
    "reduce_scatter_v": _reduce_scatter_v_through_torch,
}


def through_torch(name: str) -> Any:
    """The op of that name, by torch.distributed. It takes a contiguous tensor, and gives one that may be pending."""
    return _THROUGH_TORCH.get(name) or getattr(torch.ops._c10d_functional, name)


def _road(name: str, texts: tuple[int, ...], even_splits: bool = False) -> Any:
    """The kernel of phalanx_c10d::<name>.

    It is complete when it returns: a compiled graph, which does not know torch's rules for pending collectives, may
    write over an input at once.

    Args:
        name: Of the op.
        texts: Positions of the arguments that are texts, which come as numbers; the last one is the group's name.
        even_splits: Arguments 1 and 2 are split sizes, empty for an even split.
    """

    def kernel(*args: Any, **kwargs: Any) -> Any:
        from phalanx.collectives import _errors, _groups, _registry  # they need this module

        given = list(args)
        for i in texts:
            given[i] = text(given[i])
        try:
            entry = _registry.entry_named(given[texts[-1]])
            tensor = given[0]
            _groups.meet(entry, tensor)
            if entry.served_here(tensor):
                return getattr(torch.ops.phalanx, name)(*given, **kwargs)
            if even_splits and not given[1] and not given[2]:
                given[1] = given[2] = even(tensor.size(0), entry.size)
            started = through_torch(name)(tensor.contiguous(), *given[1:], **kwargs)
            done = torch.ops._c10d_functional.wait_tensor(started)
            return None if name.endswith(("_", "_out")) else done
        except BaseException as error:
            _errors.keep(_errors.better(error))
            raise

    return kernel


def _overwrite(tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
    """Copy results of ops, which may be pending."""
    for tensor, result in zip(tensors, results, strict=True):
        tensor.copy_(torch.ops.phalanx.wait_tensor(result))


def _in_place_road(name: str, texts: tuple[int, ...]) -> Any:
    road = _road(name.removesuffix("_"), texts)

    def kernel(tensor: torch.Tensor, *args: Any) -> None:
        _overwrite([tensor], [road(tensor, *args)])

    return kernel


def _coalesced_road(name: str, texts: tuple[int, ...]) -> Any:
    """One by one: what torch's backends coalesce is bound by their own transport."""
    road = _road(name.removesuffix("_").removesuffix("_coalesced"), texts)

    def kernel(tensors: Sequence[torch.Tensor], *args: Any) -> list[torch.Tensor] | None:
        done = [road(tensor, *args) for tensor in tensors]
        if not name.endswith("_"):
            return done
        _overwrite(tensors, done)
        return None

    return kernel


def even(rows: int, size: int) -> list[int]:
    """The split sizes of an even split of dim 0.

    Raises:
        ValueError: It cannot be split evenly.
    """
    if rows % size:
        raise ValueError(
            f"dimension 0 has size {rows}, which must be a multiple of the group size {size} where no split sizes are "
            "given"
        )
    return [rows // size] * size


_ROADS = {
    "all_reduce": _road("all_reduce", (1, 2)),
    "all_reduce_": _in_place_road("all_reduce_", (1, 2)),
    "all_gather_into_tensor": _road("all_gather_into_tensor", (2,)),
    "all_gather_into_tensor_out": _road("all_gather_into_tensor_out", (2,)),
    "reduce_scatter_tensor": _road("reduce_scatter_tensor", (1, 3)),
    "reduce_scatter_tensor_out": _road("reduce_scatter_tensor_out", (1, 3)),
    "all_gather_v": _road("all_gather_v", (2,)),
    "reduce_scatter_v": _road("reduce_scatter_v", (1, 4)),
    "all_to_all_single": _road("all_to_all_single", (3,), even_splits=True),
    "broadcast": _road("broadcast", (2,)),
    "broadcast_": _in_place_road("broadcast_", (2,)),
    "all_reduce_coalesced": _coalesced_road("all_reduce_coalesced", (1, 2)),
    "all_reduce_coalesced_": _coalesced_road("all_reduce_coalesced_", (1, 2)),
    "all_gather_into_tensor_coalesced": _coalesced_road("all_gather_into_tensor_coalesced", (2,)),
    "reduce_scatter_tensor_coalesced": _coalesced_road("reduce_scatter_tensor_coalesced", (1, 3)),
}


# ---- registration ----------------------------------------------------------------------------------------------------

_libraries: list[Any] = []  # what is registered lives as long as these


def register(*others: Callable[[], None]) -> None:
    """Load the native ops and register the rest. A later call does nothing. Warns where that is impossible.

    Args:
        others: Register the ops of other modules; called after those of this one.
    """
    if _libraries or _unregistered:
        return
    found = _load()
    if not isinstance(found, ImportError):
        try:
            _register()
            for other in others:
                other()
            return
        except Exception as error:  # such as under torch::deploy, whose interpreters cannot register ops
            _libraries.clear()
            found = ImportError(f"ops cannot be registered with torch: {type(error).__name__}: {error}")
            _unregistered.append(found)
    warnings.warn(f"phalanx.collectives cannot run collectives: {found}", stacklevel=3)


def _register() -> None:
    ours = _torch_compat.fragment("phalanx")
    roads = _torch_compat.fragment("phalanx_c10d")
    _libraries.extend((ours, roads))
    _libraries.extend(_autograd.register(ours))
    for name, fake in _FAKES.items():
        torch.library.register_fake(f"phalanx::{name}", fake, lib=ours)
    for name, road in _ROADS.items():
        _torch_compat.implement(roads, name, road, "CompositeExplicitAutograd")
    _compiled_ops.register(_FAKES)
    plain = {name: getattr(torch.ops.phalanx, name).default for name in (*_FAKES, *_compiled_ops.FAKES)}
    bits.register(ours, plain, waits=("wait_tensor_",))
    wait = torch.ops.phalanx.wait_tensor.default
    if _torch_compat.aliases_argument(wait):
        _torch_compat.register_functionalization(wait, _functional_wait)
    _torch_compat.keep_in_graphs(wait)


def _functional_wait(context: Any, tensor: torch.Tensor) -> Any:
    # The result is the argument. A graph without mutations may take it for a new tensor, as nobody has the argument.
    plain = context.unwrap_tensors(tensor)
    with context.redispatch_to_next():
        done = torch.ops.phalanx.wait_tensor.default(plain)
    return context.wrap_tensors(done)
