"""Products fused with a collective: torch.ops.phalanx.mm_reduce_scatter and all_gather_mms.

Ranks are processes. Most values are whole numbers so small that every order of summing them gives the same bits.
"""

import os
import time

import pytest

from ranks import run_ranks, scratch
from torch_shim import (
    FLOATS,
    INVALID,
    MISMATCH,
    PEER_DEAD,
    P,
    World,
    data,
    load,
    one_rank,
    raises,
    reduced,
    same,
    torch,
)

# Rows, inner, columns. Whole rows for each of two and of three ranks.
SHAPES = [(6, 3, 5), (12, 33, 7), (6, 0, 5), (0, 3, 5), (6, 3, 0), (12, 1, 1)]
LARGE = (1536, 16, 128)  # pieces above what a start takes at once; shards in whole pages, which are read where they lie


def whole_numbers(rank, shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-1, 3, shape, generator=generator).to(dtype)


def factors(rank, shape, dtype, seed=0):
    rows, inner, columns = shape
    return whole_numbers(rank, (rows, inner), dtype, seed), whole_numbers(rank, (inner, columns), dtype, seed + 1)


def gather_mm(shard, b, size, group):
    (product,) = P.all_gather_mms(shard, [b], size, group)
    return product


@pytest.fixture
def alone():
    with one_rank() as world:
        yield world


# ---- one rank -------------------------------------------------------------------------------------------------------


def test_schemas_say_what_is_written():
    load()
    for name, signature in (
        (
            "mm_reduce_scatter",
            "(Tensor a, Tensor b, str reduce_op, int group_size, str group_name, SymInt pieces) -> Tensor",
        ),
        ("all_gather_mms", "(Tensor shard, Tensor[] bs, int group_size, str group_name) -> Tensor[]"),
    ):
        assert str(getattr(P, name).default._schema) == f"phalanx::{name}{signature}"


def test_a_group_of_one_multiplies(alone):
    for dtype in FLOATS:
        a, b = data(0, (7, 5), dtype), data(1, (5, 3), dtype)
        same(P.mm_reduce_scatter(a, b, "avg", 1, "g", 4), a @ b)
        same(gather_mm(a, b, 1, "g"), a @ b)


def test_operands_that_require_gradients_are_multiplied_without_autograd(alone):
    a, b = data(0, (4, 5)).requires_grad_(), data(1, (5, 3)).requires_grad_()
    same(P.mm_reduce_scatter(a, b, "sum", 1, "g", 2).detach(), (a @ b).detach())
    same(gather_mm(a, b, 1, "g").detach(), (a @ b).detach())


def test_wrong_arguments_are_value_errors_before_anything_is_sent(alone):
    a, b = torch.ones(4, 3), torch.ones(3, 2)

    def scatter(a, b, reduce_op="sum"):
        return lambda: P.mm_reduce_scatter(a, b, reduce_op, 1, "g", 1)

    for call, parts in [
        (scatter(a, b, "mean"), ["unknown reduce op 'mean'; expected sum, avg"]),
        (scatter(a, b, "premul_sum"), ["mm_reduce_scatter on group 'g'", "premul_sum"]),
        (scatter(a[0], b), ["(rank 0 of 1)", "a has 1 dims"]),
        (scatter(a, b[None]), ["b has 3 dims"]),
        (scatter(a, b.double()), ["a is [4, 3] of float32", "float64", "dtype"]),
        (scatter(a.int(), b.int()), ["a is int32", "bfloat16"]),
        (scatter(a + 1j, b + 1j), ["a is complex64"]),
        (lambda: P.mm_reduce_scatter(a, b, "sum", 2, "g", 1), ["mm_reduce_scatter", "group_size is 2", "1 ranks"]),
        (lambda: P.mm_reduce_scatter(a, a, "sum", 1, "g", 1), ["a is [4, 3] of float32", "b is [4, 3]", "columns"]),
        (lambda: gather_mm(a, b, 3, "g"), ["all_gather_mms", "group_size is 3"]),
        (lambda: gather_mm(a, a, 1, "g"), ["shard is [4, 3]", "b is [4, 3]", "as shard has columns"]),
        (lambda: gather_mm(a, a, 1, "absent"), ["all_gather_mms on group 'absent': shard is"]),
        (
            lambda: P.mm_reduce_scatter(a, b, "sum", 3, "absent", 1),
            ["on group 'absent'", "not divisible by the group size 3"],
        ),
        (lambda: P.mm_reduce_scatter(a, b, "sum", 0, "absent", 1), ["group_size is 0"]),
    ]:
        text = raises(ValueError, call)
        assert all(part in text for part in parts), text
        assert alone.last_error() == (INVALID, text)


def test_calls_on_unknown_groups_multiply_whole_and_go_to_phalanx_c10d(alone):
    library = torch.library.Library("phalanx_c10d", "IMPL")
    calls = []

    def implement(name, result):
        def implementation(tensor, *args):
            calls.append((name, tensor.clone(), args))
            return result(tensor)

        library.impl(name, implementation, "CompositeExplicitAutograd")

    def text(number):
        return alone.ffi.string(alone.ops.phxt_text(number)).decode()

    implement("reduce_scatter_tensor", lambda x: x[:2] * 2)
    implement("all_gather_into_tensor", lambda x: torch.cat([x, x]))
    a, b = factors(0, (4, 3, 5), torch.float32)
    same(P.mm_reduce_scatter(a, b, "max", 2, "other", 3), (a @ b)[:2] * 2)
    same(gather_mm(a, b, 2, "other"), torch.cat([a, a]) @ b)
    (scatter, product, reduced_by), (gather, shard, gathered_by) = calls
    assert [scatter, gather] == ["reduce_scatter_tensor", "all_gather_into_tensor"]
    same(product, a @ b)
    same(shard, a)
    assert [text(reduced_by[0]), reduced_by[1], text(reduced_by[2])] == ["max", 2, "other"]
    assert [gathered_by[0], text(gathered_by[1])] == [2, "other"]
    library._destroy()


# ---- several ranks: values ------------------------------------------------------------------------------------------


def every_op_against_the_reference(rank, size):
    with World(rank, size) as world:
        for seed, dtype in enumerate(FLOATS):
            for shape in [*SHAPES, LARGE]:
                a, b = factors(rank, shape, dtype, seed)
                products = [x @ y for x, y in (factors(r, shape, dtype, seed) for r in range(size))]
                for reduce_op in ("sum", "AVG", "max"):
                    total = reduced(products, reduce_op.lower())
                    for pieces in (0, 1, 2, 5, 100 if shape != LARGE else 9):
                        part = P.mm_reduce_scatter(a, b, reduce_op, size, "g", pieces)
                        same(part, total.chunk(size)[rank] if shape[0] else total)
                shards = [factors(r, shape, dtype, seed)[0] for r in range(size)]
                same(gather_mm(a, b, size, "g"), torch.cat(shards) @ b)
                several = P.all_gather_mms(a, [b, b[:, :1], b[:, 1:].contiguous()], size, "g")
                for product, factor in zip(several, (b, b[:, :1], b[:, 1:]), strict=True):
                    same(product, torch.cat(shards) @ factor)
        assert world.ops.phxt_pending_count() == 0


@pytest.mark.parametrize("size", [2, 3])
def test_each_op_gives_what_one_process_would_compute(size):
    load()
    run_ranks(every_op_against_the_reference, size, timeout=120)


def random_values(rank, size):
    results = []
    with World(rank, size):
        for dtype in FLOATS:
            for rows, inner, columns in ((30, 17, 11), (1542, 40, 100)):
                a, b = data(rank, (rows, inner), dtype), data(rank, (inner, columns), dtype, 1)
                whole = a @ b
                same(
                    P.mm_reduce_scatter(a, b, "sum", size, "g", 1),
                    P.wait_tensor(P.reduce_scatter_tensor(whole, "sum", size, "g")),
                )
                shared = data(0, (inner, columns), dtype, 2)
                gathered = gather_mm(a, shared, size, "g")
                rounding = {torch.float64: 1e-12, torch.float32: 1e-4}.get(dtype, 0.2)
                apart = torch.cat([data(r, (rows, inner), dtype) for r in range(size)]) @ shared
                torch.testing.assert_close(gathered, apart, rtol=0, atol=rounding)
                results.append(gathered)
    return [result.view(torch.uint8).numpy().tobytes() for result in results]


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_get_the_same_bits_and_one_piece_is_the_product_and_then_the_collective(size):
    load()
    first, *others = run_ranks(random_values, size, timeout=120)
    assert all(other == first for other in others)


def strided_and_pending_operands(rank, size):
    with World(rank, size) as world:
        pairs = [factors(r, (6, 5, 4), torch.float32) for r in range(size)]
        total = reduced([x @ y for x, y in pairs], "sum")
        a, b = pairs[rank]
        columns, transposed = a.t().contiguous().t(), b.t().contiguous().t()
        every_second = torch.stack([a, torch.full_like(a, 9.0)], dim=1).flatten(0, 1)[::2]
        for left in (columns, every_second):
            same(P.mm_reduce_scatter(left, transposed, "sum", size, "g", 2), total.chunk(size)[rank])
            same(gather_mm(left, transposed, size, "g"), torch.cat([x for x, _ in pairs]) @ b)
        # What is pending when it comes in is waited for.
        sums = P.all_reduce(a, "sum", "g")
        assert world.ops.phxt_pending_count() == 1
        expected = reduced([reduced([x for x, _ in pairs], "sum") @ y for _, y in pairs], "sum")
        same(P.mm_reduce_scatter(sums, b, "sum", size, "g", 2), expected.chunk(size)[rank])
        sums = P.all_reduce(a, "sum", "g")
        out = gather_mm(sums, b, size, "g")
        same(out, torch.cat([reduced([x for x, _ in pairs], "sum")] * size) @ b)
        assert world.ops.phxt_pending_count() == 0


def test_operands_may_have_any_strides_and_may_be_pending():
    load()
    run_ranks(strided_and_pending_operands, 2)


# ---- several ranks: one ahead of the other, and errors --------------------------------------------------------------


class BeforeRowsAreTaken:
    """Calls `what` when an op takes rows of a matrix for the `call`-th time, which it does for each product."""

    def __init__(self, call, what):
        self.left, self.what = call, what
        self.library = torch.library.Library("aten", "IMPL")
        self.library.impl("narrow", self._narrow, "CPU")

    def _narrow(self, tensor, dim, start, length):
        self.left -= 1
        if self.left == 0:
            self.what()
        return torch.ops.aten.slice.Tensor(tensor, dim, start, start + length)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.library._destroy()


def await_file(name):
    deadline = time.monotonic() + 60
    while not (scratch() / name).exists() and time.monotonic() < deadline:
        time.sleep(0.001)


SECOND_PIECE = 5  # rows are taken twice for each rank's part of a piece, so this begins the second piece


def in_pieces(a, b, size):
    return P.mm_reduce_scatter(a, b, "sum", size, "g", 3)


def one_rank_ahead(rank, size):
    with World(rank, size):
        pairs = [factors(r, LARGE, torch.float32) for r in range(size)]
        if rank == 0:
            with BeforeRowsAreTaken(SECOND_PIECE, (scratch() / "ahead").touch):
                result = in_pieces(*pairs[0], size)
        else:
            await_file("ahead")
            result = in_pieces(*pairs[rank], size)
        total = reduced([x @ y for x, y in pairs], "sum")
        same(result, total.chunk(size)[rank])


def test_a_rank_goes_on_to_its_next_product_before_its_peers_have_come():
    load()
    run_ranks(one_rank_ahead, 2)


def one_rank_dies(rank, size):
    world = World(rank, size)
    a, b = factors(rank, LARGE, torch.float32)
    if rank == 1:
        with BeforeRowsAreTaken(SECOND_PIECE, lambda: os.kill(os.getpid(), 9)):
            in_pieces(a, b, size)
    text = raises(RuntimeError, lambda: in_pieces(a, b, size))
    assert world.last_error() == (PEER_DEAD, text)
    assert world.ops.phxt_pending_count() == 0
    raises(RuntimeError, lambda: in_pieces(a, b, size))
    return text


def test_a_peer_that_dies_between_pieces_is_named():
    load()
    text, _ = run_ranks(one_rank_dies, 2, expect_exit={1: -9})
    assert "rank 1" in text
    assert "reduce_scatter" in text


def one_rank_fails(rank, size):
    def fail():
        raise KeyError("the reason")

    world = World(rank, size)
    a, b = factors(rank, LARGE, torch.float32)
    if rank == 1:
        with BeforeRowsAreTaken(SECOND_PIECE, fail):
            text = raises(RuntimeError, lambda: in_pieces(a, b, size))
        assert "could not take rows of a matrix" in text
    else:
        text = raises(RuntimeError, lambda: in_pieces(a, b, size))
        assert "mm_reduce_scatter failed in the middle" in text
        assert "rank 1" in text
    assert world.ops.phxt_pending_count() == 0
    raises(RuntimeError, lambda: in_pieces(a, b, size))  # the ranks are out of step


def test_a_rank_that_fails_between_pieces_tells_its_peers():
    load()
    run_ranks(one_rank_fails, 2)


def ranks_disagree(rank, size):
    world = World(rank, size)
    a, b = factors(rank, (12, 3, 5), torch.float32)
    text = raises(RuntimeError, lambda: P.mm_reduce_scatter(a, b, "sum", size, "g", 2 + rank))
    assert world.last_error() == (MISMATCH, text)
    assert world.ops.phxt_pending_count() == 0


def test_ranks_that_cut_differently_get_an_error():
    load()
    run_ranks(ranks_disagree, 2)


def errors_before_anything_is_sent(rank, size):
    with World(rank, size):
        a, b = factors(rank, (5, 3, 5), torch.float32)
        if rank == 0:  # the others make no such call: nothing may be sent
            text = raises(ValueError, lambda: P.mm_reduce_scatter(a, b, "sum", size, "g", 1))
            assert f"a is [5, 3] of float32, whose number of rows is not divisible by the group size {size}" in text
            raises(ValueError, lambda: P.mm_reduce_scatter(a, b.t(), "sum", size, "g", 1))
            raises(ValueError, lambda: gather_mm(a, b, size + 1, "g"))
        shards = [factors(r, (5, 3, 5), torch.float32)[0] for r in range(size)]
        same(gather_mm(a, b, size, "g"), torch.cat(shards) @ b)


def test_wrong_arguments_leave_the_group_usable():
    load()
    run_ranks(errors_before_anything_is_sent, 2)
