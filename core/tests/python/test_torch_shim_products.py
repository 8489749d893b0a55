"""Products fused with a collective: torch.ops.phalanx.mm_all_reduce_, mm_reduce_scatter and all_gather_mm.

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


def fused_all_reduce(a, b, reduce_op="sum", group="g", pieces=0):
    out = torch.full((a.shape[0], b.shape[1]), float("nan"), dtype=a.dtype)
    assert P.mm_all_reduce_(out, a, b, reduce_op, group, pieces) is None
    return out


@pytest.fixture
def alone():
    with one_rank() as world:
        yield world


# ---- one rank -------------------------------------------------------------------------------------------------------


def test_schemas_say_what_is_written():
    load()
    for name, signature in (
        ("mm_all_reduce_", "(Tensor(a!) out, Tensor a, Tensor b, str reduce_op, str group_name, SymInt pieces) -> ()"),
        (
            "mm_reduce_scatter",
            "(Tensor a, Tensor b, str reduce_op, int group_size, str group_name, SymInt pieces) -> Tensor",
        ),
        ("all_gather_mm", "(Tensor shard, Tensor b, int group_size, str group_name) -> Tensor"),
        ("all_gather_mms", "(Tensor shard, Tensor[] bs, int group_size, str group_name) -> Tensor[]"),
    ):
        assert str(getattr(P, name).default._schema) == f"phalanx::{name}{signature}"


def test_a_group_of_one_multiplies(alone):
    for dtype in FLOATS:
        a, b = data(0, (7, 5), dtype), data(1, (5, 3), dtype)
        same(fused_all_reduce(a, b, "avg", pieces=4), a @ b)
        same(P.mm_reduce_scatter(a, b, "sum", 1, "g", 4), a @ b)
        same(P.all_gather_mm(a, b, 1, "g"), a @ b)


def test_operands_that_require_gradients_are_multiplied_without_autograd(alone):
    a, b = data(0, (4, 5)).requires_grad_(), data(1, (5, 3)).requires_grad_()
    same(fused_all_reduce(a, b), (a @ b).detach())
    same(P.mm_reduce_scatter(a, b, "sum", 1, "g", 2).detach(), (a @ b).detach())
    same(P.all_gather_mm(a, b, 1, "g").detach(), (a @ b).detach())


def test_wrong_arguments_are_value_errors_before_anything_is_written(alone):
    a, b, out = torch.ones(4, 3), torch.ones(3, 2), torch.zeros(4, 2)
    whole = torch.zeros(8, 3)
    for call, parts in [
        (lambda: P.mm_all_reduce_(out, a, b, "mean", "g", 1), ["Invalid reduce operation mean"]),
        (lambda: P.mm_all_reduce_(out, a, b, "premul_sum", "g", 1), ["mm_all_reduce_ on group 'g'", "premul_sum"]),
        (lambda: P.mm_all_reduce_(out, a[0], b, "sum", "g", 1), ["(rank 0 of 1)", "a has 1 dims"]),
        (lambda: P.mm_all_reduce_(out, a, b[None], "sum", "g", 1), ["b has 3 dims"]),
        (lambda: P.mm_all_reduce_(out, a, a, "sum", "g", 1), ["a is [4, 3] of float32", "b is [4, 3]", "columns"]),
        (lambda: P.mm_all_reduce_(out, a, b.double(), "sum", "g", 1), ["a is [4, 3] of float32", "float64", "dtype"]),
        (lambda: P.mm_all_reduce_(out, a.int(), b.int(), "sum", "g", 1), ["a is int32", "bfloat16"]),
        (lambda: P.mm_all_reduce_(out, a + 1j, b + 1j, "sum", "g", 1), ["a is complex64"]),
        (lambda: P.mm_all_reduce_(out.t(), a, b, "sum", "g", 1), ["out is [2, 4]", "must be [4, 2]"]),
        (lambda: P.mm_all_reduce_(out.double(), a, b, "sum", "g", 1), ["of float64", "of float32"]),
        (lambda: P.mm_all_reduce_(torch.zeros(4, 3)[:, :2], a, b, "sum", "g", 1), ["out must be contiguous"]),
        (lambda: P.mm_all_reduce_(whole[3:7], whole[:4], torch.ones(3, 3), "sum", "g", 1), ["share memory"]),
        (lambda: P.mm_reduce_scatter(a, b, "sum", 2, "g", 1), ["mm_reduce_scatter", "group_size is 2", "1 ranks"]),
        (lambda: P.mm_reduce_scatter(a, a, "sum", 1, "g", 1), ["mm_reduce_scatter", "columns"]),
        (lambda: P.all_gather_mm(a, b, 3, "g"), ["all_gather_mm", "group_size is 3"]),
        (lambda: P.all_gather_mm(a, a, 1, "g"), ["shard is [4, 3]", "b is [4, 3]", "as shard has columns"]),
        (lambda: P.all_gather_mm(a, a, 1, "absent"), ["all_gather_mm on group 'absent': shard is"]),
        (lambda: P.mm_reduce_scatter(a, b, "sum", 3, "absent", 1), ["on group 'absent'", "multiple of group_size 3"]),
        (lambda: P.mm_reduce_scatter(a, b, "sum", 0, "absent", 1), ["group_size is 0"]),
    ]:
        text = raises(ValueError, call)
        assert all(part in text for part in parts), text
        assert alone.last_error() == (INVALID, text)
    assert out.count_nonzero() == whole.count_nonzero() == 0
    P.mm_all_reduce_(whole[4:], whole[:4], torch.ones(3, 3), "sum", "g", 1)  # the same storage, other bytes


def test_calls_on_unknown_groups_multiply_whole_and_go_to_the_other_road(alone):
    library = torch.library.Library("phalanx_c10d", "IMPL")
    calls = []

    def implement(name, result):
        def implementation(tensor, *args):
            calls.append((name, tensor.clone(), args))
            return result(tensor)

        library.impl(name, implementation, "CompositeExplicitAutograd")

    def text(number):
        return alone.ffi.string(alone.ops.phxt_text(number)).decode()

    implement("all_reduce", lambda x: x * 2)
    implement("reduce_scatter_tensor", lambda x: x[:2] * 2)
    implement("all_gather_into_tensor", lambda x: torch.cat([x, x]))
    a, b = factors(0, (4, 3, 5), torch.float32)
    same(fused_all_reduce(a, b, "max", "other"), a @ b * 2)
    same(P.mm_reduce_scatter(a, b, "sum", 2, "other", 3), (a @ b)[:2] * 2)
    same(P.all_gather_mm(a, b, 2, "other"), torch.cat([a, a]) @ b)
    assert [name for name, _, _ in calls] == ["all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"]
    for (_, sent, _), expected in zip(calls, (a @ b, a @ b, a), strict=True):
        same(sent, expected)
    (_, _, first), (_, _, second), (_, _, third) = calls
    assert [text(first[0]), text(first[1])] == ["max", "other"]
    assert [text(second[0]), second[1], text(second[2])] == ["sum", 2, "other"]
    assert [third[0], text(third[1])] == [2, "other"]
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
                        same(fused_all_reduce(a, b, reduce_op, pieces=pieces), total)
                        part = P.mm_reduce_scatter(a, b, reduce_op, size, "g", pieces)
                        same(part, total.chunk(size)[rank] if shape[0] else total)
                shards = [factors(r, shape, dtype, seed)[0] for r in range(size)]
                same(P.all_gather_mm(a, b, size, "g"), torch.cat(shards) @ b)
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
                same(fused_all_reduce(a, b, pieces=1), P.wait_tensor(P.all_reduce(whole, "sum", "g")))
                same(
                    P.mm_reduce_scatter(a, b, "sum", size, "g", 1),
                    P.wait_tensor(P.reduce_scatter_tensor(whole, "sum", size, "g")),
                )
                shared = data(0, (inner, columns), dtype, 2)
                gathered = P.all_gather_mm(a, shared, size, "g")
                rounding = {torch.float64: 1e-12, torch.float32: 1e-4}.get(dtype, 0.2)
                apart = torch.cat([data(r, (rows, inner), dtype) for r in range(size)]) @ shared
                torch.testing.assert_close(gathered, apart, rtol=0, atol=rounding)
                results += [fused_all_reduce(a, b, pieces=pieces) for pieces in (0, 1, 3)] + [gathered]
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
            guarded = torch.full((10, 4), -7.0)
            P.mm_all_reduce_(guarded[2:8], left, transposed, "sum", "g", 3)
            same(guarded, torch.cat([torch.full((2, 4), -7.0), total, torch.full((2, 4), -7.0)]))
            same(P.mm_reduce_scatter(left, transposed, "sum", size, "g", 2), total.chunk(size)[rank])
            same(P.all_gather_mm(left, transposed, size, "g"), torch.cat([x for x, _ in pairs]) @ b)
        # What is pending when it comes in is waited for.
        sums = P.all_reduce(a, "sum", "g")
        assert world.ops.phxt_pending_count() == 1
        expected = reduced([reduced([x for x, _ in pairs], "sum") @ y for _, y in pairs], "sum")
        same(fused_all_reduce(sums, b, pieces=2), expected)
        sums = P.all_reduce(a, "sum", "g")
        out = P.all_gather_mm(sums, b, size, "g")
        same(out, torch.cat([reduced([x for x, _ in pairs], "sum")] * size) @ b)
        assert world.ops.phxt_pending_count() == 0


def test_operands_may_have_any_strides_and_may_be_pending():
    load()
    run_ranks(strided_and_pending_operands, 2)


def out_in_symmetric_memory(rank, size):
    with World(rank, size) as world:
        shape = (640, 8, 128)
        a, b = factors(rank, shape, torch.float32)
        total = reduced([x @ y for x, y in (factors(r, shape, torch.float32) for r in range(size))], "sum")
        symm = world.made("phx_symm **", lambda made: world.core.phx_symm_alloc(
            world.group, world.ffi.NULL, total.numel() * 4, 0, made))  # fmt: skip
        block = world.ffi.buffer(world.core.phx_symm_buffer(symm, rank), total.numel() * 4)
        out = torch.frombuffer(block, dtype=torch.float32).view(640, 128)
        for pieces in (0, 1, 2, 7):
            out.fill_(-1)
            world.barrier()
            P.mm_all_reduce_(out, a, b, "sum", "g", pieces)
            same(out, total)
        world.barrier()
        world.core.phx_symm_release(symm)


def test_out_may_lie_in_symmetric_memory():
    load()
    run_ranks(out_in_symmetric_memory, 2)


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


CALLS = {  # op: the product that follows the first start, and the call
    "mm_all_reduce_": (3, lambda a, b, size: fused_all_reduce(a, b, pieces=3)),
    "mm_reduce_scatter": (5, lambda a, b, size: P.mm_reduce_scatter(a, b, "sum", size, "g", 3)),
}


def one_rank_ahead(rank, size, op):
    with World(rank, size):
        pairs = [factors(r, LARGE, torch.float32) for r in range(size)]
        call, run = CALLS[op]
        if rank == 0:
            with BeforeRowsAreTaken(call, (scratch() / "ahead").touch):
                result = run(*pairs[0], size)
        else:
            await_file("ahead")
            result = run(*pairs[rank], size)
        total = reduced([x @ y for x, y in pairs], "sum")
        same(result, total if op == "mm_all_reduce_" else total.chunk(size)[rank])


@pytest.mark.parametrize("op", CALLS)
def test_a_rank_goes_on_to_its_next_product_before_its_peers_have_come(op):
    load()
    run_ranks(one_rank_ahead, 2, op)


def one_rank_dies(rank, size, op):
    world = World(rank, size)
    a, b = factors(rank, LARGE, torch.float32)
    call, run = CALLS[op]
    if rank == 1:
        with BeforeRowsAreTaken(call, lambda: os.kill(os.getpid(), 9)):
            run(a, b, size)
    text = raises(RuntimeError, lambda: run(a, b, size))
    assert world.last_error() == (PEER_DEAD, text)
    assert world.ops.phxt_pending_count() == 0
    raises(RuntimeError, lambda: run(a, b, size))
    return text


@pytest.mark.parametrize("op", CALLS)
def test_a_peer_that_dies_between_pieces_is_named(op):
    load()
    text, _ = run_ranks(one_rank_dies, 2, op, expect_exit={1: -9})
    assert "rank 1" in text
    assert op.removeprefix("mm_").removesuffix("_") in text


def one_rank_fails(rank, size, op):
    def fail():
        raise KeyError("the reason")

    world = World(rank, size)
    a, b = factors(rank, LARGE, torch.float32)
    call, run = CALLS[op]
    if rank == 1:
        with BeforeRowsAreTaken(call, fail):
            text = raises(RuntimeError, lambda: run(a, b, size))
        assert "could not take rows of a matrix" in text
    else:
        text = raises(RuntimeError, lambda: run(a, b, size))
        assert f"{op} failed in the middle" in text
        assert "rank 1" in text
    assert world.ops.phxt_pending_count() == 0
    raises(RuntimeError, lambda: run(a, b, size))  # the ranks are out of step


@pytest.mark.parametrize("op", CALLS)
def test_a_rank_that_fails_between_pieces_tells_its_peers(op):
    load()
    run_ranks(one_rank_fails, 2, op)


def ranks_disagree(rank, size):
    world = World(rank, size)
    a, b = factors(rank, (12, 3, 5), torch.float32)
    text = raises(RuntimeError, lambda: fused_all_reduce(a, b, pieces=2 + rank))
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
            assert f"a is [5, 3] of float32, but the number of its rows must be a multiple of group_size {size}" in text
            raises(ValueError, lambda: fused_all_reduce(a, b.t()))
            raises(ValueError, lambda: P.all_gather_mm(a, b, size + 1, "g"))
        products = [x @ y for x, y in (factors(r, (5, 3, 5), torch.float32) for r in range(size))]
        same(fused_all_reduce(a, b, pieces=2), reduced(products, "sum"))


def test_wrong_arguments_leave_the_group_usable():
    load()
    run_ranks(errors_before_anything_is_sent, 2)
