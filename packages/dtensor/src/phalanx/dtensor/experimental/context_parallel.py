"""context_parallel: a program written for whole sequences, run with a part of each sequence on every rank.

Within the context scaled_dot_product_attention takes plain tensors as this rank's parts and attends to the whole, as
`parallel/context.py` does it. For DTensors sharded on the sequence no context is needed.
"""

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from phalanx.dtensor import layout
from phalanx.dtensor._mesh import coordinate_of, describe
from phalanx.dtensor.api import DTensor
from phalanx.dtensor.experimental.local_map import whole_of_pieces
from phalanx.dtensor.layout import Runs
from phalanx.dtensor.parallel.context import SEQUENCE, Ring, ring_attention, ring_attention_backward
from phalanx.dtensor.placements import Shard

_attention: Callable[..., torch.Tensor] = functional.scaled_dot_product_attention


# ---- which part a rank has -------------------------------------------------------------------------------------------


def head_and_tail(length: int, ranks: int, place: int) -> Runs:
    """The runs of a rank: chunk `place` of twice as many chunks as there are ranks, and the one as far from the end.

    So that causal attention costs every rank the same. Chunks are those of torch.chunk; empty ones are left out.
    """
    both = (layout.chunk(length, 2 * ranks, place), layout.chunk(length, 2 * ranks, 2 * ranks - 1 - place))
    return tuple((int(begin), int(count)) for begin, count in both if count)


def _own(buffer: torch.Tensor, dim: int, runs: Runs) -> torch.Tensor:
    return torch.cat(
        [buffer.narrow(dim, int(begin), int(count)) for begin, count in runs] or [buffer.narrow(dim, 0, 0)], dim
    )


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

    `buffers` are cut in place: each rank keeps a piece from the head and one from the tail of the sequence, so that
    causal attention costs all the same. Then scaled_dot_product_attention of plain tensors gives what it would give for
    whole sequences, for this rank's part, forward and backward. Everything else must work on each element of the
    sequence alone. Lengths need not be divisible by anything.

    Args:
        mesh: A mesh of one dim, with CPU tensors.
        buffers: What depends on the position: inputs, labels, position embeddings. No parameters, nothing that
            autograd has recorded.
        buffer_seq_dims: The dim of the sequence in each.
        no_restore_buffers: Those of them that need not be made whole again at the end.

    Raises:
        ValueError: `buffer_seq_dims` is not one dim for each buffer, a buffer has no such dim or is the result of an op
            that records gradients, `no_restore_buffers` has others, or the mesh has several dims.
        NotImplementedError: In an attention: a mask, dropout, or tensors that are not on the CPU.

    Source: torch.distributed.tensor.experimental.context_parallel.
    """
    if mesh.ndim != 1:
        raise ValueError(
            f"context_parallel: the mesh must have one dim, and {describe(mesh)} has {mesh.ndim}: take one by its "
            'name, as in mesh["cp"]'
        )
    given, dims = list(buffers or ()), list(buffer_seq_dims or ())
    kept = list(no_restore_buffers or ())
    _check_buffers(given, dims, kept)
    coordinate = coordinate_of(mesh)
    lengths: dict[int, int] = {}
    originals: list[torch.Tensor | None] = []
    with torch.no_grad():
        for buffer, dim in zip(given, dims, strict=True):
            originals.append(None if any(buffer is one for one in kept) else buffer.clone())
            runs = head_and_tail(buffer.shape[dim], mesh.size(), 0 if coordinate is None else coordinate[0])
            own, whole = _own(buffer, dim, runs), buffer.shape[dim]
            lengths[own.shape[dim]] = whole if lengths.get(own.shape[dim], whole) == whole else -1
            buffer.resize_(own.shape).copy_(own)
    try:
        with _Attention(mesh, lengths):
            yield
    finally:
        with torch.no_grad():
            for buffer, original in zip(given, originals, strict=True):
                if original is not None:
                    buffer.resize_(original.shape).copy_(original)


def _check_buffers(buffers: Sequence[torch.Tensor], dims: Sequence[int], kept: Sequence[torch.Tensor]) -> None:
    if len(buffers) != len(dims):
        raise ValueError(
            f"context_parallel: buffer_seq_dims must have one dim for each buffer: there are {len(dims)} "
            f"for {len(buffers)}"
        )
    if not all(any(one is buffer for buffer in buffers) for one in kept):
        raise ValueError("context_parallel: no_restore_buffers must be some of the buffers, and has another tensor")
    for index, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        if not -buffer.ndim <= dim < buffer.ndim:
            raise ValueError(f"context_parallel: buffer {index} has shape {tuple(buffer.shape)}, and no dim {dim}")
        if buffer.requires_grad or isinstance(buffer, DTensor):
            raise ValueError(
                f"context_parallel: buffer {index} requires gradients or is a DTensor: it is cut in place, so give a "
                "plain tensor, and take what is computed from it within the context"
            )


class _Attention(TorchFunctionMode):
    """Sees the calls of scaled_dot_product_attention within the context."""

    def __init__(self, mesh: DeviceMesh, lengths: dict[int, int]) -> None:
        super().__init__()
        self.mesh = mesh
        self.lengths = lengths

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _attention and not any(isinstance(one, DTensor) for one in (*args, *kwargs.values())):
            return self._attend(*args, **kwargs)
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
            query, key, value = (_as_four(one) for one in (query, key, value))
        if enable_gqa:
            key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
        ring = self._ring(query.shape[SEQUENCE], key.shape[SEQUENCE])
        result: torch.Tensor = _RingAttention.apply(query, key, value, ring, is_causal, scale)  # type: ignore[no-untyped-call]
        return result.reshape(*shape[:-1], value.shape[-1])

    def _ring(self, queries: int, keys: int) -> Ring:
        ranks = tuple(self.mesh.mesh.tolist())
        of_queries, of_keys = self._runs(queries, len(ranks)), self._runs(keys, len(ranks))
        group = self.mesh.get_group() if len(ranks) > 1 else None
        return Ring(ranks, (coordinate_of(self.mesh) or (0,))[0], group, of_queries, of_keys)

    def _runs(self, own: int, ranks: int) -> tuple[Runs, ...]:
        """What each rank has of a sequence of which this one has `own` elements."""
        whole = self.lengths.get(own, own * ranks)
        if whole < 0:
            raise ValueError(
                f"context_parallel: two buffers of different lengths have parts of {own} elements on this rank, so the "
                "length of the whole is not known: pad them to one length, or to multiples of twice the ranks"
            )
        return tuple(head_and_tail(whole, ranks, place) for place in range(ranks))


def _as_four(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with batch dims of any number as one with two."""
    return tensor.reshape(-1, 1, *tensor.shape[-2:])


class _RingAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring: Ring, causal: bool, scale: Any
    ) -> torch.Tensor:
        result, total = ring_attention(query, key, value, ring, causal, scale)
        ctx.save_for_backward(query, key, value, result, total)
        ctx.given = ring, causal, scale
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        found = ring_attention_backward(grads[0], *ctx.saved_tensors, *ctx.given)
        return (*found, None, None, None)


# ---- whole again -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def context_parallel_unshard(mesh: DeviceMesh, buffers: list[torch.Tensor], seq_dims: list[int]) -> list[torch.Tensor]:
    """The whole tensors of which ranks have the parts that `context_parallel` gives them. Collective over the mesh.

    Args:
        mesh: That of the context.
        buffers: This rank's parts.
        seq_dims: The dim of the sequence in each.

    Returns:
        The whole tensors, in the order of the sequence.

    Raises:
        ValueError: `seq_dims` is not one dim for each buffer.

    Source: torch.distributed.tensor.experimental.context_parallel_unshard, without its load balancers.
    """
    if len(buffers) != len(seq_dims):
        raise ValueError(
            f"context_parallel_unshard: seq_dims must have one dim for each buffer: {len(seq_dims)} for {len(buffers)}"
        )
    found = []
    for buffer, dim in zip(buffers, seq_dims, strict=True):
        dim %= buffer.ndim
        placements, shape = whole_of_pieces(buffer, mesh, (Shard(dim),))
        whole = DTensor.from_local(buffer.contiguous(), mesh, placements, shape=shape).full_tensor()
        order = [
            position
            for place in range(mesh.size())
            for begin, count in head_and_tail(shape[dim], mesh.size(), place)
            for position in range(int(begin), int(begin + count))
        ]
        back = torch.empty(len(order), dtype=torch.int64)
        back[torch.tensor(order, dtype=torch.int64)] = torch.arange(len(order))
        found.append(whole.index_select(dim, back.to(buffer.device)))
    return found
