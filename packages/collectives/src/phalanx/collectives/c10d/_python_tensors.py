"""Tensors as the core takes them: addresses of contiguous memory, dtypes and reductions by number. As tensors.cpp."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from phalanx.collectives.c10d import _torch_compat
from phalanx.collectives.c10d._torch_compat import ReduceOp
from phalanx.core import DType
from phalanx.core import ReduceOp as CoreOp

_DTYPES: dict[torch.dtype, DType] = {
    found: dtype for dtype in DType if isinstance(found := getattr(torch, dtype.name.lower(), None), torch.dtype)
}
_OPS = {
    ReduceOp.SUM: CoreOp.SUM,
    ReduceOp.AVG: CoreOp.AVG,
    ReduceOp.PRODUCT: CoreOp.PRODUCT,
    ReduceOp.MIN: CoreOp.MIN,
    ReduceOp.MAX: CoreOp.MAX,
    ReduceOp.BAND: CoreOp.BAND,
    ReduceOp.BOR: CoreOp.BOR,
    ReduceOp.BXOR: CoreOp.BXOR,
    ReduceOp.PREMUL_SUM: CoreOp.PREMUL_SUM,
}


_CPU = torch.device("cpu")


class Elements(NamedTuple):
    """What moves. Dtypes that the core has not got move as bytes."""

    numel: int
    dtype: DType


def elements_of(tensor: torch.Tensor, numel: int | None = None) -> Elements:
    """`numel` elements of a tensor; None is all of them."""
    count = tensor.numel() if numel is None else numel
    dtype = _DTYPES.get(tensor.dtype)
    return Elements(count, dtype) if dtype is not None else Elements(count * tensor.element_size(), DType.UINT8)


def reduced_dtype(tensor: torch.Tensor) -> DType:
    """Of a tensor that is reduced: its dtype must be one of the core's."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        text = f"phalanx does not reduce tensors of dtype {tensor.dtype}; convert them to another dtype"
        raise NotImplementedError(text)
    return dtype


def reduction_of(op: Any) -> tuple[CoreOp, float]:
    """The core's reduction, and its factor."""
    for known, reduction in _OPS.items():
        if op == known:
            return reduction, _torch_compat.premultiplied_by(op) if reduction == CoreOp.PREMUL_SUM else 1.0
    raise ValueError("this ReduceOp is none of phalanx")


def check_tensor(tensor: Any, what: str, like: torch.Tensor | None = None) -> None:
    """Raise ValueError unless it is a dense tensor on the CPU or on a GPU, of the dtype of the other one."""
    if tensor.layout is not torch.strided:
        raise ValueError(f"{what}: phalanx takes dense tensors, not {tensor.layout}")
    if not tensor.is_cpu and not tensor.is_cuda:
        raise ValueError(f"{what}: phalanx takes tensors on the CPU or on GPUs, not on {tensor.device}")
    if like is not None and tensor.dtype != like.dtype:
        text = f"tensors of dtypes {tensor.dtype} and {like.dtype} in one collective; all must have the same"
        raise ValueError(text)


def only(tensors: Sequence[torch.Tensor], what: str) -> torch.Tensor:
    """The one tensor of a list."""
    if len(tensors) != 1:
        raise ValueError(f"{what}: one tensor is needed, not {len(tensors)}")
    check_tensor(tensors[0], what)
    return tensors[0]


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def check_no_internal_overlap(tensor: torch.Tensor) -> None:
    """Raise RuntimeError, in torch's words, if two elements of a tensor that is written are one in memory."""
    if tensor.numel() and any(
        not stride and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )


def same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same elements of memory, read in the same way."""
    return (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride()) and (
        a.dtype,
        a.is_conj(),
        a.is_neg(),
    ) == (b.dtype, b.is_conj(), b.is_neg())


class _Span(NamedTuple):
    """The memory between the first and the last element of a tensor of a list."""

    begin: int
    end: int
    position: int


def _span(tensor: torch.Tensor, position: int) -> _Span:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return _Span(tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size(), position)


def _have_common_bytes(tensors: Sequence[torch.Tensor], spans: Sequence[_Span]) -> bool:
    """Whether two tensors have a byte in common. Their spans, ordered by beginning, have no gap."""
    begin, end = spans[0].begin, max(span.end for span in spans)
    unit = math.gcd(*(tensors[span.position].element_size() for span in spans), *(span.begin - begin for span in spans))
    taken = torch.zeros((end - begin) // unit, dtype=torch.bool)
    for span in spans:
        tensor = tensors[span.position]
        units = tensor.element_size() // unit
        strides = [stride * units for stride in tensor.stride()]
        here = taken.as_strided((*tensor.shape, units), (*strides, 1), (span.begin - begin) // unit)
        if here.any():
            return True
        here.fill_(True)
    return False


def share_memory(written: Sequence[torch.Tensor], may_share: Callable[[int, int], bool]) -> bool:
    """Whether some of the tensors, which a call writes, share memory.

    Raises:
        RuntimeError: In torch's words: some do and `may_share`, of two positions in the list, is false; then what is
            written depends on the order.
    """
    spans = sorted(_span(tensor, position) for position, tensor in enumerate(written) if tensor.numel())
    share = False
    while spans:
        end, count = spans[0].end, 1
        while count < len(spans) and spans[count].begin < end:
            end, count = max(end, spans[count].end), count + 1
        cluster, spans = spans[:count], spans[count:]
        if count > 1 and _have_common_bytes(written, cluster):
            if not all(may_share(cluster[0].position, span.position) for span in cluster):
                raise RuntimeError(
                    "unsupported operation: more than one element of the written-to tensors refers to a single memory "
                    "location. Please clone() the tensors before performing the operation."
                )
            share = True
    return share


def _are_adjacent(tensors: Sequence[torch.Tensor]) -> bool:
    following = None
    for tensor in tensors:
        if not _is_plain(tensor):
            return False
        if tensor.numel() > 0:
            place = tensor.untyped_storage().data_ptr(), tensor.data_ptr()
            if following is not None and place != following:
                return False
            following = place[0], place[1] + tensor.nbytes
    return True


def _address(tensors: Sequence[torch.Tensor]) -> int:
    return next((tensor.data_ptr() for tensor in tensors if tensor.numel() > 0), 0)


class Buffers:
    """What an operation reads and writes.

    Attributes:
        outputs: The value of its future.
        staged: Whether tensors that are written share memory: then all are copied to at the end.
    """

    def __init__(self, outputs: Sequence[torch.Tensor] = ()) -> None:
        self.outputs = list(outputs)
        self.staged = False
        self._keep: list[torch.Tensor] = []
        self._read: list[torch.Tensor] = []  # by the last `readable` or `all_readable`
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # destination, source

    def device(self, what: str) -> torch.device:
        """Where all of it is; the CPU where there is nothing.

        Raises:
            ValueError: That is several devices.
        """
        if not self._keep:
            return _CPU
        device = self._keep[0].device
        for each in self._keep:
            if each.device != device:
                raise ValueError(
                    f"{what}: tensors on {device} and {each.device} in one collective; all must be on the same"
                )
        return device

    def elements_at(self, address: int, count: int, dtype: DType) -> torch.Tensor:
        """What is at an address that one of these calls gave, as a tensor that autograd knows nothing of."""
        kind = getattr(torch, dtype.name.lower())
        if count == 0:
            return torch.empty(0, dtype=kind, device=self._keep[0].device)
        for each in self._keep:
            storage = each.untyped_storage()
            begin = storage.data_ptr()
            if begin <= address and address + count * dtype.itemsize <= begin + storage.nbytes():
                made = torch.empty(0, dtype=kind, device=each.device)
                return made.set_(storage, (address - begin) // dtype.itemsize, (count,), (1,))
        raise AssertionError("an address that is none of these")

    def finish(self) -> None:
        """When it is complete: copy to where the results belong, and let go of the rest."""
        with torch.no_grad():
            for to, source in self._copies:
                to.copy_(source)
        self._keep, self._copies, self._read = [], [], []

    def used_on(self, stream: Any) -> None:
        """On another stream than the one that is current. The allocator gives their memory to nobody before that one
        is through with it."""
        for each in (*self._keep, *(to for to, _ in self._copies)):
            each.record_stream(stream)

    def readable(self, tensor: torch.Tensor) -> int:
        """The address of its elements, or of a copy of them."""
        self._read = [tensor if _is_plain(tensor) else _plain(tensor)]
        self._keep += self._read
        return self._read[0].data_ptr()

    def writable(self, tensor: torch.Tensor, read_too: bool = False, copy_back: bool = True) -> int:
        """The address of its elements, or of what is copied to them at the end.

        Args:
            read_too: Whether the elements are of use before.
            copy_back: False if nobody writes to it on this rank.
        """
        if copy_back:
            check_no_internal_overlap(tensor)
        if _is_plain(tensor) and not self.staged:
            self._keep.append(tensor)
        else:
            given = _plain(tensor) if read_too else tensor
            made = (
                (given.clone() if self.staged else given)
                if read_too
                else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            )
            self._keep.append(made)
            if copy_back:
                self._copies.append((tensor.detach(), made))
        return self._keep[-1].data_ptr()

    def all_readable(self, tensors: Sequence[torch.Tensor]) -> int:
        """As `readable`, one after another."""
        adjacent = _are_adjacent(tensors)
        self._read = list(tensors) if adjacent else [torch.cat([_plain(tensor).view(-1) for tensor in tensors])]
        self._keep += self._read
        return _address(self._read)

    def all_writable(self, tensors: Sequence[torch.Tensor]) -> int:
        """As `writable`, one after another."""
        for tensor in tensors:
            check_no_internal_overlap(tensor)
        if not self.staged:
            if _are_adjacent(tensors):
                self._keep.extend(tensors)
                return _address(tensors)
            share_memory(tensors, lambda one, other: one == other)
        flat = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        self._copies += [(to.detach(), part.view(to.shape)) for to, part in zip(tensors, parts, strict=True)]
        self._keep.append(flat)
        return flat.data_ptr()

    def apart(self, source: int, source_bytes: int, out: int, out_bytes: int) -> int:
        """What was given to `readable` last, or a copy of it if it overlaps the output."""
        if not source_bytes or not out_bytes or source + source_bytes <= out or out + out_bytes <= source:
            return source
        self._keep.append(torch.cat([each.detach().reshape(-1) for each in self._read]))
        return self._keep[-1].data_ptr()

    def apart_from_all(self, tensor: torch.Tensor, outs: Sequence[tuple[int, int]]) -> int:
        """The address of the elements of a tensor, or of a copy of them if they overlap an output.

        Args:
            tensor: What is read.
            outs: The address and the bytes of each output.
        """
        source = given = self.readable(tensor)
        for out, out_bytes in outs:
            if source == given:
                source = self.apart(source, tensor.nbytes, out, out_bytes)
        return source
