"""A forked child can neither use its parent's groups nor disturb them.  C1"""

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from subprocess import PIPE

import pytest
import torch
import torch.distributed as dist

import phalanx.collectives as pc
from c10d_groups import join, native_folder, run_groups
from phalanx.core import UnsupportedError
from ranks import run_ranks, scratch

REFUSED = (NotImplementedError, UnsupportedError, RuntimeError)


def in_child(body, seconds=30):
    """Runs `body` in a forked child, which must end by itself. Returns its exit status and what it wrote to stderr."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writer, 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        os.close(reader)
        signal.alarm(seconds)
        status = 1
        try:
            body()
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said


def calls(group):
    """One call of each kind on ordinary tensors of 100, which would spoil the sum of the others."""
    name = group.group_name

    def tensor():
        return torch.full((3,), 100.0)

    return {
        "back end": lambda: dist.all_reduce(tensor(), group=group),
        "back end, async": lambda: dist.all_reduce(tensor(), group=group, async_op=True).wait(),
        "back end, coalesced": lambda: coalesced(group, [tensor(), tensor()]),
        "send": lambda: dist.send(tensor(), 1 - dist.get_rank(), group=group),
        "receive": lambda: dist.recv(tensor(), 1 - dist.get_rank(), group=group),
        "barrier": lambda: dist.barrier(group=group),
        "functional": lambda: pc.wait_tensor(pc.all_reduce(tensor(), "sum", group)),
        "op": lambda: torch.ops.phalanx.blocking_all_reduce(tensor(), "sum", name),
        "op, pending": lambda: torch.ops.phalanx.wait_tensor(torch.ops.phalanx.all_reduce(tensor(), "sum", name)),
    }


def coalesced(group, tensors):
    with dist._coalescing_manager(group=group, async_ops=True) as manager:
        for each in tensors:
            dist.all_reduce(each, group=group)
    manager.wait()


def refuse_all(group):
    for name, call in calls(group).items():
        try:
            call()
        except REFUSED as error:
            assert "fork" in str(error), f"{name}: {error}"
        else:
            raise AssertionError(f"{name} was not refused")


def used_in_children(rank, size):
    join(rank, size)
    group = dist.group.WORLD
    dist.all_reduce(torch.ones(3))
    assert pc.all_reduce(torch.ones(3), "sum", group)[0].item() == 2
    pending = dist.all_reduce(mine := torch.ones(3), async_op=True) if rank == 1 else None

    def child():
        refuse_all(group)
        if pending is not None:
            for call in (pending.is_completed, pending.get_future, pending.wait):
                with pytest.raises(REFUSED, match="fork"):
                    call()
        group.abort()
        dist.destroy_process_group()

    if rank == 1:
        status, said = in_child(child)
        assert (status, said) == (0, ""), said
        pending.wait()
        assert mine[0].item() == 2
    else:
        dist.all_reduce(mine := torch.ones(3))
        assert mine[0].item() == 2
    for _ in range(3):
        dist.all_reduce(x := torch.ones(3))
        assert x.tolist() == [2.0] * 3
        assert pc.all_reduce(torch.ones(3), "sum", group).tolist() == [2.0] * 3


def test_every_call_of_a_child_is_refused_and_its_parents_sums_are_right():
    run_groups(used_in_children, 2)


def used_before_the_ranks_met(rank, size, backend):
    dist.init_process_group(
        backend, init_method=f"file://{scratch() / 'store'}", rank=rank, world_size=size, timeout=timedelta(seconds=30)
    )
    group = dist.group.WORLD

    def child():
        with pytest.raises(REFUSED, match="fork"):
            pc.wait_tensor(pc.all_reduce(torch.full((3,), 100.0), "sum", group))
        if backend == "phalanx":
            with pytest.raises(REFUSED, match="fork"):
                dist.all_reduce(torch.full((3,), 100.0))

    if rank == 1:
        assert (ended := in_child(child)) == (0, ""), ended
    assert pc.all_reduce(torch.ones(3), "sum", group)[0].item() == 2
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_a_child_does_not_meet_the_ranks_in_its_parents_place(backend):
    if backend == "phalanx":
        run_groups(used_before_the_ranks_met, 2, backend)
    else:
        run_ranks(used_before_the_ranks_met, 2, backend)


def child_exits(rank, size, pending):
    join(rank, size)
    group = dist.group.WORLD
    dist.barrier()
    pc.all_reduce(torch.ones(3), "sum", group)
    go = scratch() / "go"
    x = torch.ones(1 << 16)
    if pending and rank == 1:
        while not go.exists():
            time.sleep(0.01)
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future() if pending else None
    functional = None
    if not pending:
        work.wait()
    if rank == 0:
        functional = pc.all_reduce(torch.ones(5), "sum", group) if pending else None
        # As the interpreter ends after sys.exit: the exit handlers, then the objects.
        program = "import atexit, gc; atexit._run_exitfuncs(); gc.collect()"
        began = time.monotonic()
        assert (ended := in_child(lambda: exec(program))) == (0, ""), ended
        assert time.monotonic() - began < 20  # it waited for nobody
        go.touch()
    elif pending:
        functional = pc.all_reduce(torch.ones(5), "sum", group)
    work.wait()
    assert x[0].item() == 2
    if pending:
        assert functional[0].item() == 2
        assert future.wait()[0][0].item() == 2
    dist.all_reduce(y := torch.ones(3))
    assert y[0].item() == 2


@pytest.mark.parametrize("pending", [False, True])
def test_the_end_of_a_child_says_nothing_and_disturbs_nobody(pending):
    run_groups(child_exits, 2, pending)


WHOLE_INTERPRETER = """
import os, sys, time
from datetime import timedelta
from subprocess import PIPE
import torch, torch.distributed as dist
import phalanx.collectives as pc
rank, folder = int(sys.argv[1]), sys.argv[2]
limit = timedelta(seconds=30)
dist.init_process_group("phalanx", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=limit)
group = dist.group.WORLD
pc.all_reduce(torch.ones(1), "sum", group).wait()
dist.barrier()
while rank == 1 and not os.path.exists(folder + "/ended"):
    time.sleep(0.01)
x = torch.ones(1 << 16)
work, functional = dist.all_reduce(x, async_op=True), pc.all_reduce(torch.ones(5), "sum", group)
future = work.get_future()
if rank == 0:
    pid = os.fork()
    if pid == 0:
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    open(folder + "/ended", "w").close()
work.wait()
print(x[0].item(), functional[0].item(), future.wait()[0][0].item())
dist.destroy_process_group()
"""


def test_a_child_that_ends_by_sys_exit_leaves_its_parents_work_alone(tmp_path):
    env = {**os.environ, "PHALANX_NATIVE": native_folder(), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", WHOLE_INTERPRETER]
    ranks = [
        subprocess.Popen([*program, str(rank), str(tmp_path)], env=env, text=True, stdout=PIPE, stderr=PIPE)
        for rank in range(2)
    ]
    try:
        assert [rank.communicate(timeout=60) for rank in ranks] == [("2.0 2.0 2.0\n", "")] * 2
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def groups_of_their_own(rank, size):
    join(rank, size)
    dist.all_reduce(torch.ones(1))
    pc.all_reduce(torch.ones(1), "sum", dist.group.WORLD)
    stop = threading.Event()

    def busy():  # holds locks of the tables of the process
        while not stop.is_set():
            torch.ops.phalanx.wait_tensor(torch.ones(1))

    thread = threading.Thread(target=busy)
    thread.start()

    def child():
        dist.destroy_process_group()
        join(rank, size, name="children")
        dist.all_reduce(x := torch.ones(3))
        assert x[0].item() == 2
        assert pc.all_reduce(torch.ones(3), "sum", dist.group.WORLD)[0].item() == 2
        dist.destroy_process_group()

    status, said = in_child(child, 60)
    stop.set()
    thread.join()
    assert (status, said) == (0, ""), said
    dist.all_reduce(x := torch.ones(3))
    assert x[0].item() == 2


def test_children_make_groups_of_their_own_with_the_names_of_their_parents():
    run_groups(groups_of_their_own, 2)
