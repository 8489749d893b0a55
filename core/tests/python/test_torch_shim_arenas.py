"""Collectives that are complete on return, and what else compiled graphs are made of: arenas of symmetric memory."""

import gc
import os
import traceback

import pytest

from ranks import run_ranks
from torch_shim import (
    INVALID,
    MISMATCH,
    P,
    World,
    checked,
    data,
    load,
    one_rank,
    raises,
    reduced,
    run_threads,
    same,
    torch,
)


class Blocking:
    """torch.ops.phalanx.blocking_*."""

    def __getattr__(self, name):
        return getattr(P, f"blocking_{name}")


class Ordered:
    """torch.ops.phalanx_ordered, without its last arguments."""

    def __getattr__(self, name):
        op = getattr(torch.ops.phalanx_ordered, name)
        order = torch.zeros(1)
        return lambda *args, **kwargs: op(*args, **kwargs, order=order)


B = Blocking()
UNSUPPORTED = -2
PLAN = "graph-1 g|all_reduce float32 [1024] sum|all_gather float32 [16]"
COLLECTIVES = [
    "all_reduce", "all_reduce_", "all_gather_into_tensor", "all_gather_into_tensor_out", "reduce_scatter_tensor",
    "reduce_scatter_tensor_out", "all_to_all_single", "broadcast", "broadcast_", "all_reduce_coalesced",
    "all_reduce_coalesced_", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced",
]  # fmt: skip


def view(arena, offset, size, dtype=torch.float32):
    return P.arena_view(arena, offset, size, dtype)


def zero_copies(world):
    info = world.ffi.new("phx_group_stats *")
    info.struct_size = world.ffi.sizeof("phx_group_stats")
    checked(world.core.phx_group_get_stats(world.group, info))
    return info.zero_copies


@pytest.fixture
def alone():
    with one_rank() as world:
        yield world


# ---- complete on return ----------------------------------------------------------------------------------------


def test_every_collective_has_a_blocking_form_with_its_schema_and_tags():
    load()
    for name in COLLECTIVES:
        ours, blocking = getattr(P, name).default, getattr(P, f"blocking_{name}").default
        assert str(blocking._schema) == str(ours._schema).replace("phalanx::", "phalanx::blocking_")
        assert blocking.tags == ours.tags
    assert not hasattr(P, "blocking_wait_tensor")
    assert not hasattr(P, "blocking_symm_arena")


def test_every_collective_has_an_ordered_namesake_with_its_schema_and_tags():
    load()
    for name in COLLECTIVES:
        ours, ordered = getattr(P, name).default, getattr(torch.ops.phalanx_ordered, name).default
        expected = str(ours._schema).replace("phalanx::", "phalanx_ordered::")
        order = "Tensor order" if "-> Tensor[]" in expected else "Tensor(o!) order"
        assert str(ordered._schema) == expected.replace(") ->", f", {order}, bool start=False) ->")
        assert ordered.tags == ours.tags
    assert not hasattr(torch.ops.phalanx_ordered, "wait_tensor")
    assert not hasattr(torch.ops.phalanx_ordered, "symm_arena")


def complete_on_return(rank, size, form):
    B = form()  # noqa: N806
    with World(rank, size) as world:
        inputs = [data(r, (size, 8)) for r in range(size)]
        mine, total, gathered = inputs[rank], reduced(inputs, "sum"), torch.cat(inputs)
        part = total.chunk(size)[rank]
        same(B.all_reduce(mine, "sum", "g"), total)
        same(B.all_gather_into_tensor(mine, size, "g"), gathered)
        same(B.reduce_scatter_tensor(mine, "sum", size, "g"), part)
        same(B.all_to_all_single(mine, [], [], "g"), torch.cat([x.chunk(size)[rank] for x in inputs]))
        even = [1] * size
        same(B.all_to_all_single(mine, even, even, "g"), torch.cat([x.chunk(size)[rank] for x in inputs]))
        same(B.broadcast(mine, 1, "g"), inputs[1])
        for op, expected in [
            (lambda x: B.all_reduce_(x, "sum", "g"), total),
            (lambda x: B.broadcast_(x, 0, "g"), inputs[0]),
            (lambda x: B.all_reduce_coalesced_([x], "sum", "g"), total),
        ]:
            inplace = mine.clone()
            assert op(inplace) is None
            same(inplace, expected)
        out = torch.empty_like(gathered)
        B.all_gather_into_tensor_out(mine, size, "g", out=out)
        same(out, gathered)
        out = torch.empty_like(part)
        B.reduce_scatter_tensor_out(mine, "sum", size, "g", out=out)
        same(out, part)
        for results, expected in [
            (B.all_reduce_coalesced([mine, mine], "sum", "g"), total),
            (B.all_gather_into_tensor_coalesced([mine, mine], size, "g"), gathered),
            (B.reduce_scatter_tensor_coalesced([mine, mine], "sum", size, "g"), part),
        ]:
            assert world.ops.phxt_pending_count() == 0
            for result in results:
                same(result, expected)
        # The others of this thread go on as before, also after an error.
        raises(ValueError, lambda: B.all_reduce(mine, "nonsense", "g"))
        started = P.all_reduce(mine, "sum", "g")
        assert world.ops.phxt_pending_count() == 1
        same(B.all_reduce(started, "sum", "g"), total * size)  # waits for its input
        assert world.ops.phxt_pending_count() == 0
        inplace = mine.clone()
        assert torch.ops.phalanx_ordered.all_reduce_(inplace, "sum", "g", torch.zeros(1), True) is None
        assert world.ops.phxt_pending_count() == 1
        P.wait_tensor_(inplace)
        same(inplace, total)
        # A group that others make known while the call is under way: what they call for it is complete, too.
        library = torch.library.Library("phalanx_c10d", "IMPL")
        library.impl("all_reduce", lambda x, *_: P.all_reduce(x, "sum", "g"), "CompositeExplicitAutograd")
        same(B.all_reduce(mine, "sum", "later"), total)
        assert world.ops.phxt_pending_count() == 0


@pytest.mark.parametrize("form", [Blocking, Ordered])
def test_they_leave_nothing_pending(form):
    load()
    run_ranks(complete_on_return, 2, form)


# ---- one rank ---------------------------------------------------------------------------------------------------


def test_an_arena_is_a_number_that_survives_copies_of_its_tensor(alone):
    arena = P.symm_arena(4096, PLAN, "g")
    assert (arena.dtype, arena.shape, arena.device.type) == (torch.int64, (1,), "cpu")
    again = P.symm_arena(100, PLAN, "g")
    assert again.item() == arena.item()
    assert again.data_ptr() != arena.data_ptr()
    other = P.symm_arena(100, "graph-2 g", "g")
    assert other.item() != arena.item()
    address = view(arena, 0, [4]).data_ptr()
    assert view(arena.clone(), 0, [4]).data_ptr() == view(again, 0, [4]).data_ptr() == address
    assert view(other, 0, [4]).data_ptr() != address
    assert address % 64 == 0


def test_an_arena_of_no_bytes_has_no_memory_and_may_grow(alone):
    arena = P.symm_arena(0, "nothing g", "g")
    assert "0 bytes" in raises(ValueError, lambda: view(arena, 0, [0]))
    assert P.symm_arena(0, "nothing g", "g").item() == arena.item()
    assert P.symm_arena(8, "nothing g", "g").item() == arena.item()
    assert view(arena, 0, [2]).shape == (2,)


def test_views_are_contiguous_tensors_over_the_bytes_at_their_offset(alone):
    arena = P.symm_arena(4096, PLAN, "g")
    whole = view(arena, 0, [4096], torch.uint8)
    assert whole.sum().item() == 0
    x = view(arena, 64, [2, 3, 4], torch.bfloat16)
    assert (x.shape, x.dtype, x.stride(), x.storage_offset()) == ((2, 3, 4), torch.bfloat16, (12, 4, 1), 0)
    assert x.data_ptr() == whole.data_ptr() + 64
    x.copy_(data(0, (2, 3, 4), torch.bfloat16))
    same(whole[64 : 64 + 48].view(torch.bfloat16), data(0, (2, 3, 4), torch.bfloat16).flatten())
    assert view(arena, 8, [], torch.int64).shape == ()
    assert view(arena, 4096, [0, 5]).shape == (0, 5)
    assert view(arena, 0, [2], torch.float8_e5m2).dtype is torch.float8_e5m2
    P.arena_release_(arena, [x, whole])


def test_wrong_views_are_value_errors(alone):
    arena = P.symm_arena(4000, PLAN, "g")  # a page is made
    for call, parts in [
        (lambda: view(arena, 4092, [2]), ["arena_view on group 'g'", "at byte 4100", "graph-1 g", "4096 bytes"]),
        (lambda: view(arena, 0, [1 << 40, 1 << 40]), ["beyond all memory"]),
        (lambda: view(arena, 2, [1]), ["offset is 2", "4 bytes"]),
        (lambda: view(arena, -4, [1]), ["offset is -4"]),
        (lambda: view(arena, 0, [-1]), ["size has the negative entry -1"]),
        (lambda: P.arena_view(arena, 0, [1], torch.int8, 0), ["gpu is 0", "graph-1 g", "is on the CPU"]),
        (lambda: view(torch.ones(1), 0, [1]), ["arena_view", "int64 tensor of one number"]),
        (lambda: view(torch.ones(1, dtype=torch.int64), 0, [1]), ["no arena has the number 1"]),
        (lambda: view(torch.zeros(2, dtype=torch.int64), 0, [1]), ["arena_view", "one number"]),
        (lambda: P.symm_arena(-1, PLAN, "g"), ["symm_arena on group 'g'", "nbytes is -1"]),
        (lambda: P.symm_arena(64, PLAN, "g", -2), ["symm_arena on group 'g'", "gpu is -2", "-1 for the host"]),
    ]:
        text = raises(ValueError, call)
        assert all(part in text for part in parts), text
        assert alone.last_error() == (INVALID, text)


def test_an_arena_needs_a_registered_group(alone):
    text = raises(RuntimeError, lambda: P.symm_arena(64, PLAN, "nowhere"))
    assert "symm_arena on group 'nowhere': " in text
    assert alone.last_error() == (UNSUPPORTED, text)


def test_the_arena_of_an_unknown_group_is_made_by_phalanx_c10d(alone):
    library = torch.library.Library("phalanx_c10d", "IMPL")
    calls = []

    def implementation(nbytes, *texts, gpu=-1):
        calls.append((nbytes, *(alone.ffi.string(alone.ops.phxt_text(text)).decode() for text in texts), gpu))
        return torch.tensor([7])

    library.impl("symm_arena", implementation, "CompositeExplicitAutograd")
    assert P.symm_arena(64, PLAN, "later").tolist() == [7]
    assert calls == [(64, PLAN, "later", -1)]
    library._destroy()


def test_arenas_go_with_their_group_but_tensors_keep_their_memory(alone):
    arena = P.symm_arena(64, PLAN, "g")
    x = view(arena, 0, [16])
    x.fill_(3)
    checked(alone.ops.phxt_group_remove(0, b"g"))
    assert "its group was removed" in raises(ValueError, lambda: view(arena, 0, [16]))
    assert x.sum().item() == 48
    checked(alone.ops.phxt_group_add(0, b"g", alone.group))
    assert P.symm_arena(64, PLAN, "g").item() != arena.item()
    assert x.sum().item() == 48


def held_after_growth(rank, size):
    def mapped():
        with open("/proc/self/maps", encoding="utf-8") as maps:
            return sum("memfd" in line for line in maps)

    with World(rank, size):
        before = mapped()
        arena = P.symm_arena(64, PLAN, "g")
        x = view(arena, 0, [16])
        x.fill_(rank + 1)
        first = mapped()
        assert first > before
        grown = P.symm_arena(1 << 20, PLAN, "g")
        assert grown.item() == arena.item()
        y = view(grown, (1 << 20) - 64, [16])
        assert y.sum().item() == 0
        assert y.data_ptr() == view(arena, (1 << 20) - 64, [16]).data_ptr()
        assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        both = mapped()
        assert both > first
        same(B.all_reduce(x, "sum", "g"), torch.full((16,), 3.0))
        del x
        gc.collect()
        assert mapped() < both
        assert P.symm_arena(8, PLAN, "g").item() == arena.item()  # smaller ones fit
        assert view(arena, (1 << 20) - 64, [16]).data_ptr() == y.data_ptr()


def test_an_arena_grows_and_old_memory_stays_until_nobody_uses_it():
    load()
    run_ranks(held_after_growth, 2)


# ---- several ranks ----------------------------------------------------------------------------------------------


def iterations(rank, size, count):
    with World(rank, size) as world:
        addresses, before = set(), zero_copies(world)
        for step in range(5):
            inputs = [data(r, (count,), seed=step) for r in range(size)]
            arena = P.symm_arena(4 * count + 64, PLAN, "g")
            x = view(arena, 64, [count])
            addresses.add(x.data_ptr())
            x.copy_(inputs[rank])
            B.all_reduce_(x, "sum", "g")
            same(x, reduced(inputs, "sum"))
            assert world.ops.phxt_pending_count() == 0
        assert len(addresses) == 1
        assert zero_copies(world) - before == 5


def test_a_graph_finds_its_memory_at_the_same_address_and_collectives_read_it_there():
    load()
    run_ranks(iterations, 2, 100_000)


def different_plans(rank, size):
    lines = ["all_reduce float32 [1024] sum", "all_gather float32 [16]", "all_reduce float32 [4] sum"]
    if rank == 1:
        lines[1] = "all_to_all float32 [16]"
    with World(rank, size) as world:
        plan = "|".join([f"graph-{rank % 2} g", *lines])
        text = raises(RuntimeError, lambda: P.symm_arena(64, plan, "g"))
        assert world.last_error() == (MISMATCH, text)
        same(B.all_reduce(torch.ones(4), "sum", "g"), torch.full((4,), float(size)))  # the ranks are in step
        view(P.symm_arena(64, PLAN, "g"), 0, [16])
        return text


def test_ranks_that_compiled_different_graphs_all_get_an_error_with_the_first_collective_that_differs():
    load()
    for rank, text in enumerate(run_ranks(different_plans, 3)):
        assert f"symm_arena on group 'g' (rank {rank} of 3)" in text
        assert "plan 'graph-0 g' on group ranks 0, 2; plan 'graph-1 g' on group rank 1." in text
        assert "Collective 2 is the first that differs: 'all_gather float32 [16]' on group ranks 0, 2; " in text
        assert "'all_to_all float32 [16]' on group rank 1." in text


def one_rank_compiles_anew(rank, size):
    world = World(rank, size)
    view(P.symm_arena(64, PLAN, "g"), 0, [16])  # both ranks run this graph
    text = raises(
        RuntimeError,
        lambda: (
            B.all_reduce(torch.ones(300_000), "sum", "g")
            if rank == 0
            else P.symm_arena(128, "another g|all_reduce float32 [300000] max", "g")
        ),
    )
    assert world.last_error()[0] == MISMATCH
    return text


def test_a_rank_that_runs_a_graph_while_another_checks_a_new_one_is_told_so():
    load()
    for text in run_ranks(one_rank_compiles_anew, 2):
        assert "is checking a newly compiled graph" in text
        assert "called all_reduce(float32, 300000, sum)" in text
        assert ": the ranks compiled different graphs. Every rank must compile the same model" in text


def other_differences(rank, size):
    long = "x" * 100_000
    texts = []
    with World(rank, size):
        for plan in (
            "name|same" + "|more" * rank,
            f"name|{long}{rank}",
            f"{long}{rank}",
            f"only-{rank}|same",
            "" if rank == 0 else "something",
        ):
            texts.append(raises(RuntimeError, lambda plan=plan: P.symm_arena(64, plan, "g")))
        texts.append(raises(RuntimeError, lambda: P.symm_arena(64 + rank, "name|same", "g")))
        P.symm_arena(64, "name|same", "g")
        texts.append(raises(RuntimeError, lambda: P.symm_arena(10_000 + rank, "name|same", "g")))
    return texts


def test_every_kind_of_difference_between_plans_is_told():
    load()
    for more, beyond, long, names, empty, bytes_first, bytes_later in run_ranks(other_differences, 2):
        assert "Collective 2 is the first that differs: no collective on group rank 0; 'more' on group rank 1." in more
        assert "They differ after the first 64 KiB." in beyond
        assert "They differ after the first 64 KiB." in long
        assert len(long) < 1000
        assert "plan 'only-0' on group rank 0; plan 'only-1' on group rank 1. Every rank" in names
        assert "plan '' on group rank 0; plan 'something' on group rank 1." in empty
        assert "sizes of plan 'name': 64 bytes on group rank 0; 65 bytes on group rank 1." in bytes_first
        assert "10000 bytes (instead of the 4096 it has) on group rank 0; 10001 bytes" in bytes_later


def growth_of_one_rank(rank, size):
    world = World(rank, size)
    P.symm_arena(64, PLAN, "g")
    text = raises(
        RuntimeError,
        lambda: P.symm_arena(1 << 20, PLAN, "g") if rank == 0 else B.all_reduce(torch.ones(4), "sum", "g"),
    )
    assert world.last_error()[0] == MISMATCH
    return text


def test_a_rank_that_grows_alone_is_an_error_at_the_next_collective_of_the_others():
    load()
    for text in run_ranks(growth_of_one_rank, 2):
        assert "is checking a newly compiled graph" in text
        assert "all_reduce(float32" in text


def dead_at_first_call(rank, size):
    world = World(rank, size)
    world.barrier()
    if rank == 1:
        os.kill(os.getpid(), 9)
    return raises(RuntimeError, lambda: P.symm_arena(64, PLAN, "g"))


def test_a_peer_that_dies_before_the_first_call_is_an_error():
    load()
    text, _ = run_ranks(dead_at_first_call, 2, expect_exit={1: -9})
    assert "rank 1" in text


def rank_thread(rank, size, store, failures):
    try:
        with World(rank, size, context=200 + rank, store=store):
            for step in range(5):
                arena = P.symm_arena(1024, PLAN, "g")
                mine = view(arena, 0, [16])
                mine.fill_(rank + step)
                B.all_reduce_(mine, "sum", "g")
                same(mine, torch.full((16,), 2.0 * step + 1))
    except BaseException:
        failures.append(traceback.format_exc())


def test_ranks_that_are_threads_have_an_arena_each():
    run_threads(rank_thread, 2)


# ---- products ---------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_aten_in_memory_that_is_given(alone, dtype):
    arena = P.symm_arena(1 << 16, PLAN, "g")
    a, b, c = data(0, (17, 33), dtype), data(1, (33, 9), dtype), data(2, (9, 33), dtype)
    out = view(arena, 64, [17, 9], dtype)
    assert P.mm_into_(out, a, b) is None
    same(out, torch.mm(a, b))
    P.mm_into_(out, a, c.t())
    same(out, torch.mm(a, c.t()))
    for bias in (data(3, (9,), dtype), data(3, (17, 9), dtype), data(3, (17, 1), dtype), data(3, (), dtype)):
        P.addmm_into_(out, bias, a, b)
        same(out, torch.addmm(bias, a, b))
    x, y = data(4, (3, 5, 7), dtype), data(5, (3, 7, 2), dtype)
    batch = view(arena, 8192, [3, 5, 2], dtype)
    assert P.bmm_into_(batch, x, y) is None
    same(batch, torch.bmm(x, y))
    empty = view(arena, 0, [0, 9], dtype)
    P.mm_into_(empty, a[:0], b)
    assert empty.shape == (0, 9)
    P.mm_into_(out, a[:, :0], b[:0])
    same(out, torch.zeros(17, 9, dtype=dtype))


def test_a_product_needs_no_gradient_of_its_operands(alone):
    a, b = data(0, (4, 4)).requires_grad_(), data(1, (4, 4)).requires_grad_()
    out = torch.empty(4, 4)
    with torch.no_grad():
        P.mm_into_(out, a, b)
    same(out, torch.mm(a, b).detach())


def test_operands_that_do_not_fit_are_value_errors_and_nothing_is_written(alone):
    a, b, bias = torch.ones(4, 3), torch.ones(3, 5), torch.ones(5)
    out = torch.full((4, 5), 7.0)
    batch = torch.full((2, 4, 5), 7.0)
    shared = torch.ones(9).as_strided((3, 3), (3, 1))
    for call, parts in [
        (lambda: P.mm_into_(out, a, b.t()), ["mm_into_: [m, k] and [k, n]", "a is [4, 3]", "b is [5, 3]", "[4, 5]"]),
        (lambda: P.mm_into_(out[:3], a, b), ["out is [3, 5]"]),
        (lambda: P.mm_into_(out, a[0], b), ["a is [3]"]),
        (lambda: P.mm_into_(out, a.double(), b), ["one dtype", "out is float32 and a float64"]),
        (lambda: P.mm_into_(out, a, b.bfloat16()), ["b bfloat16"]),
        (lambda: P.mm_into_(out.t(), b.t(), a.t()), ["out must be contiguous"]),
        (lambda: P.mm_into_(shared, shared, torch.ones(3, 3)), ["out must not share memory with a"]),
        (lambda: P.mm_into_(shared, torch.ones(3, 3), shared.t()), ["out must not share memory with b"]),
        (lambda: P.addmm_into_(out, torch.ones(4), a, b), ["addmm_into_: bias is [4]", "out, [4, 5]"]),
        (lambda: P.addmm_into_(out, torch.ones(1, 4, 5), a, b), ["bias is [1, 4, 5]"]),
        (lambda: P.addmm_into_(out, bias.double(), a, b), ["bias float64"]),
        (lambda: P.addmm_into_(out, out, a, b), ["share memory with bias"]),
        (lambda: P.addmm_into_(out, bias, b, a), ["a is [3, 5]"]),
        (lambda: P.bmm_into_(batch, a.expand(2, 4, 3), b.expand(3, 3, 5)), ["bmm_into_: [b, m, k]", "b is [3, 3, 5]"]),
        (lambda: P.bmm_into_(batch, a, b), ["a is [4, 3]"]),
    ]:
        text = raises(ValueError, call)
        assert all(part in text for part in parts), text
        assert alone.last_error() == (INVALID, text)
    assert (out == 7).all()
    assert (batch == 7).all()
    assert (shared == 1).all()


def product_of_pending(rank, size):
    with World(rank, size) as world:
        a, b, out = torch.full((4, 4), float(rank + 1)), torch.eye(4), torch.empty(4, 4)
        started = P.all_reduce(a, "sum", "g")
        assert world.ops.phxt_pending_count() == 1
        P.mm_into_(out, started, b)
        same(out, torch.full((4, 4), 3.0))
        P.addmm_into_(out, P.all_reduce(a, "sum", "g"), torch.zeros(4, 4), b)
        same(out, torch.full((4, 4), 3.0))
        assert world.ops.phxt_pending_count() == 0


def test_a_product_waits_for_what_is_pending_on_its_operands():
    load()
    run_ranks(product_of_pending, 2)
