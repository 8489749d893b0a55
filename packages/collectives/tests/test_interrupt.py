"""Ctrl-C while a collective of PyTorch waits in the core."""

import os
import signal
import threading
import time

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

import phalanx.collectives as pc  # noqa: E402
from c10d_groups import run_groups  # noqa: E402
from ranks import run_ranks, scratch  # noqa: E402

SOON_SECONDS = 10
VICTIM = 1


def send_soon(number=signal.SIGINT):
    timer = threading.Timer(0.3, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()


def say(name):
    (scratch() / name).touch()


def hear(name):
    while not (scratch() / name).exists():
        time.sleep(0.001)


def name_of(group):
    return group.group_name


def functional(x):
    return pc.all_reduce(x, "sum", dist.group.WORLD).sum().item()


def op(x):
    return torch.ops.phalanx.wait_tensor(torch.ops.phalanx.all_reduce(x, "sum", name_of(dist.group.WORLD)))


def blocking_op(x):
    return torch.ops.phalanx.blocking_all_reduce(x, "sum", name_of(dist.group.WORLD))


def in_place(x):
    return pc.all_reduce_(x, "sum", dist.group.WORLD)


def torch_op(x):
    return dist.all_reduce(x)


def torch_work(x):
    return dist.all_reduce(x, async_op=True).wait()


def torch_barrier(x):
    return dist.barrier()


def torch_receive(x):
    return dist.recv(x, 1 - dist.get_rank())


def repeat(wait):
    """Until it raises: what the victim had sent may come before the news of its interruption."""
    while True:
        wait(torch.ones(4))


def interrupt(rank, world_size, backend, name):
    wait = globals()[name]
    dist.init_process_group(backend, init_method=f"file://{scratch()}/store", rank=rank, world_size=world_size)
    blocking_op(torch.ones(4))  # the ranks have met
    if backend == "phalanx":
        torch_op(torch.ones(4))
    if rank == VICTIM:
        send_soon()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            wait(torch.ones(4))
        assert time.monotonic() - began < SOON_SECONDS
        say("interrupted")
    else:
        hear("interrupted")
        with pytest.raises(Exception, match=rf"rank {VICTIM} \(pid \d+\) was interrupted"):
            repeat(wait)
    hear_all(rank, world_size)


def hear_all(rank, world_size):
    say(f"over.{rank}")
    for each in range(world_size):
        hear(f"over.{each}")


@pytest.mark.parametrize("wait", [functional, op, blocking_op, in_place], ids=lambda wait: wait.__name__)
def test_ctrl_c_ends_a_functional_collective(wait):
    run_ranks(interrupt, 2, "gloo", wait.__name__, loaded=False)


def test_ctrl_c_ends_a_wait_in_a_process_that_was_forked_after_the_import():
    run_ranks(interrupt, 2, "gloo", functional.__name__, loaded=True)


@pytest.mark.parametrize("wait", [torch_op, torch_work, torch_barrier, torch_receive], ids=lambda wait: wait.__name__)
def test_ctrl_c_ends_a_collective_of_the_backend(wait):
    run_groups(interrupt, 2, "phalanx", wait.__name__)


def interrupt_the_meeting(rank, world_size):
    dist.init_process_group("gloo", init_method=f"file://{scratch()}/store", rank=rank, world_size=world_size)
    if rank == VICTIM:
        for wait in (functional, blocking_op):
            send_soon()
            with pytest.raises(KeyboardInterrupt):
                wait(torch.ones(4))
        say("over")
    else:
        hear("over")


def test_ctrl_c_ends_the_meeting_of_the_ranks():
    run_ranks(interrupt_the_meeting, 2)


def wait_again(rank, world_size):
    dist.init_process_group("gloo", init_method=f"file://{scratch()}/store", rank=rank, world_size=world_size)
    blocking_op(torch.ones(4))
    if rank == VICTIM:
        result = pc.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
        send_soon()
        with pytest.raises(KeyboardInterrupt):
            result.wait()
        with pytest.raises(RuntimeError, match="was interrupted"):
            result.wait()
        say("over")
    else:
        hear("over")


def test_a_result_whose_wait_was_interrupted_cannot_be_used():
    run_ranks(wait_again, 2)
