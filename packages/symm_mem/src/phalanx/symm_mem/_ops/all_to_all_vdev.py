"""all_to_all of rows with splits that each rank knows only for itself: by rank, and by the experts of a rank.

Before anything moves, every rank gets the splits of all ranks, so rows that do not fit are an error on every rank, and
nothing is written. Then each rank reads its rows in place. On CUDA the host waits for the current stream, as it must
read the splits; the rows are moved on the stream.

The order in which experts get their rows, and how their blocks are aligned, is that of torch 2.13
(torch/csrc/distributed/c10d/symm_mem/nvshmem_extension.cu, and its test test_nvshmem.py). With two ranks and two
experts on each, where c and d are the rows of ranks 0 and 1 for experts 0 to 3:

    all_to_all_vdev_2d          c0 c1 c2 c3 | d0 d1 d2 d3    becomes    c0 d0 c1 d1 | c2 d2 c3 d3
    all_to_all_vdev_2d_offset   back again
"""

from math import prod

import torch

from phalanx.core import InvalidArgumentError, MismatchError
from phalanx.symm_mem._cuda import refuse_capture
from phalanx.symm_mem._ops._common import handle_of, op
from phalanx.symm_mem._ops.unfused import gather_into
from phalanx.symm_mem._process_group import RankGroup, resolve

_ROWS, _OUT_SPLITS = "Tensor input, Tensor(a!) out", "Tensor(a!) out_splits_offsets, str group_name"


@op(f"all_to_all_vdev({_ROWS}, Tensor in_splits, {_OUT_SPLITS}) -> ()")
def all_to_all_vdev(
    tensor: torch.Tensor, out: torch.Tensor, in_splits: torch.Tensor, out_splits_offsets: torch.Tensor, group_name: str
) -> None:
    """Send rows to the ranks by each rank's `in_splits`; `out_splits_offsets` gets the received splits and offsets."""
    operation, members = "all_to_all_vdev", resolve(group_name, "all_to_all_vdev")
    size = members.info.world_size
    if list(in_splits.shape) != [size]:
        raise InvalidArgumentError(f"{operation}: in_splits is {list(in_splits.shape)}; it must have {size} elements")
    exchange = _Exchange(operation, tensor, out, in_splits, out_splits_offsets, members, 1)
    counts = exchange.splits.view(size, size, 1)
    exchange.run(counts, _starts(exchange.splits).view(size, size, 1), by_expert=False)


@op(f"all_to_all_vdev_2d({_ROWS}, Tensor in_splits, {_OUT_SPLITS}, int? major_align=None) -> ()")
def all_to_all_vdev_2d(
    tensor: torch.Tensor,
    out: torch.Tensor,
    in_splits: torch.Tensor,
    out_splits_offsets: torch.Tensor,
    group_name: str,
    major_align: int | None = None,
) -> None:
    """Send rows to experts by `in_splits` (rank, expert); the result is by expert and rank, in aligned blocks."""
    operation, members = "all_to_all_vdev_2d", resolve(group_name, "all_to_all_vdev_2d")
    size, align = members.info.world_size, 1 if major_align is None else major_align
    if align < 1:
        raise InvalidArgumentError(f"{operation}: major_align is {align}; it must be positive")
    if in_splits.dim() != 1 or in_splits.shape[0] % size:
        raise InvalidArgumentError(
            f"{operation}: in_splits is {list(in_splits.shape)}; it must have one dim, a multiple of the group size "
            f"{size}"
        )
    exchange = _Exchange(operation, tensor, out, in_splits, out_splits_offsets, members, align)
    counts = exchange.splits.view(size, size, in_splits.shape[0] // size)
    exchange.run(counts, _starts(exchange.splits).view(counts.shape), by_expert=True)


@op(f"all_to_all_vdev_2d_offset({_ROWS}, Tensor in_splits_offsets, {_OUT_SPLITS}) -> ()")
def all_to_all_vdev_2d_offset(
    tensor: torch.Tensor,
    out: torch.Tensor,
    in_splits_offsets: torch.Tensor,
    out_splits_offsets: torch.Tensor,
    group_name: str,
) -> None:
    """Send rows back by `in_splits_offsets` (expert, rank), with any offsets; the result is by rank and expert."""
    operation, members = "all_to_all_vdev_2d_offset", resolve(group_name, "all_to_all_vdev_2d_offset")
    size = members.info.world_size
    if in_splits_offsets.dim() != 2 or in_splits_offsets.shape[0] != 2 or in_splits_offsets.shape[1] % size:
        raise InvalidArgumentError(
            f"{operation}: in_splits_offsets is {list(in_splits_offsets.shape)}; it must have two rows, of a multiple "
            f"of the group size {size}"
        )
    exchange = _Exchange(operation, tensor, out, in_splits_offsets, out_splits_offsets, members, 1)
    shape = (size, 2, in_splits_offsets.shape[1] // size, size)
    counts, starts = exchange.splits.view(shape).transpose(2, 3).unbind(1)
    exchange.run(counts, starts, by_expert=False)


def _starts(counts: torch.Tensor) -> torch.Tensor:
    """The start of each part along the last dim, if the parts lie one after another."""
    return counts.cumsum(-1) - counts


class _Exchange:
    """One call: checks the arguments, gathers the splits of all ranks, and moves the rows.

    Attributes:
        splits: The splits of all ranks, int64, stacked along a new first dim.
    """

    def __init__(
        self,
        operation: str,
        tensor: torch.Tensor,
        out: torch.Tensor,
        splits: torch.Tensor,
        out_splits: torch.Tensor,
        members: RankGroup,
        align: int,
    ) -> None:
        listed = splits.shape[-1]
        if list(out_splits.shape) != [2, listed] or out_splits.dtype != torch.int64 or splits.dtype != torch.int64:
            raise InvalidArgumentError(
                f"{operation}: the splits are {list(splits.shape)} of {splits.dtype}, and out_splits_offsets is "
                f"{list(out_splits.shape)} of {out_splits.dtype}; it must be [2, {listed}], and both of torch.int64"
            )
        if tensor.dim() == 0 or out.dim() == 0 or out.shape[1:] != tensor.shape[1:] or out.dtype != tensor.dtype:
            raise InvalidArgumentError(
                f"{operation}: rows of {list(tensor.shape)} of {tensor.dtype} do not fit into {list(out.shape)} of "
                f"{out.dtype}"
            )
        self._operation, self._members = operation, members
        self._out, self._out_splits, self._align = out, out_splits, align
        self._handle = handle_of(operation, tensor, members.name)
        self._row, self._dtype = tensor.shape[1:], tensor.dtype
        if tensor.is_cuda:  # when the splits are there, which the host must read, this rank's rows are, too
            refuse_capture(
                operation,
                tensor.device,
                "the host must read the splits; capture the work before and after it separately",
            )
            torch.cuda.current_stream(tensor.device).synchronize()
            splits = splits.cpu()
        own = [tensor.shape[0], out.shape[0], self._handle.offset // tensor.element_size()]
        self._own = self._agree(own, [prod(self._row), tensor.element_size(), listed, align])
        self.splits = self._all(splits)

    def _all(self, own: torch.Tensor) -> torch.Tensor:
        """Gather a tensor of all ranks. The rows of all ranks are there when it returns."""
        gathered = torch.empty([self._members.info.world_size, *own.shape], dtype=torch.int64)
        gather_into(self._operation, own.contiguous(), gathered, self._members)
        return gathered

    def _agree(self, own: list[int], common: list[int]) -> list[list[int]]:
        """Exchange numbers: `common` must be the same on all ranks. Returns `own` of all ranks."""
        numbers_of_all = self._all(torch.tensor(own + common)).tolist()
        for rank, (*_, row, nbytes, listed, align) in enumerate(numbers_of_all):
            first = numbers_of_all[0][len(own) :]
            if [row, nbytes, listed, align] != first:
                raise MismatchError(
                    f"{self._operation} on group {self._members.name!r}: rank {rank} has rows of {row} elements of "
                    f"{nbytes} bytes, {listed} splits and the alignment {align}; rank 0 has {first}. They must be "
                    "the same on all ranks; nothing was moved.",
                    group=self._members.name,
                )
        return [numbers[: len(own)] for numbers in numbers_of_all]

    def run(self, counts: torch.Tensor, starts: torch.Tensor, by_expert: bool) -> None:
        """Move the rows.

        Args:
            counts: Number of rows, by sender, receiver and expert of the receiver.
            starts: The first of these rows in the tensor of the sender, by the same indices.
            by_expert: Whether the received rows are ordered by expert and then by rank, with the blocks of the experts
                aligned, or by rank and then by expert.
        """
        me, size = self._members.info.rank, self._members.info.world_size
        placed = [self._placed(counts[:, rank], by_expert) for rank in range(size)]
        self._check(counts, starts, placed)
        received, place = counts[:, me], placed[me]
        order = (1, 0) if by_expert else (0, 1)
        self._out_splits[0].copy_(received.permute(order).reshape(-1))
        self._out_splits[1].copy_(place.permute(order).reshape(-1))
        for rank, (rows, _, offset) in enumerate(self._own):
            view = self._handle.get_buffer(rank, [rows, *self._row], self._dtype, offset)
            moves = zip(received[rank].tolist(), starts[rank, me].tolist(), place[rank].tolist(), strict=True)
            for count, start, to in moves:
                if count:
                    self._out[to : to + count] = view[start : start + count]
        self._handle.barrier()  # all ranks have read this rank's

    def _placed(self, came: torch.Tensor, by_expert: bool) -> torch.Tensor:
        """The first row in the output of a rank for the rows of each sender and expert."""
        if not by_expert:
            return _starts(came.reshape(-1)).view(came.shape)
        totals = came.sum(0)
        # A block without rows has the length of the alignment: grouped products need blocks (pytorch#152668).
        blocks = torch.clamp((totals + self._align - 1) // self._align * self._align, min=self._align)
        return _starts(blocks) + _starts(came.t()).t()

    def _check(self, counts: torch.Tensor, starts: torch.Tensor, placed: list[torch.Tensor]) -> None:
        """Raise the same error on every rank if rows of one rank are outside of its tensor or do not fit its output."""
        ends = starts + counts
        for rank, (rows, *_) in enumerate(self._own):
            # Also counts and starts themselves, as the sum of large ones overflows.
            outside = [((each[rank] < 0) | (each[rank] > rows)).any() for each in (counts, starts, ends)]
            if any(outside):
                raise InvalidArgumentError(
                    f"{self._operation}: the splits {self.splits[rank].tolist()} of rank {rank} do not lie within its "
                    f"{rows} rows; nothing was moved"
                )
        for rank, (_, space, _) in enumerate(self._own):
            came = counts[:, rank]
            needed = int(torch.where(came > 0, placed[rank] + came, 0).amax()) if came.numel() else 0
            if needed > space:
                raise InvalidArgumentError(
                    f"{self._operation}: rank {rank} receives {needed} rows, and its output has {space}; nothing was "
                    "moved"
                )
