"""Windows of process groups, and the hooks and the timeouts for a while that came with them in torch 2.14."""

import os
import signal
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _add_ephemeral_timeout_for_all_pgs, _get_default_group

from c10d_groups import everybody_is_done, join, needs_torch, needs_ucx, run_groups
from phalanx.collectives import c10d
from phalanx.core import InvalidArgumentError
from ranks import scratch

pytestmark = pytest.mark.usefixtures("_torch")
LIMIT = timedelta(seconds=60)


@pytest.fixture
def _torch():
    needs_torch(2, 14, "windows and hooks")


@pytest.fixture
def _symm_mem():
    pytest.importorskip("phalanx.symm_mem")


def backend():
    return _get_default_group()._get_backend(torch.device("cpu"))


def shared(*sizes, dtype=torch.float32, value=0):
    from phalanx import symm_mem

    return symm_mem.empty(*sizes, dtype=dtype).fill_(value)


# ---- windows ---------------------------------------------------------------------------------------------------------


def ring(rank, size):
    join(rank, size)
    assert dist._supports_window() and backend().supports_window
    right, left = (rank + 1) % size, (rank - 1) % size
    for dtype in (torch.float32, torch.int8, torch.bfloat16, torch.int64):
        tensor = shared(size, 50, dtype=dtype, value=-1)
        window = dist._new_window(tensor) if dtype is torch.int8 else dist._new_window()
        if dtype is not torch.int8:
            window.tensor_register(tensor)
        for turn in range(4):
            sent = torch.full((50,), 10 * turn + rank, dtype=dtype)
            put = window.put(sent, right, 50 * rank, bool(turn % 2))
            wait = window.wait_signal(left, bool(turn % 2))
            if turn % 2:
                put.wait()
                wait.wait()
            assert tensor[left].tolist() == [10 * turn + left] * 50
            dist.barrier()
        others = [each for each in range(size) if each != left]
        assert (tensor[others] == -1).all()  # nothing else was written
        assert window.map_remote_tensor(right)[rank].tolist() == [30 + rank] * 50  # that is there
        assert torch.equal(window.map_remote_tensor(rank), tensor)
        assert window.get_attr(right).access_type.name == "UNIFIED"
        dist.barrier()
        window.tensor_deregister()
    dist.destroy_process_group()


@pytest.mark.usefixtures("_symm_mem")
def test_what_was_put_is_there_after_the_signal():  # P36
    run_groups(ring, 3)


def signals(rank, size):
    join(rank, size)
    tensor = shared(8)
    window, other = dist._new_window(tensor[:4]), dist._new_window(tensor[4:])
    peer = 1 - rank
    works = [window.wait_signal(peer, True) for _ in range(3)]
    assert not any(work.is_completed() for work in works)
    other.signal(peer, False)  # those of one window are none of the other
    other.wait_signal(peer, False)
    assert not works[0].is_completed()
    dist.barrier()
    for _ in works:  # they are counted
        window.signal(peer, False)
    for work in works:
        work.wait()
        assert work.is_completed() and work.is_success()
    window.signal(rank, False)  # to oneself
    window.wait_signal(rank, False)
    # A part of a block, which begins elsewhere, and a source that has strides and needs a gradient.
    source = torch.arange(4.0).view(2, 2).t().requires_grad_()
    other.put(source, peer, 0, False)
    other.wait_signal(peer, False)
    assert tensor.tolist() == [0, 0, 0, 0, 0, 2, 1, 3] and not tensor.requires_grad
    dist.barrier()
    window.tensor_deregister()
    other.tensor_deregister()
    window.tensor_register(tensor)  # again, another one
    window.put(torch.full((1,), 9.0), peer, 7, False)
    window.wait_signal(peer, False)
    assert tensor[7] == 9
    window.tensor_deregister()
    dist.destroy_process_group()


@pytest.mark.usefixtures("_symm_mem")
def test_signals_are_counted_and_belong_to_a_window():  # P36
    run_groups(signals, 2)


def differing(rank, size):
    """A tensor of each rank has a shape and a place of its own."""
    join(rank, size)
    tensor = shared(64, value=-1)
    window = dist._new_window(tensor[rank : 11 + 2 * rank])
    peer = 1 - rank
    assert window.map_remote_tensor(peer).shape == (11 + peer,)
    with pytest.raises(InvalidArgumentError, match=f"exceeds the window size of rank {peer}, {11 + peer} elements"):
        window.put(torch.ones(1), peer, 11 + peer, False)
    window.put(torch.full((1,), float(rank)), peer, 10 + peer, False)
    window.wait_signal(peer, False)
    assert tensor[10 + 2 * rank] == peer and (tensor == -1).sum() == 63
    window.tensor_deregister()
    dist.destroy_process_group()


@pytest.mark.usefixtures("_symm_mem")
def test_windows_of_ranks_may_differ():  # P36
    run_groups(differing, 2)


def wrong(rank, size):
    join(rank, size)
    tensor, window, peer = shared(16), dist._new_window(), 1 - rank
    plain = torch.ones(16)
    for call in (
        lambda: window.put(plain, peer, 0, False),
        lambda: window.signal(peer, False),
        lambda: window.wait_signal(peer, False),
        lambda: window.map_remote_tensor(peer),
    ):
        with pytest.raises(InvalidArgumentError, match="not registered"):
            call()
    with pytest.raises(InvalidArgumentError, match="no tensor is registered"):
        window.tensor_deregister()
    # What one rank gives wrongly, all are told.
    on_a_device = tensor.to("meta")  # as one of a GPU
    for given, text in ((plain, "phalanx.symm_mem.empty"), (tensor[::2], "contiguous"), (on_a_device, "on the CPU")):
        with pytest.raises(InvalidArgumentError, match=text if rank else "rank 1 of the group gave a tensor"):
            window.tensor_register(given if rank else tensor)
    window.tensor_register(tensor)
    for call, text in (
        (lambda: window.tensor_register(tensor), "double registration"),
        (lambda: window.put(plain, peer, 1, False), "exceeds the window size"),
        (lambda: window.put(plain[:1], peer, (1 << 63) - 1, False), "exceeds the window size"),
        (lambda: window.put(plain[:1], peer, -1, False), "nonnegative"),
        (lambda: window.put(plain[:1].int(), peer, 0, False), "does not match"),
        (lambda: window.put(plain[:1].to("meta"), peer, 0, False), "on the CPU"),
        (lambda: window.put(plain[:1], size, 0, False), f"rank {size} is not in the group"),
        (lambda: window.signal(-1, False), "rank -1 is not in the group"),
        (lambda: window.wait_signal(size, True), f"rank {size} is not in the group"),
        (lambda: window.map_remote_tensor(size), f"rank {size} is not in the group"),
        (lambda: window.get_attr(size), f"rank {size} is not in the group"),
        (lambda: c10d.window_get(window, peer, plain, 1), "exceeds the window size"),
        (lambda: c10d.window_get(window, peer, plain[:1], -1), "nonnegative"),
        (lambda: c10d.window_get(window, peer, plain[:1].int()), "does not match"),
        (lambda: c10d.window_get(window, peer, plain[::2]), "contiguous"),
        (lambda: c10d.window_get(window, size, plain), f"rank {size} is not in the group"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            call()
    assert not tensor.any()
    dist.barrier()
    window.put(plain, peer, 0, False)  # what was refused has sent no signal
    window.wait_signal(peer, False)
    assert tensor.tolist() == [1] * 16
    window.tensor_deregister()
    dist.destroy_process_group()


@pytest.mark.usefixtures("_symm_mem")
def test_wrong_arguments_are_refused_and_nothing_is_sent():  # P37
    run_groups(wrong, 2)


def late_or_dead(rank, size):
    join(rank, size, seconds=30)
    window = dist._new_window(shared(4))
    store = dist.FileStore(str(scratch() / "bulletin"), -1)
    if rank == 1:
        store.wait(["waits"], LIMIT)
        os.kill(os.getpid(), signal.SIGKILL)
    work = window.wait_signal(1, True)
    with pytest.raises(dist.DistBackendError, match=r"wait_signal.*(200 ms.*rank 1|rank 1.*200 ms)"):
        work.wait(timedelta(milliseconds=200))
    store.set("waits", b"")
    with pytest.raises(dist.DistBackendError, match=r"wait_signal.*rank 1"):  # sooner than after 30 s
        work.wait()
    dist.destroy_process_group()


@pytest.mark.usefixtures("_symm_mem")
def test_a_rank_whose_signal_does_not_come_is_named():  # P37
    run_groups(late_or_dead, 2, expect_exit={1: -signal.SIGKILL}, timeout=25)


# ---- windows between hosts: ranks that are told to be on several, joined by UCX --------------------------------------

HOSTS = pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1, 1), (0, 1, 0)], ids=lambda hosts: f"{len(hosts)} ranks")


@pytest.fixture
def _ucx(_symm_mem):
    needs_ucx()


def on(hosts):
    return [{"PHALANX_HOST_ID": str(7 + host), "UCX_TLS": "tcp"} for host in hosts]


def every_size(rank, size, hosts):
    """From 1 B to 16 MiB, at an offset, in both directions of each pair."""
    join(rank, size, seconds=120)
    others = [each for each in range(size) if hosts[each] != hosts[rank]]
    for dtype, counts in ((torch.uint8, (1, 1 << 10, 1 << 20)), (torch.bfloat16, (1, 5000)), (torch.int64, (1 << 21,))):
        rows = shared(size, max(counts) + 2, dtype=dtype, value=1)
        window = dist._new_window(rows)
        for count in counts:

            def sent(source, count=count, dtype=dtype):
                return (torch.arange(count) + 3 * source).to(dtype)

            for target in range(size):
                window.put(sent(rank), target, rank * rows.shape[1] + 1, False)
            for source in range(size):
                window.wait_signal(source, False)
                assert torch.equal(rows[source, 1 : 1 + count], sent(source))
                assert rows[source, 0] == 1 and (count < max(counts) or rows[source, -1] == 1)  # and no more
            dist.barrier()
            for target in range(size):  # what lies in the windows of others, without a call on their side
                got = c10d.window_get(window, target, torch.empty(count, dtype=dtype), rank * rows.shape[1] + 1)
                assert torch.equal(got, sent(rank))
            dist.barrier()
        for other in others:
            with pytest.raises(NotImplementedError, match=f"rank {other} is on another host.*window_get"):
                window.map_remote_tensor(other)
        for near in set(range(size)) - set(others):
            assert torch.equal(window.map_remote_tensor(near)[near, 1:2], rows[near, 1:2])
        window.tensor_deregister()
    dist.destroy_process_group()


@HOSTS
@pytest.mark.usefixtures("_ucx")
def test_puts_and_gets_between_hosts(hosts):  # P36
    run_groups(every_size, len(hosts), hosts, env=on(hosts), timeout=170)


def in_order(rank, size):
    """All others overwrite the same rows of the last rank, which checks every byte when it sees a signal."""
    join(rank, size, seconds=60)
    rows = shared(size, 30000, dtype=torch.int32)
    window = dist._new_window(rows)
    target, at = size - 1, rank * 30000
    for turn in range(150):
        if rank == target:
            for source in range(target):
                for _ in range(3):  # of two puts and a signal
                    window.wait_signal(source, False)
                expected = torch.full((30000,), turn * size + source, dtype=torch.int32)
                expected[100:200] = -turn
                assert torch.equal(rows[source], expected)
        else:
            window.put(torch.full((30000,), turn * size + rank, dtype=torch.int32), target, at, False)
            window.put(torch.full((100,), -turn, dtype=torch.int32), target, at + 100, False)
            window.signal(target, False)
        dist.barrier()
    window.tensor_deregister()
    dist.destroy_process_group()


@HOSTS
@pytest.mark.usefixtures("_ucx")
def test_a_signal_between_hosts_comes_after_its_data(hosts):  # P36
    run_groups(in_order, len(hosts), env=on(hosts), timeout=110)


def passive(rank, size):
    """Rank 1 is in no call while rank 0 puts and gets."""
    join(rank, size)
    tensor = shared(1 << 20)
    window = dist._new_window(tensor)
    store = dist.FileStore(str(scratch() / "bulletin"), -1)
    if rank == 0:
        sent = torch.randn(1 << 20)
        window.put(sent, 1, 0, False)
        assert torch.equal(c10d.window_get(window, 1, torch.empty(1 << 20)), sent)
        assert torch.equal(c10d.window_get(window, 1, torch.empty(7), 100), sent[100:107])
        store.set("done", b"")
    else:
        store.wait(["done"], LIMIT)
        window.wait_signal(0, False)
        assert tensor.any()
    dist.barrier()
    window.tensor_deregister()
    dist.destroy_process_group()


@pytest.mark.usefixtures("_ucx")
def test_a_target_on_another_host_need_not_call_anything():  # P36
    run_groups(passive, 2, env=on((0, 1)))


@pytest.mark.usefixtures("_ucx")
def test_wrong_arguments_between_hosts_send_nothing():  # P37
    run_groups(wrong, 2, env=on((0, 1)))


@pytest.mark.usefixtures("_ucx")
def test_a_dead_rank_of_another_host_is_named():  # P37
    run_groups(late_or_dead, 2, env=on((0, 1)), expect_exit={1: -signal.SIGKILL}, timeout=25)


def put_for_ever(window):
    while True:
        window.put(torch.ones(1 << 22), 1, 0, False)


def killed_while_put_into(rank, size):
    join(rank, size, seconds=30)
    window = dist._new_window(shared(1 << 22))
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError, match=r"rank 1 \(pid \d+"):
        put_for_ever(window)
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        window.put(torch.ones(1), 1, 0, False)
    dist.destroy_process_group()


@pytest.mark.usefixtures("_ucx")
def test_who_puts_into_a_rank_that_dies_is_told():  # P37
    run_groups(killed_while_put_into, 2, env=on((0, 1)), expect_exit={1: -signal.SIGKILL}, timeout=25)


def stopped(rank, size):
    """Rank 1 is stopped, so nobody takes what rank 0 puts."""
    join(rank, size, seconds=5)
    window = dist._new_window(shared(1 << 22))
    store = dist.FileStore(str(scratch() / "bulletin"), -1)
    if rank == 1:
        store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        pid = int(store.get("pid"))
        try:
            with pytest.raises(dist.DistBackendError, match=r"window.put.*5000 ms.*rank 1 \(pid"):
                put_for_ever(window)
            with pytest.raises(dist.DistBackendError, match="revoked by an earlier failure"):
                window.put(torch.ones(1), 1, 0, False)
        finally:
            os.kill(pid, signal.SIGCONT)
    dist.destroy_process_group()


@pytest.mark.usefixtures("_ucx")
def test_a_put_into_a_stopped_rank_ends_in_time():  # P37
    run_groups(stopped, 2, env=on((0, 1)), timeout=40)


def aborted(rank, size):
    join(rank, size)
    window = dist._new_window(shared(4))
    dist.barrier()
    waits = window.wait_signal(1 - rank, True)
    if rank == 0:
        backend().abort()
    with pytest.raises(dist.DistBackendError, match="abort"):
        waits.wait()
    dist.destroy_process_group()


@pytest.mark.usefixtures("_ucx")
def test_an_abort_ends_waits_between_hosts():  # P37
    run_groups(aborted, 2, env=on((0, 1)))


def dropped_while_put_into(rank, size):
    """Rank 1 lets go of its window without a word, while rank 0 goes on."""
    join(rank, size)
    first, second = dist._new_window(shared(1 << 18)), dist._new_window(shared(4))
    dist.barrier()
    if rank == 1:
        del first
        second.signal(0, False)
    for _ in range(20):
        if rank == 0:
            first.put(torch.ones(1 << 18), 1, 0, False)
            first.put(torch.ones(4), 1, 0, False)
    if rank == 0:
        second.wait_signal(1, False)
        with pytest.raises(dist.DistBackendError, match="has released the window"):
            c10d.window_get(first, 1, torch.empty(4))
    dist.barrier()
    second.tensor_deregister()
    dist.destroy_process_group()


@pytest.mark.usefixtures("_ucx")
def test_a_window_may_go_while_another_host_puts():  # P37
    run_groups(dropped_while_put_into, 2, env=on((0, 1)))


# ---- hooks -----------------------------------------------------------------------------------------------------------


def hooks(rank, size):
    join(rank, size)
    group, seen = dist.group.WORLD, []
    group.register_pre_hook(1, lambda told: seen.append(("pre", told.name.name, told.op_id)))
    group.register_post_hook(1, lambda told: seen.append(("post", told.name.name, told.op_id)))
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, torch.ones(1), 1 - rank), dist.P2POp(dist.irecv, torch.ones(1), 1 - rank)]
    )
    for work in works:
        work.wait()
    group.unregister_pre_hook(1)
    group.unregister_post_hook(1)
    dist.all_reduce(torch.ones(1))
    before, after = ([each[1:] for each in seen if each[0] == when] for when in ("pre", "post"))
    assert before == after and {"ALLREDUCE", "BARRIER", "SEND", "RECV"} <= {name for name, _ in before}
    assert len(before) == 4
    dist.destroy_process_group()


def test_hooks_before_and_after_calls_are_run():  # P38
    run_groups(hooks, 2)


def abort_hooks(rank, size, cause):
    join(rank, size, seconds=30)
    dist.barrier()
    ran, failed = [], threading.Event()
    backend().register_abort_hook(1, lambda: ran.append("first"))
    backend().register_abort_hook(2, lambda: ran.append("gone"))
    backend().register_abort_hook(3, failed.set)
    backend().unregister_abort_hook(2)
    backend().unregister_abort_hook(9)  # never there
    dist.barrier()
    assert ran == []
    if cause == "abort":
        backend().abort()
        backend().abort()
    elif cause == "death":
        if rank == 1:
            dist.FileStore(str(scratch() / "bulletin"), -1).wait(["waits"], LIMIT)
            os.kill(os.getpid(), signal.SIGKILL)
        work = dist.all_reduce(torch.ones(1), async_op=True)
        dist.FileStore(str(scratch() / "bulletin"), -1).set("waits", b"")
        with pytest.raises(dist.DistBackendError, match="rank 1"):
            work.wait()
    else:
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(torch.ones(1 + rank))
    assert failed.wait(20) and ran == ["first"]  # once
    dist.destroy_process_group()
    assert ran == ["first"]


@pytest.mark.parametrize("cause", ["abort", "death", "mismatch"])
def test_abort_hooks_are_run_once_when_the_group_fails(cause):  # P38
    run_groups(abort_hooks, 2, cause, expect_exit={1: -signal.SIGKILL} if cause == "death" else None)


def no_abort(rank, size):
    join(rank, size)
    ran = []
    backend().register_abort_hook(1, lambda: ran.append(1))
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    dist.destroy_process_group()
    assert ran == []


def test_the_end_of_a_group_is_no_failure():  # P38
    run_groups(no_abort, 2)


# ---- timeouts for a while --------------------------------------------------------------------------------------------


def longer(rank, size):
    """Rank 0 waits longer than the timeout of the group, and then not again."""
    join(rank, size, seconds=60)
    dist.barrier()
    waited = threading.Event()
    if rank == 0:
        backend().set_timeout(timedelta(milliseconds=300))
        _add_ephemeral_timeout_for_all_pgs(timedelta(seconds=50))
        x = torch.ones(1)
        work = dist.all_reduce(x, async_op=True)
        assert not waited.wait(0.9)  # three times the timeout
        assert not work.is_completed()
        everybody_is_done(rank, range(size), "waited")
        work.wait()
        assert x.item() == size
        with pytest.raises(dist.DistBackendError, match="300 ms"):  # the extension ended with that call
            dist.all_reduce(torch.ones(1))
    else:
        everybody_is_done(rank, range(size), "waited")
        dist.all_reduce(torch.ones(1))
    everybody_is_done(rank, range(size), "over")
    dist.destroy_process_group()


def test_a_timeout_can_be_longer_for_a_while():  # P39
    run_groups(longer, 2)


# ---- gather_single ---------------------------------------------------------------------------------------------------


def gathers(rank, size):
    join(rank, size)
    for root in range(size):
        x = torch.arange(6).view(2, 3) + 10 * rank
        out = torch.empty(2 * size, 3, dtype=torch.int64) if rank == root else None
        dist.gather_single(x, out, dst=root)
        if rank == root:
            assert torch.equal(out, torch.cat([torch.arange(6).view(2, 3) + 10 * each for each in range(size)]))
    flat = torch.empty(size) if rank == 0 else None
    work = dist.gather_single(torch.full((1,), float(rank)), flat, dst=0, async_op=True)
    work.wait()
    assert rank != 0 or flat.tolist() == list(range(size))
    dist.destroy_process_group()


def test_gather_single_gathers_into_one_tensor():
    run_groups(gathers, 3)
