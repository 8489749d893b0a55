"""The ops torch.ops.phalanx.* while they are under way: started and waited for, failing, and beside torch.distributed.

Ranks are processes, once they are threads.
"""

import os
import time
import traceback

import pytest

from ranks import run_ranks
from torch_shim import (
    MISMATCH,
    NOT_FOUND,
    PEER_DEAD,
    P,
    World,
    checked,
    data,
    load,
    raises,
    reduced,
    run_threads,
    same,
    torch,
)

# ---- several ranks: split phase ---------------------------------------------------------------------------------


def input_changed_after_the_call(rank, size):
    with World(rank, size) as world:
        fits = world.eager_bytes // 4
        for count in (1, 100, fits - fits % size, fits // 2 // size * size, 4 * fits):
            inputs = [data(r, (count,), seed=count) for r in range(size)]
            gathered, total = torch.cat(inputs), reduced(inputs, "sum")
            cases = [
                (lambda x: P.all_reduce(x, "sum", "g"), total),
                (lambda x: P.all_gather_into_tensor(x, size, "g"), gathered),
                (lambda x: P.broadcast(x, 0, "g"), inputs[0]),
            ]
            if count % size == 0:
                even, exchanged = [count // size] * size, torch.cat([x.chunk(size)[rank] for x in inputs])
                cases += [
                    (lambda x: P.reduce_scatter_tensor(x, "sum", size, "g"), total.chunk(size)[rank]),
                    (lambda x: P.all_to_all_single(x, [], [], "g"), exchanged),
                    (lambda x, even=even: P.all_to_all_single(x, even, even, "g"), exchanged),
                ]
            for call, expected in cases:
                x = inputs[rank].clone()
                result = call(x)
                x.fill_(float("nan"))
                world.barrier()  # nobody waits before all have changed their input
                same(P.wait_tensor(result), expected)


@pytest.mark.parametrize("size", [2, 3])
def test_the_input_may_change_as_soon_as_the_call_returns(size):
    load()
    run_ranks(input_changed_after_the_call, size)


def pending_work(rank, size):
    with World(rank, size) as world:
        ops = world.ops
        x, total = torch.full((100,), float(rank)), torch.full((100,), float(sum(range(size))))
        first = P.all_reduce(x, "sum", "g")
        second = P.all_reduce(x + 1, "sum", "g")
        assert ops.phxt_pending_count() == 2
        assert ops.phxt_pending_has(world.ffi.cast("void *", first.untyped_storage().data_ptr())) == 1
        assert P.wait_tensor(second[7:]).data_ptr() == second[7:].data_ptr()  # a view finds it
        assert ops.phxt_pending_count() == 1
        same(second, total + size)
        assert P.wait_tensor_(first) is None
        same(P.wait_tensor(first), total)  # a second wait does nothing
        assert ops.phxt_pending_count() == 0
        # Many works on one storage.
        whole = torch.empty(4, 100)
        for i in range(4):
            whole[i] = x + i
            P.all_reduce_(whole[i], "sum", "g")
        P.wait_tensor(whole)
        assert ops.phxt_pending_count() == 0
        same(whole, torch.stack([total + i * size for i in range(4)]))
        # A result that is still pending is waited for where it goes into the next call.
        chained = x
        for _ in range(5):
            chained = P.all_reduce(chained, "sum", "g")
        same(P.wait_tensor(chained), total * size**4)
        inplace = x.clone()
        P.all_reduce_(inplace, "sum", "g")
        P.all_reduce_(inplace[:50], "sum", "g")
        same(P.wait_tensor(inplace), torch.cat([total[:50] * size, total[50:]]))
        # By address and by group.
        result = P.all_reduce(x, "sum", "g")
        checked(ops.phxt_wait_storage(world.ffi.cast("void *", result.untyped_storage().data_ptr()), 0))
        same(result, total)
        results = [P.all_reduce(x + i, "sum", "g") for i in range(2)]
        checked(ops.phxt_wait_group(0, b"g", 0))
        assert ops.phxt_pending_count() == 0
        same(results[1], total + size)
        assert ops.phxt_wait_group(0, b"absent", 0) == NOT_FOUND


def test_pending_work_is_found_by_the_storage_it_writes():
    load()
    run_ranks(pending_work, 2)


def never_waits(rank, size):
    with World(rank, size) as world:
        x = torch.ones(10)
        most = 0
        for _ in range(200):
            for _ in range(100):
                P.all_reduce(x, "sum", "g")
                most = max(most, world.ops.phxt_pending_count())
            world.barrier()  # a start never waits for the others: without this a fast rank may be any number ahead
        assert most <= 2 * 100  # at most a hundred are not complete; a sweep comes at twice what the last one left
        assert world.ops.phxt_sweep() == 0


def test_results_that_nobody_waits_for_do_not_pile_up():
    load()
    run_ranks(never_waits, 2, timeout=120)


def group_removed_while_pending(rank, size):
    world = World(rank, size)
    result = P.all_reduce(torch.ones(5), "sum", "g")
    checked(world.ops.phxt_group_remove(0, b"g"))
    same(P.wait_tensor(result), torch.full((5,), float(size)))
    world.barrier()
    world.core.phx_group_release(world.group)
    world.core.phx_world_release(world.world)


def test_work_survives_the_removal_of_its_group():
    load()
    run_ranks(group_removed_while_pending, 2)


# ---- several ranks: errors --------------------------------------------------------------------------------------


def errors_before_anything_is_sent(rank, size):
    with World(rank, size):
        x = torch.ones(3)
        if rank == 0:  # the others make no such call: nothing may be sent
            raises(ValueError, lambda: P.all_reduce(x, "nonsense", "g"))
            text = raises(ValueError, lambda: P.reduce_scatter_tensor(x, "sum", size, "g"))
            assert f"dim 0 has size 3, which is not divisible by the group size {size}" in text
            raises(ValueError, lambda: P.all_gather_into_tensor(x, size + 1, "g"))
            raises(ValueError, lambda: P.all_to_all_single(x, [], [], "g"))
        same(P.wait_tensor(P.all_reduce(x, "sum", "g")), torch.full((3,), float(size)))


def test_wrong_arguments_leave_the_group_usable():
    load()
    run_ranks(errors_before_anything_is_sent, 2)


def disagreeing_ranks(rank, size):
    world = World(rank, size)
    x = torch.ones(3 + rank)
    text = raises(RuntimeError, lambda: P.wait_tensor(P.all_reduce(x, "sum", "g")))
    assert world.last_error() == (MISMATCH, text)
    assert world.ops.phxt_pending_count() == 0
    raises(RuntimeError, lambda: P.all_reduce(x, "sum", "g"))
    return text


def test_ranks_that_disagree_get_the_text_of_the_core():
    load()
    for text in run_ranks(disagreeing_ranks, 2):
        assert "float32, 3" in text
        assert "float32, 4" in text


def dead_peer(rank, size, started):
    world = World(rank, size)
    same(P.wait_tensor(P.all_reduce(torch.ones(2), "sum", "g")), torch.full((2,), 2.0))
    if rank == 1:
        deadline = time.monotonic() + 60
        while not started.exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        os.kill(os.getpid(), 9)
    result = P.all_reduce(torch.ones(2), "sum", "g")
    started.touch()
    text = raises(RuntimeError, lambda: P.wait_tensor(result))
    assert world.last_error() == (PEER_DEAD, text)
    assert world.ops.phxt_pending_count() == 0
    P.wait_tensor(result)  # the error was told once
    return text


def test_a_dead_peer_is_an_error_where_the_result_is_waited_for(tmp_path):
    load()
    text, _ = run_ranks(dead_peer, 2, tmp_path / "started", expect_exit={1: -9})
    assert "rank 1" in text
    assert "all_reduce" in text


# ---- with torch.distributed, and with threads -------------------------------------------------------------------


def beside_gloo(rank, size):
    import torch.distributed as dist

    library = torch.library.Library("phalanx_c10d", "IMPL")
    other = dist.group.WORLD.group_name
    with World(rank, size) as world:

        def all_reduce(x, *texts):
            op, name = (world.ffi.string(world.ops.phxt_text(number)).decode() for number in texts)
            return torch.ops._c10d_functional.all_reduce(x, op, name)

        library.impl("all_reduce", all_reduce, "CompositeExplicitAutograd")
        x = torch.full((5,), float(rank + 1))
        total = torch.full((5,), float(size * (size + 1) // 2))
        ours, theirs = P.all_reduce(x, "sum", "g"), P.all_reduce(x * 2, "sum", other)
        same(P.wait_tensor(theirs), total * 2)
        same(P.wait_tensor(ours), total)
        same(P.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "max", other)), torch.full((5,), float(size)))
        assert world.ops.phxt_fallback_count() == 1


def test_groups_of_the_core_and_of_gloo_work_side_by_side():
    load()
    run_ranks(beside_gloo, 2, start_torch=True)


def rank_thread(rank, size, store, failures):
    try:
        with World(rank, size, context=100 + rank, store=store) as world:
            for count in (10, world.eager_bytes):  # the second blocks until the other thread has come
                for repeat in range(20):
                    x = torch.full((count,), float(rank + repeat))
                    total = torch.full((count,), float(sum(range(size)) + size * repeat))
                    same(P.wait_tensor(P.all_reduce(x, "sum", "g")), total)
    except BaseException:
        failures.append(traceback.format_exc())


def test_ranks_may_be_threads_because_ops_run_without_the_gil():
    run_threads(rank_thread, 2)
