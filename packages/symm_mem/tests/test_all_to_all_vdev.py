"""all_to_all by splits, of ranks and of experts, beside a single process that has all rows."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

from phalanx import symm_mem
from phalanx.core import InvalidArgumentError, MismatchError
from ranks import run_ranks

ops = torch.ops.phalanx
EXPERTS = 3  # of each rank


def symmetric(values, spare=0):
    made = symm_mem.empty(values.shape[0] + spare, *values.shape[1:], dtype=values.dtype)
    made[: len(values)] = values
    return made


def told_to(shape):
    return torch.full((2, shape), -1, dtype=torch.int64)


def counts_of(kind, size):
    """How many rows each rank has for each expert: [from rank, to rank, expert]."""
    if kind == "none":
        return torch.zeros(size, size, EXPERTS, dtype=torch.int64)
    drawn = torch.randint(0, 6, (size, size, EXPERTS), generator=torch.Generator().manual_seed(len(kind)))
    if kind == "gaps":
        drawn[:, 1] = 0  # a rank that gets nothing
        drawn[0] = 0  # one that has nothing
        drawn[:, :, 2] = 0  # an expert without rows
    return drawn


def rows_of(counts, dtype, width=2):
    """The rows of each rank: (from, to, expert, number) in one value that every dtype here can hold."""
    made = []
    for source, each in enumerate(counts):
        labels = [
            torch.arange(int(count)) + 8 * expert + 24 * target + 100 * source
            for target, listed in enumerate(each)
            for expert, count in enumerate(listed)
        ]
        made.append(torch.cat(labels)[:, None].expand(-1, width).to(dtype))
    return made


def pieces_of(counts, rows):
    """The rows of each (from, to, expert)."""
    found = {}
    for source, listed in enumerate(rows):
        parts = iter(listed.split(counts[source].reshape(-1).tolist()))
        for target in range(len(rows)):
            for expert in range(EXPERTS):
                found[source, target, expert] = next(parts)
    return found


def dispatched(rank, size, counts, rows, align):
    """What comes to a rank, by expert and rank: the pieces, and where each begins."""
    found, pieces, offsets, begin = pieces_of(counts, rows), [], [], 0
    for expert in range(EXPERTS):
        at = begin
        for source in range(size):
            pieces.append(found[source, rank, expert])
            offsets.append(at)
            at += len(pieces[-1])
        begin += max(-(-(at - begin) // align) * align, align)
    return pieces, offsets


def moves_to_experts_and_back(rank, size, name):
    for kind in ("none", "gaps", "uneven"):
        counts = counts_of(kind, size)
        for dtype, align in ((torch.float32, None), (torch.bfloat16, 8), (torch.int64, 16)):
            rows = rows_of(counts, dtype)
            x = symm_mem.empty(60, 2, dtype=dtype)
            x[: len(rows[rank])] = rows[rank]
            splits = symmetric(counts[rank].reshape(-1))
            out, told = symm_mem.empty(200, 2, dtype=dtype).fill_(-1), told_to(size * EXPERTS)
            ops.all_to_all_vdev_2d(x, out, splits, told, name, align)
            pieces, offsets = dispatched(rank, size, counts, rows, align or 1)
            assert told[0].tolist() == list(map(len, pieces))
            assert told[1].tolist() == offsets
            expected = torch.full_like(out, -1)  # the padding is left as it was
            for piece, offset in zip(pieces, offsets, strict=True):
                expected[offset : offset + len(piece)] = piece
            assert torch.equal(out, expected)
            assert torch.equal(splits, counts[rank].reshape(-1))
            # What the first tells is what the second takes, and all rows come back to where they were.
            back, told_back = torch.full((60, 2), -1, dtype=dtype), told_to(size * EXPERTS)
            ops.all_to_all_vdev_2d_offset(out, back, told, told_back, name)
            assert torch.equal(back[: len(rows[rank])], rows[rank]) and back[len(rows[rank]) :].eq(-1).all()
            flat = counts[rank].reshape(-1)
            assert torch.equal(told_back, torch.stack([flat, flat.cumsum(0) - flat]))


def takes_rows_from_any_offsets(rank, size, name):
    """Gaps between the pieces, pieces in any order, and one row for two."""
    x = symmetric(torch.arange(10.0) + 100 * rank)
    splits = torch.tensor([[2] * size, [7 - 2 * (to % 3) for to in range(size)]])  # one expert on each rank
    out, told = torch.zeros(2 * size), told_to(size)
    ops.all_to_all_vdev_2d_offset(x, out, splits, told, name)
    begin = 7 - 2 * (rank % 3)
    assert out.tolist() == [100.0 * source + begin + each for source in range(size) for each in (0, 1)]
    assert told.tolist() == [[2] * size, list(range(0, 2 * size, 2))]


def moves_by_rank(rank, size, name):
    counts = [[(3 * source + target) % 4 for target in range(size)] for source in range(size)]
    rows = [(torch.arange(sum(counts[source])) + 100.0 * source)[:, None].expand(-1, 2) for source in range(size)]
    x = symm_mem.empty(32, 2)[rank:]  # a view that starts elsewhere on every rank, and has another length
    x[: len(rows[rank])] = rows[rank]
    told, out = told_to(size), torch.zeros(32, 2)
    ops.all_to_all_vdev(x, out, symmetric(torch.tensor(counts[rank])), told, name)
    came = [rows[source].split(counts[source])[rank] for source in range(size)]
    assert torch.equal(out[: sum(map(len, came))], torch.cat(came))
    assert told[0].tolist() == list(map(len, came))
    assert told[1].tolist() == [sum(map(len, came[:source])) for source in range(size)]


def refuses_what_does_not_fit(rank, size, name):
    """On every rank, before anything is written, and the next call works."""
    x, ones = symmetric(torch.arange(8.0 * size)), torch.ones(size * 2, dtype=torch.int64)
    out, told = torch.full((8 * size,), -1.0), told_to(size * 2)

    def changed(at, value):
        return ones.index_fill(0, torch.tensor(at), value) if rank == 1 else ones

    both = torch.stack([ones, ones])
    vdev, to_experts, back = ops.all_to_all_vdev, ops.all_to_all_vdev_2d, ops.all_to_all_vdev_2d_offset
    for call, text in (
        (lambda: to_experts(x, out, changed(0, 99), told, name), "rank 1 do not lie within its"),
        (lambda: to_experts(x, out, changed(0, -1), told, name), "rank 1 do not lie within its"),
        (lambda: to_experts(x, out, changed(0, 2**62), told, name), "rank 1 do not lie within its"),
        (lambda: vdev(x, out, changed(0, 99)[:size], told[:, :size], name), "rank 1 do not lie within its"),
        (lambda: back(x, out, both * (2**40 if rank == 1 else 1), told, name), "rank 1 do not lie within its"),
        (
            lambda: to_experts(x, out[: 1 if rank == 1 else 99], ones, told, name),
            "rank 1 receives . rows, and its",
        ),
        (lambda: to_experts(x, out, ones, told, name, 99), "rank 0 receives .* rows, and its output has"),
        (lambda: to_experts(x, out, ones, told, name, 0), "must be positive"),
        (lambda: to_experts(x, out, ones[:-1], told, name), "a multiple of the group size"),
        (lambda: to_experts(x, out, ones, told[:, 1:], name), r"it must be \[2, "),
        (lambda: to_experts(x, out, ones.int(), told, name), "both of torch.int64"),
        (lambda: to_experts(x, out.double(), ones, told, name), "do not fit into"),
        (lambda: to_experts(torch.ones(8), out, ones, told, name), "ordinary memory"),
        (lambda: back(x, out, ones, told, name), "must have two rows"),
        (lambda: vdev(x, out, ones[:1], told, name), "must have . elements"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            call()
    with pytest.raises(MismatchError, match="the alignment 2; rank 0 has"):
        to_experts(x, out, ones, told, name, 1 if rank == 0 else 2)
    assert out.eq(-1).all() and told.eq(-1).all()
    ops.all_to_all_vdev_2d(x, out, ones, told, name)
    assert out[: 2 * size].tolist() == [2.0 * rank + expert for expert in (0, 1) for _ in range(size)]


def a_compiler_knows_them(rank, size, name):
    x, out, told = symmetric(torch.arange(4.0 * size)), torch.zeros(4 * size), told_to(size)
    splits = torch.ones(size, dtype=torch.int64)

    def program(x, out, splits, told):
        ops.all_to_all_vdev_2d(x, out, splits, told, name)
        return out * 2

    expected = program(x, out, splits, told)
    again = torch.zeros_like(out), torch.zeros_like(told)
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, again[0], splits, again[1]), expected)
    assert torch.equal(again[0], out) and torch.equal(again[1], told)
    for op, given in (
        (ops.all_to_all_vdev, splits),
        (ops.all_to_all_vdev_2d, splits),
        (ops.all_to_all_vdev_2d_offset, told),
    ):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert op(*map(mode.from_tensor, (x, out, given, told)), name) is None


def everything(rank, size):
    name = dist.group.WORLD.group_name
    for part in (
        moves_to_experts_and_back,
        takes_rows_from_any_offsets,
        moves_by_rank,
        refuses_what_does_not_fit,
        a_compiler_knows_them,
    ):
        part(rank, size, name)


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_come_to_their_experts_as_in_a_single_process(ranks):
    run_ranks(everything, ranks, start_torch=True)
