"""Callbacks of futures of the backend `phalanx`: they may wait, take long and raise, and disturb nobody."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from c10d_groups import join, run_groups
from phalanx.collectives import c10d
from ranks import scratch

LONG = 30  # seconds, after which a test has hung


def states():
    """The lines of /proc/.../status, by name, of each thread that completes futures."""
    found = []
    for each in Path("/proc/self/task").glob("*/status"):
        with contextlib.suppress(OSError):  # it has just ended
            found.append(dict(line.split(":\t", 1) for line in each.read_text().splitlines()))
    return [state for state in found if "phalanx_futures" in state["Name"]]


def futures_threads():
    return len(states())


def begin(tensor):
    return dist.all_reduce(tensor, async_op=True).get_future()


def nested(rank, size):
    join(rank, size)

    def deeper(depth):
        def callback(done):
            x = done.value()[0]
            return x if depth == 0 else begin(x * 2).then(deeper(depth - 1)).wait()

        return callback

    for count in (1, 1 << 16):
        for _ in range(10):
            assert begin(torch.ones(count)).then(deeper(4)).wait()[0].item() == size * (2 * size) ** 4
    dist.destroy_process_group()
    assert futures_threads() == 0


def test_callbacks_wait_for_futures_four_levels_deep():
    run_groups(nested, 2)


def slow_beside_fast(rank, size):
    join(rank, size)
    goes_on = threading.Event()
    late = torch.zeros(1)
    slow = dist.irecv(late, 1 - rank).get_future().then(lambda done: goes_on.wait(LONG))
    dist.barrier()  # a callback that is added to a complete future runs at once, in the thread that adds it
    dist.isend(torch.ones(1), 1 - rank).wait()
    fast = [begin(torch.full((8,), float(i))).then(lambda done: done.value()[0].sum().item()) for i in range(5)]
    assert [each.wait() for each in fast] == [8.0 * size * i for i in range(5)]
    work = dist.isend(torch.ones(4), 1 - rank)
    got = torch.zeros(4)
    receive = dist.irecv(got, 1 - rank).get_future().then(lambda done: done.value()[0].sum().item())
    assert receive.wait() == 4
    work.wait()
    with dist._coalescing_manager(async_ops=True) as manager:
        for value in (1.0, 2.0):
            dist.all_reduce(torch.full((2,), value))
    both = [work.get_future().then(lambda done: begin(torch.ones(1)).wait()[0].item()) for work in manager.works]
    assert [each.wait() for each in both] == [size] * len(both)
    assert not slow.done()
    goes_on.set()
    assert slow.wait() is True
    dist.destroy_process_group()
    assert futures_threads() == 0


def test_a_slow_callback_holds_up_no_other():
    run_groups(slow_beside_fast, 2)


def raising(rank, size):
    join(rank, size)

    def callback(done):
        raise KeyError("of a callback")

    first = begin(torch.ones(1))
    chained = first.then(callback)
    first.add_done_callback(callback)
    assert first.wait()[0].item() == size
    with pytest.raises(RuntimeError, match="of a callback"):
        chained.wait()
    assert begin(torch.ones(1)).then(lambda done: done.value()[0].item()).wait() == size
    many = [begin(torch.full((4,), float(i))) for i in range(40)]
    order = []
    for i, each in enumerate(many):
        each.add_done_callback(lambda done, i=i: order.append(i))
    assert [each.wait()[0][0].item() for each in many] == [size * float(i) for i in range(40)]
    dist.destroy_process_group()
    assert sorted(order) == list(range(40))
    # A callback that ends the group itself.
    join(rank, size, name="second")
    dist.barrier()
    ended = begin(torch.ones(1)).then(lambda done: dist.destroy_process_group())
    ended.wait()
    assert not dist.is_initialized()


def test_a_callback_that_raises_or_ends_the_group_does_no_harm():
    run_groups(raising, 2)


def together(rank, size):
    """Futures of calls, of callbacks and of collections, on three groups, one of which torch does not know."""
    join(rank, size)
    other = dist.new_group(list(range(size)))
    own = c10d.process_group(dist.PrefixStore("own", dist.distributed_c10d._get_default_store()), rank, size)
    groups = {"first": dist.group.WORLD, "other": other, "own": own}

    def start(name, value):
        return groups[name].allreduce([torch.full((3,), float(value))]).get_future()

    def doubled_by(name):
        """A callback that waits for a collective of the group."""
        return lambda done: start(name, 2 * done.value()[0][0].item()).wait()

    # A collection of calls, one of callbacks that wait for calls of other groups, and one of collections.
    started = [start(name, rank) for name in groups]
    total = sum(range(size))
    collected = torch.futures.collect_all(started)
    assert [each.value()[0][0].item() for each in collected.wait()] == [total] * 3
    # Ranks call the collectives of one group in one order: each group is that of one callback.
    chained = [each.then(doubled_by(name)) for each, name in zip(started, reversed(groups), strict=True)]
    nested = torch.futures.collect_all([torch.futures.collect_all(chained[:2]), torch.futures.collect_all(chained[2:])])
    sums = nested.then(lambda done: [each.value()[0][0].item() for part in done.value() for each in part.value()])
    assert sums.wait() == [2 * total * size] * 3
    # A callback of a collection may wait for further calls, and a future made by hand for a call.
    after = torch.futures.collect_all([start(name, 1) for name in groups]).then(
        lambda done: start("first", sum(each.value()[0][0].item() for each in done.value())).wait()
    )
    assert after.wait()[0].tolist() == [3.0 * size * size] * 3
    by_hand = torch.futures.Future()
    start("own", 1).add_done_callback(lambda done: by_hand.set_result(done.value()[0][0].item()))
    assert by_hand.then(lambda done: 2 * done.value()).wait() == 2 * size
    assert torch.futures.wait_all([start("own", 1), chained[0], collected])[0][0].tolist() == [float(size)] * 3
    # One that fails does so for all that wait for it, with its text; the others have their values.
    failing = start("other", 1).then(lambda done: {}["no such key"])
    good = start("own", 1)
    with pytest.raises(RuntimeError, match="no such key"):
        torch.futures.wait_all([good, failing])
    with pytest.raises(RuntimeError, match="no such key"):
        torch.futures.collect_all([failing, good]).then(lambda done: [each.value() for each in done.value()]).wait()
    assert good.wait()[0][0].item() == size
    own.shutdown()
    dist.destroy_process_group()
    assert futures_threads() == 0


def test_futures_wait_for_futures_of_other_groups_and_for_collections():  # P18
    run_groups(together, 2)


def real_timeout(rank, size, what):
    join(rank, size)
    dist.barrier()
    c10d.set_timeout(timedelta(milliseconds=1300))
    over = dist.FileStore(str(scratch() / "over"), 1)
    if rank == 0:
        begun = begin(torch.ones(4)) if what == "all_reduce" else dist.irecv(torch.ones(1), 1).get_future()
        with pytest.raises(RuntimeError, match=f"{what}.*after 1300 ms"):
            begun.wait()
        over.set("over", b"")
    else:
        over.wait(["over"], timedelta(seconds=LONG))


@pytest.mark.parametrize("what", ["all_reduce", "recv"])
def test_a_future_names_the_real_timeout(what):
    run_groups(real_timeout, 2, what)


def beside_a_program(rank, size):
    """Waits for a late rank, on a core that a program wants. How often its thread slept and gave the core away."""
    with contextlib.ExitStack() as stack:
        if rank == 0:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            program = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(program.kill)
        join(rank, size)
        for _ in range(10):
            if rank == 1:
                time.sleep(0.06)
            begin(torch.ones(4)).wait()
        told = [[int(state[f"{kind}_ctxt_switches"]) for state in states()] for kind in ("voluntary", "nonvoluntary")]
    dist.destroy_process_group()
    return tuple(map(sum, told))


def test_futures_do_not_give_their_core_to_other_programs():
    """A program that computes has a slice of time for each yield; a thread that sleeps takes the core back."""
    slept, yielded = run_groups(beside_a_program, 2)[0]
    assert slept > yielded
