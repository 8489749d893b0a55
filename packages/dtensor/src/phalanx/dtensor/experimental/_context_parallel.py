"""context_parallel: a program written for whole sequences, run with a part of each sequence on every rank.

Within the context scaled_dot_product_attention takes plain tensors as this rank's parts and attends to the whole, as
`algorithms/ring_attention.py` does it. For DTensors sharded on the sequence no context is needed.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from phalanx.dtensor import _layout, _torch_compat
from phalanx.dtensor._algorithms.ring_attention import (
    SEQUENCE,
    Ring,
    ring_attention,
    ring_attention_backward,
    wide_dtype,
)
from phalanx.dtensor._mesh import coordinate_of, describe
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor.experimental._func_map import global_from_shards
from phalanx.dtensor.placement_types import Shard

_attention: Callable[..., torch.Tensor] = functional.scaled_dot_product_attention


# ---- which part a rank has -------------------------------------------------------------------------------------------


def head_and_tail(length: int, ranks: int, place: int) -> tuple[tuple[int, int], ...]:
    """The runs of a rank: chunk `place` of twice as many chunks as there are ranks, and the one as far from the end.

    So that causal attention costs every rank the same. Chunks are those of torch.chunk; empty ones are left out.
    """
    both = (_layout.chunk(length, 2 * ranks, place), _layout.chunk(length, 2 * ranks, 2 * ranks - 1 - place))
    return tuple((int(begin), int(count)) for begin, count in both if count)


def _own(buffer: torch.Tensor, dim: int, runs: Sequence[tuple[int, int]]) -> torch.Tensor:
    return torch.cat([buffer.narrow(dim, *run) for run in runs or ((0, 0),)], dim)


# ---- the context -----------------------------------------------------------------------------------------------------


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: list[torch.Tensor] | None = None,
    buffer_seq_dims: list[int] | None = None,
    no_restore_buffers: AbstractSet[torch.Tensor] | None = None,
) -> Iterator[None]:
    """Within it each rank of a mesh works on its part of the sequence. Collective over the mesh in each attention.

    `buffers` are split in place: each rank retains a piece from the head and one from the tail of the sequence, so that
    causal attention costs the same on all ranks. Then scaled_dot_product_attention of plain tensors gives, for this
    rank's part, the result for the whole sequence, forward and backward. All other ops must work on each element of the
    sequence alone. A length may be any number. The backward may run after the context, and activation checkpoints are
    computed again as within it; a function compiled by torch.compile may be called.

    Args:
        mesh: A mesh of one dim, with CPU tensors.
        buffers: The tensors that depend on the position: inputs, labels, position embeddings. They must not be
            parameters or results that autograd has recorded.
        buffer_seq_dims: The dim of the sequence in each buffer.
        no_restore_buffers: The buffers that need not be made whole again at the end.

    Raises:
        ValueError: `buffer_seq_dims` does not have one dim for each buffer, a buffer has no such dim or is the result
            of an op that records gradients, `no_restore_buffers` has other tensors, or the mesh has several dims.
        NotImplementedError: An attention has a mask, dropout, or tensors that are not on the CPU.

    Source: torch.distributed.tensor.experimental.context_parallel.

    Example:
        >>> x = torch.arange(8.0).reshape(1, 8)
        >>> with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):  # over two ranks
        ...     x.shape
        torch.Size([1, 4])
    """
    if mesh.ndim != 1:
        raise ValueError(
            f"context_parallel: the mesh must have one dim, and {describe(mesh)} has {mesh.ndim}: take one by its "
            'name, as in mesh["cp"]'
        )
    given, dims = list(buffers or ()), list(buffer_seq_dims or ())
    kept = list(no_restore_buffers or ())
    _check_buffers(given, dims, kept)
    place = (coordinate_of(mesh) or (0,))[0]
    lengths = _lengths([int(buffer.shape[dim]) for buffer, dim in zip(given, dims, strict=True)], mesh.size(), place)
    originals: list[torch.Tensor | None] = []
    with torch.no_grad():
        for buffer, dim in zip(given, dims, strict=True):
            originals.append(None if any(buffer is one for one in kept) else buffer.clone())
            own = _own(buffer, dim, head_and_tail(buffer.shape[dim], mesh.size(), place))
            buffer.resize_(own.shape).copy_(own)
    context = _Context(mesh, lengths)
    try:
        with context.entered():
            yield
    finally:
        with torch.no_grad():
            for buffer, original in zip(given, originals, strict=True):
                if original is not None:
                    if context.is_checkpointed:
                        context.parts.append((buffer, buffer.clone()))
                    buffer.resize_(original.shape).copy_(original)


def _lengths(wholes: Sequence[int], ranks: int, place: int) -> dict[int, int]:
    """The length of the whole sequence by that of this rank's part; -1 if it could be of another one on any rank."""
    found: dict[int, int] = {}
    parts = {
        whole: [sum(count for _, count in head_and_tail(whole, ranks, at)) for at in range(ranks)] for whole in wholes
    }
    for whole, own in parts.items():
        mistaken = any(a == b for other in parts if other != whole for a, b in zip(own, parts[other], strict=True))
        found[own[place]] = -1 if mistaken else whole
    return found


def _check_buffers(buffers: Sequence[torch.Tensor], dims: Sequence[int], kept: Sequence[torch.Tensor]) -> None:
    if len(buffers) != len(dims):
        raise ValueError(
            f"context_parallel: buffer_seq_dims must have one dim for each buffer: there are {len(dims)} "
            f"for {len(buffers)}"
        )
    if not all(any(one is buffer for buffer in buffers) for one in kept):
        raise ValueError("context_parallel: no_restore_buffers has a tensor that is not one of the buffers")
    for index, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        if not -buffer.ndim <= dim < buffer.ndim:
            raise ValueError(
                f"context_parallel: buffer {index} has shape {tuple(buffer.shape)}, which has no dim {dim}"
            )
        if buffer.requires_grad or isinstance(buffer, DTensor):
            raise ValueError(
                f"context_parallel: buffer {index} requires gradients or is a DTensor. It is split in place, so give a "
                "plain tensor without gradients"
            )


class _Context:
    """The state of a context, with all that is needed to repeat a computation of it.

    Attributes:
        mode: What sees the attentions.
        is_checkpointed: Whether an attention was within an activation checkpoint, which may compute it again when the
            context has been left.
        parts: The buffers, and copies of the parts that this rank had of them: what was checkpointed may read them.
    """

    def __init__(self, mesh: DeviceMesh, lengths: dict[int, int]) -> None:
        ranks = [int(rank) for rank in mesh.mesh.tolist()]
        group = str(mesh.get_group().group_name) if len(ranks) > 1 else ""
        self.mode = _Attention(lengths, ranks, (coordinate_of(mesh) or (0,))[0], group)
        self.is_checkpointed = False
        self.parts: list[tuple[torch.Tensor, torch.Tensor]] = []

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Attend to whole sequences, on this thread."""
        _contexts.active.append(self)
        try:
            with self.mode:
                yield
        finally:
            _contexts.active.pop()

    @contextmanager
    def entered_again(self, holder: Any) -> Iterator[None]:
        """As before, for what a checkpoint computes again: buffers show this rank's parts, as they did."""
        parts, self.parts = self.parts, []  # a checkpoint within a checkpoint finds them there
        wholes = [buffer.data for buffer, _ in parts]
        for buffer, part in parts:
            buffer.data = part
        try:
            with self.entered():
                yield
        finally:
            self.parts = parts
            for (buffer, part), whole in zip(parts, wholes, strict=True):
                _torch_compat.keep_as_recomputed(holder, buffer, part.detach())
                buffer.data = whole
                # An autograd graph that has saved the buffer itself is told that its values have changed.
                torch.autograd.graph.increment_version(buffer)


class _Contexts(threading.local):
    """The contexts in which this thread is, the innermost last."""

    def __init__(self) -> None:
        self.active: list[_Context] = []


_contexts = _Contexts()


class _Again:
    """A function that a checkpoint calls to compute again what it has not kept: within the context in which it was."""

    def __init__(self, context: _Context, holder: Any, function: Callable[..., Any]) -> None:
        self.context = context
        self.holder = weakref.proxy(holder) if hasattr(type(holder), "__weakref__") else holder
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.context.entered_again(self.holder):
            return self.function(*args, **kwargs)


def _survive_checkpoints() -> None:
    """Let the checkpoints in which an attention is computed enter its context, whenever they compute it again."""
    if not _contexts.active:
        return
    context = _contexts.active[-1]
    for holder, name in _torch_compat.enclosing_checkpoints():
        function = getattr(holder, name)
        if not (isinstance(function, _Again) and function.context is context):
            setattr(holder, name, _Again(context, holder, function))
            context.is_checkpointed = True


class _Attention(TorchFunctionMode):
    """Sees the calls of scaled_dot_product_attention within the context. Dynamo traces it."""

    def __init__(self, lengths: dict[int, int], ranks: list[int], place: int, group: str) -> None:
        super().__init__()
        self.given = lengths, ranks, place, group

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _attention and not any(isinstance(one, DTensor) for one in (*args, *kwargs.values())):
            return self._attend(*args, **kwargs)
        if func is checkpoint:  # Dynamo shows it to modes, and traces without them what it runs
            raise NotImplementedError(
                "context_parallel: a checkpoint within a compiled function would not attend to the whole sequence: "
                "compile the function that is checkpointed, as in checkpoint(torch.compile(function), x)"
            )
        return func(*args, **kwargs)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if attn_mask is not None or dropout_p != 0:
            what = "a mask" if attn_mask is not None else "dropout"
            raise NotImplementedError(
                f"context_parallel: scaled_dot_product_attention with {what}: use is_causal, or attend to DTensors"
            )
        if query.device.type != "cpu" or not query.dtype.is_floating_point or query.shape[-1] != value.shape[-1]:
            raise NotImplementedError(
                "context_parallel: scaled_dot_product_attention needs floating tensors on the CPU whose query, key and "
                f"value have as many features; they are {query.dtype} {tuple(query.shape)} and {tuple(value.shape)} on "
                f"{query.device}"
            )
        shape = query.shape
        if query.ndim != 4:
            query, key, value = _as_four(query), _as_four(key), _as_four(value)
        if enable_gqa:
            times = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        wholes = [self._whole(query.shape[SEQUENCE]), self._whole(key.shape[SEQUENCE])]
        _, ranks, place, group = self.given
        result: torch.Tensor = torch.ops.phalanx_dtensor.ring_attention(
            query, key, value, ranks, place, group, wholes, is_causal, scale
        )[0]
        return result.reshape(*shape[:-1], value.shape[-1])

    def _whole(self, own: int) -> int:
        """The length of a sequence of which this rank has `own` elements."""
        lengths, ranks, *_ = self.given
        whole = lengths.get(own, own * len(ranks))
        if whole < 0:
            raise ValueError(
                "context_parallel: two buffers of different lengths have parts of one length on a rank, so the length "
                "of the whole is not known: pad them to the same length, or to multiples of twice the number of ranks"
            )
        return whole


def _as_four(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with batch dims of any number as one with two."""
    return tensor.reshape(-1, 1, *tensor.shape[-2:])


# ---- ops, which compiled functions call as well ----------------------------------------------------------------------


def _ring(ranks: Sequence[int], place: int, group: str, lengths: Sequence[int]) -> Ring:
    queries, keys = (tuple(head_and_tail(length, len(ranks), each) for each in range(len(ranks))) for length in lengths)
    return Ring(tuple(ranks), place, _torch_compat.group_named(group) if group else None, queries, keys)


def _forward_kernel(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value, *ring, causal, scale = given
    _survive_checkpoints()
    return ring_attention(query, key, value, _ring(*ring), causal, scale)


def _forward_fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    total = query.new_empty(query.shape[:-1], dtype=wide_dtype(query.dtype))
    return query.new_empty((*query.shape[:-1], value.shape[-1])), total


def _backward_kernel(*given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad, query, key, value, output, total, *ring, causal, scale = given
    found = ring_attention_backward(grad, query, key, value, output, total, _ring(*ring), causal, scale)
    # They may be views of one tensor, which results of an op are not to be.
    return found[0], found[1].clone(), found[2].clone()


def _backward_fake(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


_TENSORS = "Tensor query, Tensor key, Tensor value"
_GIVEN = "int[] ranks, int place, str group, SymInt[] lengths, bool causal, float? scale"
_BACKWARD = f"(Tensor grad, {_TENSORS}, Tensor output, Tensor total, {_GIVEN}) -> (Tensor, Tensor, Tensor)"
_library = _torch_compat.op_library(
    "phalanx_dtensor",
    (
        (f"ring_attention({_TENSORS}, {_GIVEN}) -> (Tensor, Tensor)", _forward_kernel, _forward_fake, ()),
        (f"ring_attention_backward{_BACKWARD}", _backward_kernel, _backward_fake, ()),
    ),
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.given = inputs[3:]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: torch.Tensor | None, _: Any) -> Any:
    if grad is None:
        return (None,) * 9
    found = torch.ops.phalanx_dtensor.ring_attention_backward(grad, *ctx.saved_tensors, *ctx.given)
    return (*found, *(None,) * 6)


def _no_gradients(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(
        "context_parallel: attention has no second derivatives: call attention with DTensors on the mesh instead"
    )


_torch_compat.add_gradient("phalanx_dtensor::ring_attention", _gradients, _save, _library)
_torch_compat.add_gradient("phalanx_dtensor::ring_attention_backward", _no_gradients, None, _library)


# ---- whole again -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def context_parallel_unshard(mesh: DeviceMesh, buffers: list[torch.Tensor], seq_dims: list[int]) -> list[torch.Tensor]:
    """The whole tensors of which ranks have the parts that `context_parallel` gives them. Collective over the mesh.

    Args:
        mesh: The mesh of the context.
        buffers: This rank's parts.
        seq_dims: The dim of the sequence in each.

    Returns:
        The whole tensors, in the order of the sequence.

    Raises:
        ValueError: `seq_dims` is not one dim for each buffer.

    Source: torch.distributed.tensor.experimental.context_parallel_unshard, without its load balancers.

    Example:
        >>> x = torch.arange(4.0)
        >>> with context_parallel(mesh, buffers=[x], buffer_seq_dims=[0]):
        ...     context_parallel_unshard(mesh, [x * 2], [0])
        [tensor([0., 2., 4., 6.])]
    """
    if len(buffers) != len(seq_dims):
        raise ValueError(
            f"context_parallel_unshard: seq_dims must have one dim for each buffer: {len(seq_dims)} for {len(buffers)}"
        )
    found = []
    for buffer, dim in zip(buffers, seq_dims, strict=True):
        dim %= buffer.ndim
        placements, shape = global_from_shards(buffer, mesh, (Shard(dim),))
        whole = DTensor.from_local(buffer.contiguous(), mesh, placements, shape=shape).full_tensor()
        order = [
            position
            for place in range(mesh.size())
            for begin, count in head_and_tail(shape[dim], mesh.size(), place)
            for position in range(begin, begin + count)
        ]
        found.append(whole.index_select(dim, torch.tensor(order, dtype=torch.int64).argsort().to(buffer.device)))
    return found
