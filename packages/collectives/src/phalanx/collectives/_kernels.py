"""The parts of the ops of phalanx that are in Python: their results without data, their gradients, and kernels for
groups that the native ops do not know.

The kernels for CPU and CUDA are in libphalanx_torch.so of phalanx-core. For a group that it does not know, an op calls
its namesake in phalanx_c10d, which is here: the first such call on a group is where its ranks meet.

`phalanx_ordered` has every collective of `phalanx`, complete on return, with one argument more: a tensor that stands
for the order of what a compiled graph sends. Each op claims to write it, so a compiler keeps them in the order of the
graph, which is the same on all ranks. Other ops of compiled graphs keep results in symmetric memory (arenas), or write
them there.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.collectives import _autograd, _errors, _library, _native, _torch_compat, bits
from phalanx.collectives._library import wait
from phalanx.collectives._op_table import BLOCKING, FORMS, OPS, Form, fake_kernel, gives_nothing
from phalanx.collectives._process_group import ensure_initialized
from phalanx.collectives._registry import state_named
from phalanx.collectives._transport import transport_for

# ---- groups that the native ops do not know --------------------------------------------------------------------------


def _fallback_kernel(form: Form) -> Callable[..., Any]:
    """The kernel of an op in phalanx_c10d. Texts among its arguments come as numbers; the last one is the group's name.

    It is complete when it returns: a compiled graph, which does not know torch's rules for pending collectives, may
    write over an input at once.
    """
    op = getattr(torch.ops.phalanx, form.name)
    texts = [i for i, argument in enumerate(op.default._schema.arguments) if str(argument.type) == "str"]

    def kernel(*numbered: Any, **kwargs: Any) -> Any:
        args = list(numbered)
        for i in texts:
            args[i] = _library.text(args[i])
        try:
            tensors = args[0] if form.takes_list else args[:1]
            if not tensors:
                return None if form.writes else []
            state = state_named(args[-1])
            for tensor in tensors:
                ensure_initialized(state, tensor)
            if all(state.serves(tensor) for tensor in tensors):
                args[-1] = state.op_name  # torch may have several names for a group
                return op(*args, **kwargs)
            # One by one: what torch's back ends coalesce is bound by their own transport.
            done = [
                wait(transport_for(state, tensor).start(form.collective, tensor, *args[1:-1])) for tensor in tensors
            ]
            if form.writes:
                for target, result in zip([kwargs["out"]] if form.into_out else tensors, done, strict=True):
                    target.copy_(result.view(target.shape))
                return None
            return done if form.takes_list else done[0]
        except BaseException as error:
            _errors.keep(_errors.better(error))
            raise

    return kernel


def _broadcast_backward(tensor: torch.Tensor, src: int, group: str) -> torch.Tensor:
    total = wait(torch.ops.phalanx.all_reduce(tensor, "sum", group))
    return total if state_named(group).group_rank == src else total.zero_()


# ---- compiled graphs -------------------------------------------------------------------------------------------------


def _fake_arena(nbytes: Any, plan: str, group_name: str, gpu: int = -1) -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64)


def _fake_view(
    arena: torch.Tensor, offset: Any, size: Sequence[Any], dtype: torch.dtype, gpu: int = -1
) -> torch.Tensor:
    return arena.new_empty(size, dtype=dtype, device=torch.device("cuda", gpu) if gpu >= 0 else arena.device)


def _fake_mm_reduce_scatter(
    a: torch.Tensor, b: torch.Tensor, reduce_op: str, group_size: int, group_name: str, pieces: Any
) -> torch.Tensor:
    return a.new_empty([a.size(0) // group_size, b.size(1)])


def _fake_all_gather_mms(
    shard: torch.Tensor, bs: Sequence[torch.Tensor], group_size: int, group_name: str
) -> list[torch.Tensor]:
    return [shard.new_empty([shard.size(0) * group_size, b.size(1)]) for b in bs]


_GRAPH_FAKES: dict[str, Any] = {
    "symm_arena": _fake_arena,
    "arena_view": _fake_view,
    "arena_release_": gives_nothing,
    "mm_into_": gives_nothing,
    "bmm_into_": gives_nothing,
    "addmm_into_": gives_nothing,
    "mm_reduce_scatter": _fake_mm_reduce_scatter,
    "all_gather_mms": _fake_all_gather_mms,
}


def _symm_arena(nbytes: int, plan: int, group_name: int, gpu: int = -1) -> torch.Tensor:
    """The arena of a group that the native ops do not serve yet: a graph from a cache runs before its group is ready.

    The plan and the name of the group come as numbers; `gpu` is -1 for memory of the host.
    """
    try:
        name = _library.text(group_name)
        state = state_named(name)
        if gpu < 0 and not state.decided:
            state.decide()
        if gpu >= 0 and not state.decided_on_gpus:
            state.decide_on_gpus(torch.device("cuda", gpu))
        if gpu < 0 and (state.core is None or (nbytes and state.core.hosts > 1)):
            raise RuntimeError(
                f"symm_arena on group '{name}': this graph was compiled for ranks that share the memory of one host, "
                "and the ranks of this group do not; compile the function again with this group"
            )
        if gpu >= 0 and not state.on_gpus:
            raise RuntimeError(
                f"symm_arena on group '{name}': this graph was compiled for ranks whose GPUs the core serves, and it "
                "does not serve the GPUs of this group; compile the function again with this group"
            )
        arena: torch.Tensor = torch.ops.phalanx.symm_arena(nbytes, _library.text(plan), state.op_name, gpu)
        return arena
    except BaseException as error:
        _errors.keep(_errors.better(error))
        raise


def _without_order(fake: Any, op: Any) -> Any:
    """The fake kernel of a collective that takes `order` and `start` as its last arguments."""
    before = len(op._schema.arguments) - 2

    def ordered(*args: Any, **kwargs: Any) -> Any:
        return fake(*args[:before], **{name: given for name, given in kwargs.items() if name not in ("order", "start")})

    return ordered


# ---- registration ----------------------------------------------------------------------------------------------------


def register() -> None:
    """Register all of it. The native ops have been loaded."""
    ours, ordered, through_torch = map(_torch_compat.library, ("phalanx", "phalanx_ordered", "phalanx_c10d"))
    ours.define("broadcast_backward(Tensor tensor, int src, str group_name) -> Tensor")
    _torch_compat.implement(ours, "broadcast_backward", _broadcast_backward, "CompositeExplicitAutograd")
    _register_autograd(ours)
    fakes: dict[str, Any] = {name: fake_kernel(form) for name, form in FORMS.items()}
    for name, form in FORMS.items():
        _torch_compat.implement(through_torch, name, _fallback_kernel(form), "CompositeExplicitAutograd")
        op = getattr(torch.ops.phalanx_ordered, name).default
        torch.library.register_fake(f"phalanx_ordered::{name}", _without_order(fakes[name], op), lib=ordered)
        _torch_compat.keep_in_graphs(op)
    fakes.update({blocking: fakes[name] for blocking, name in BLOCKING.items()})
    fakes.update(
        broadcast_backward=fakes["broadcast"], wait_tensor=torch.empty_like, wait_tensor_=gives_nothing, **_GRAPH_FAKES
    )
    for name, fake in fakes.items():
        torch.library.register_fake(f"phalanx::{name}", fake, lib=ours)
        if name in _GRAPH_FAKES and name.endswith("_"):
            _torch_compat.keep_in_graphs(getattr(torch.ops.phalanx, name).default)
    bits.register(ours, {name: getattr(torch.ops.phalanx, name).default for name in fakes}, waits=("wait_tensor_",))
    bits.register(ordered, {name: getattr(torch.ops.phalanx_ordered, name).default for name in FORMS})
    _torch_compat.implement(through_torch, "symm_arena", _symm_arena, "CompositeExplicitAutograd")
    wait_op = torch.ops.phalanx.wait_tensor.default
    _torch_compat.register_functionalization(wait_op, _functional_wait)
    _torch_compat.keep_in_graphs(wait_op)


def _register_autograd(library: Any) -> None:
    compiled = _native.load(OPS)
    # Where the compiled kernels are, calls that need a gradient go from them to ops of the same names elsewhere.
    kernels = library if compiled is None else _torch_compat.library("phalanx_autograd")
    for name in OPS:
        if kernels is not library:
            kernels.define(str(getattr(torch.ops.phalanx, name).default._schema).removeprefix("phalanx::"))
        _torch_compat.implement(kernels, name, _autograd.autograd_kernel(name), "Autograd", with_keys=True)


def _functional_wait(context: Any, tensor: torch.Tensor) -> Any:
    # The result is the argument. A graph without mutations may take it for a new tensor, as nobody has the argument.
    plain = context.unwrap_tensors(tensor)
    with context.redispatch_to_next():
        done = torch.ops.phalanx.wait_tensor.default(plain)
    return context.wrap_tensors(done)
