"""What a coalescing manager refuses, and that the group is usable after it."""

import threading
import warnings

import pytest
import torch
import torch.distributed as dist

import phalanx.collectives as pc
from phalanx.collectives import _recording
from phalanx.core import UnsupportedError
from ranks import run_ranks


def usable(group, size):
    """Nothing is left of a manager, and the ranks are in step."""
    assert not _recording.is_any_open() and not dist.distributed_c10d._world.pg_coalesce_state
    assert not any(state._managers for state in pc._registry._states.values())
    with pc.coalescing_manager(group):
        y = pc.all_reduce(torch.ones(2), "sum", group)
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    return y.tolist() == [size] * 2 and x.tolist() == [size] * 3


def record(group, *calls):
    """A body with these calls."""
    with pc.coalescing_manager(group):
        for call in calls:
            call()


def failing(rank, size):
    group = dist.group.WORLD
    core = pc.core_group(group)
    pc.wait_tensor(pc.all_reduce(torch.ones(1), "sum", group))
    before = core.sequence
    x = torch.ones(4)
    kept = []
    with pytest.raises(ZeroDivisionError):
        record(
            group,
            lambda: kept.append(pc.all_reduce(x, "sum", group)),
            lambda: pc.all_reduce_(x, "sum", group),
            lambda: dist.all_reduce(x),
            lambda: kept.append(pc.irecv(x, 0)),
            lambda: 1 // 0,
        )
    y, work = kept
    assert core.sequence == before and x.tolist() == [1.0] * 4  # P9: nothing was sent
    for use in (lambda: y + 1, lambda: y.view(2, 2).sum(), work.wait):
        with pytest.raises(RuntimeError, match="was never issued: the body of its coalescing_manager raised"):
            use()
    assert usable(group, size)
    complex_ones, eight_bits = torch.ones(2, dtype=torch.complex64), torch.ones(2).to(torch.float8_e5m2)
    for error, text, call in (
        (ValueError, r"reduce op\w* '?median", lambda: pc.all_reduce_(torch.ones(2), "median", group)),
        (ValueError, "src is 9", lambda: pc.broadcast_(x, 9, group)),
        (ValueError, "'premul_sum' needs a factor", lambda: pc.all_reduce(x, "premul_sum", group)),
        (UnsupportedError, "only sum and avg are", lambda: pc.all_reduce(complex_ones, "max", group)),
        (UnsupportedError, "can be moved but not reduced", lambda: pc.all_reduce_(eight_bits, "sum", group)),
        (
            AssertionError,
            "not divisible by the group size",
            lambda: pc.reduce_scatter_tensor(torch.ones(3), "sum", 0, group),
        ),
    ):
        with pytest.raises(error, match=text):
            record(group, lambda: pc.all_reduce_(x, "sum", group), call)
    assert core.sequence == before + 1 and x.tolist() == [1.0] * 4
    assert usable(group, size)


def test_an_exception_in_the_body_leaves_the_group_usable():  # P9
    run_ranks(failing, 2, start_torch=True)


def early(rank, size):
    group = dist.group.WORLD
    x = torch.full((4,), rank + 1.0)
    total = torch.full((4,), size * (size + 1) / 2)
    with pc.coalescing_manager(group, async_ops=True) as cm:
        y = pc.all_reduce(x, "sum", group)
        for use in (
            lambda: y + 1,
            y.tolist,
            lambda: torch.stack([y, y]),
            lambda: repr(y),
            cm.wait,
            lambda: y[0].item(),
        ):
            with pytest.raises(RuntimeError, match="has not been issued yet: it was called inside"):
                use()
        with pytest.raises(RuntimeError, match="has not been issued yet"):
            pc.all_reduce(y, "sum", group)  # one that needs the result of another
        work = pc.isend(x, (rank + 1) % size)
        pc.irecv(got := torch.zeros(4), (rank - 1) % size)
        with pytest.raises(RuntimeError, match="has not been issued yet"):
            work.wait()
        assert not work.is_completed()
    assert torch.equal(y + 0, total)  # an early use does no harm
    cm.wait()
    assert work.is_completed() and got.tolist() == [(rank - 1) % size + 1.0] * 4


def test_a_result_cannot_be_used_before_the_end_of_the_body():
    run_ranks(early, 2, start_torch=True)


def refused(rank, size):
    group = dist.group.WORLD
    core = pc.core_group(group)
    before = core.sequence
    x = torch.ones(8)
    kept = []
    with pytest.raises(ValueError, match="calls 0 and 1 .*(overlap|use the same memory)"):  # P5: they are independent
        record(group, lambda: pc.all_reduce_(x, "sum", group), lambda: pc.all_reduce_(x[2:4], "max", group))
    uneven = [4] * size
    with pytest.raises(ValueError, match="calls 0 and 1 .*(overlap|use the same memory)"):
        record(
            group,
            lambda: pc.all_reduce_(x, "sum", group),
            lambda: pc.all_to_all_single(x, uneven, uneven, group),
        )
    with pytest.raises(RuntimeError, match=r"a tensor of shape \[8\] was changed in the body"):
        record(group, lambda: kept.append(pc.all_reduce(x, "sum", group)), lambda: x.mul_(3))
    (y,) = kept
    with pytest.raises(RuntimeError, match="was changed in the body"):
        y.sum()
    moved = torch.ones(8)
    with pytest.raises(RuntimeError, match="was changed in the body"):  # its memory is gone
        record(group, lambda: pc.all_reduce_(moved, "sum", group), lambda: setattr(moved, "data", torch.ones(8)))
    assert core.sequence == before and x.tolist() == [3.0] * 8
    with pc.coalescing_manager(group):  # reading it twice is fine
        y, z = pc.all_reduce(x, "sum", group), pc.all_reduce(x, "max", group)
    assert y.tolist() == [3.0 * size] * 8 and z.tolist() == [3.0] * 8
    assert usable(group, size)


def test_calls_that_are_not_independent_are_refused_before_anything_is_sent():  # P5, P8
    run_ranks(refused, 2, start_torch=True)


def nested(rank, size):
    group = dist.group.WORLD
    other = dist.new_group(list(range(size)))
    x, y, z = torch.ones(2), torch.ones(3), torch.ones(4)
    with pc.coalescing_manager(group):
        pc.all_reduce_(x, "sum", group)
        with pc.coalescing_manager(other):  # P10: on different groups it works
            pc.all_reduce_(y, "sum", other)
            dist.all_reduce(z, group=other)
            pc.broadcast_(w := torch.full((2,), float(rank)), 1, group)
        assert y.tolist() == [size] * 3 and z.tolist() == [size] * 4
        v = pc.all_reduce(y, "sum", other)  # on another group: at once
        assert (v + 0).tolist() == [size * size] * 3
        with pytest.raises(RuntimeError, match="one is open on group '.*' in this thread already"):
            with pc.coalescing_manager(group.group_name):
                pass
        with pytest.raises(ValueError, match="non-empty op list"):  # torch's own says so
            with dist.distributed_c10d._coalescing_manager(group):
                pass
        assert x.tolist() == [1.0] * 2
    assert x.tolist() == [size] * 2 and w.tolist() == [1.0] * 2
    with dist.distributed_c10d._coalescing_manager(group):
        dist.all_reduce(x)
        with pytest.raises(RuntimeError, match="torch's _coalescing_manager is open on the group"):
            with pc.coalescing_manager(group):
                pass
    manager = pc.coalescing_manager(group)
    for _ in range(2):  # one may be used again
        with manager:
            pc.all_reduce_(x, "max", group)
            with pytest.raises(RuntimeError, match="this manager is open already"):
                manager.__enter__()
    assert usable(group, size) and usable(other, size)


def test_managers_nest_on_different_groups_only():  # P10, P8
    run_ranks(nested, 2, start_torch=True)


def threads(rank, size):
    groups = [dist.new_group(list(range(size))) for _ in range(2)]
    for group in groups:
        pc.enable_group(group)
    failures = []
    meet = threading.Barrier(2, timeout=30)

    def work(group, position):
        try:
            for i in range(20):
                x = torch.full((16,), float(i + rank))
                with pc.coalescing_manager(group):
                    meet.wait()  # both are open
                    pc.all_reduce_(x, "sum", group)
                    y = pc.all_gather_tensor(torch.full((2,), float(rank)), 0, group)
                    meet.wait()
                assert x.tolist() == [size * i + sum(range(size))] * 16 and y.tolist() == [0.0, 0.0, 1.0, 1.0]
            other = groups[1 - position]
            meet.wait()
            if position == 0:
                with pc.coalescing_manager(group):
                    meet.wait()
                    meet.wait()
            else:
                meet.wait()
                with pytest.raises(RuntimeError, match="another thread has a coalescing_manager open"):
                    dist.all_reduce(torch.ones(1), group=other)
                y = pc.all_reduce(torch.ones(2), "sum", other)  # of this thread: at once
                assert (y + 0).tolist() == [size] * 2
                meet.wait()
        except BaseException as error:
            failures.append(error)
            meet.abort()

    running = [threading.Thread(target=work, args=(group, i)) for i, group in enumerate(groups)]
    for each in running:
        each.start()
    for each in running:
        each.join()
    if failures:
        raise failures[0]
    assert usable(dist.group.WORLD, size)


def test_each_thread_records_its_own_calls():
    run_ranks(threads, 2, start_torch=True)


def destroyed(rank, size):
    group = dist.new_group(list(range(size)))
    pc.enable_group(group)
    kept = []
    calls = (
        lambda: kept.append(pc.all_reduce(torch.ones(2), "sum", group)),
        lambda: dist.destroy_process_group(group),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells of calls that it knows of
        with pytest.raises(RuntimeError, match="was destroyed in the body of the with block; nothing was sent"):
            record(group, *calls)
    (y,) = kept
    with pytest.raises(RuntimeError, match="was destroyed in the body"):
        y.tolist()
    assert usable(dist.group.WORLD, size)


def test_a_group_that_is_destroyed_in_the_body_is_told():
    run_ranks(destroyed, 2, start_torch=True)
