"""What the others see when a rank dies, stops, disagrees or never comes."""

import os
import signal
import time

import pytest

from phalanx.core import FileStore, MismatchError, PeerDeadError, PhalanxError, RevokedError, WaitTimeoutError, World
from ranks import run_ranks, scratch

np = pytest.importorskip("numpy", reason="needs numpy")

# Far below the timeouts that the worlds have: whoever needs longer has not noticed, but timed out.
SOON_SECONDS = 20


def await_file(name):
    while not (scratch() / name).exists():
        time.sleep(0.001)


def join(rank, world_size, timeout_ms=120_000, **options):
    return World(rank, world_size, FileStore(scratch() / "store"), timeout_ms=timeout_ms, **options)


def pid_of(rank):
    await_file(f"pid.{rank}")
    return int((scratch() / f"pid.{rank}").read_text())


def publish_pid(rank):
    part = scratch() / f"part.{rank}"
    part.write_text(str(os.getpid()))
    part.rename(scratch() / f"pid.{rank}")


def raised_soon(call, *errors):
    started = time.monotonic()
    with pytest.raises(errors) as caught:
        call()
    assert time.monotonic() - started < SOON_SECONDS, f"noticed too late: {caught.value}"
    return caught.value


VICTIM = 1


def survive_a_kill(rank, world_size, operation):
    world = join(rank, world_size)
    group = world.create_group("tp", range(world_size))
    symm = group.rendezvous(world.alloc(1 << 16))
    out = np.empty(1000 * world_size, np.float32)
    calls = {
        "all_reduce": lambda: group.all_reduce(np.ones(1000, np.float32), out[:1000]),
        "all_gather": lambda: group.all_gather(np.ones(1000, np.float32), out),
        "all_to_all": lambda: group.all_to_all(out.copy(), out),
        "broadcast": lambda: group.broadcast(out, root_group_rank=VICTIM),
        "symm.all_reduce": lambda: symm.all_reduce(0, out[:1000]),
        "symm.barrier": lambda: symm.barrier(2),
        "wait_signal": lambda: symm.wait_signal(VICTIM, 1),
        "barrier": group.barrier,
        "rendezvous": lambda: group.rendezvous(world.alloc(64)),
    }
    group.barrier()
    publish_pid(rank)
    victim = pid_of(VICTIM)
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    # Revoked: when the death was noticed before the call began.
    error = raised_soon(calls[operation], PeerDeadError, RevokedError)
    assert error.peer == VICTIM
    assert error.group == "tp", repr(error)
    assert f"rank {VICTIM}" in str(error)
    assert str(victim) in str(error), str(error)
    if operation not in ("wait_signal", "symm.barrier"):
        # Every later call fails at once, and names the first cause.
        later = raised_soon(group.barrier, RevokedError, PeerDeadError)
        assert f"rank {VICTIM}" in str(later)
        assert group.state == "failed"
        assert f"rank {VICTIM}" in str(group.error())
    with pytest.raises(PhalanxError, match=f"rank {VICTIM}"):
        world.check()
    world.finalize()


@pytest.mark.parametrize(
    "operation",
    [
        "all_reduce",
        "all_gather",
        "all_to_all",
        "broadcast",
        "symm.all_reduce",
        "symm.barrier",
        "wait_signal",
        "barrier",
        "rendezvous",
    ],
)
def test_every_survivor_is_told_who_died(operation):
    shared = set(os.listdir("/dev/shm"))
    run_ranks(survive_a_kill, 3, operation, expect_exit={VICTIM: -signal.SIGKILL})
    assert not [name for name in set(os.listdir("/dev/shm")) - shared if "phalanx" in name or "phx" in name]


def die_while_others_wait(rank, world_size):
    world = join(rank, world_size)
    group = world.create_group("tp", range(world_size))
    group.barrier()
    publish_pid(rank)
    victim = pid_of(VICTIM)
    if rank == VICTIM:
        for other in (0, 2):
            await_file(f"started.{other}")
        os.kill(os.getpid(), signal.SIGKILL)
    work = group.all_reduce(np.ones(8, np.float32), np.empty(8, np.float32), blocking=False)
    (scratch() / f"started.{rank}").touch()
    error = raised_soon(work.wait, PeerDeadError)
    assert (error.peer, error.rank, error.group, error.operation) == (VICTIM, rank, "tp", "all_reduce")
    assert error.sequence == group.sequence > 0
    assert f"rank {VICTIM} (pid {victim}) died" in str(error)
    assert type(work.error()) is PeerDeadError
    with pytest.raises(PeerDeadError):  # and again, the same
        work.test()
    world.finalize()


def test_a_death_in_the_middle_of_a_collective_is_told_with_rank_pid_and_number():
    run_ranks(die_while_others_wait, 3, expect_exit={VICTIM: -signal.SIGKILL})


def survive_with_a_new_group(rank, world_size):
    world = join(rank, world_size)
    group = world.create_group("all", range(world_size))
    group.barrier()
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    raised_soon(group.barrier, PeerDeadError, RevokedError)
    rest = world.create_group("rest", [r for r in range(world_size) if r != VICTIM])
    out = np.empty(1, np.float32)
    rest.all_reduce(np.ones(1, np.float32), out)
    world.finalize()
    return float(out[0])


def test_the_survivors_can_make_a_new_group():
    results = run_ranks(survive_with_a_new_group, 3, expect_exit={VICTIM: -signal.SIGKILL})
    assert results == [2.0, None, 2.0]


def leave_without_a_word(rank, world_size):
    world = join(rank, world_size)
    group = world.create_group("all", range(world_size))
    group.barrier()
    if rank == VICTIM:
        world.finalize()
        return ""
    error = raised_soon(
        lambda: group.all_reduce(np.ones(1, np.float32), np.empty(1, np.float32)), PeerDeadError, RevokedError
    )
    assert error.peer == VICTIM
    world.finalize()
    return str(error)


def test_a_rank_that_left_is_named_too():
    assert f"rank {VICTIM}" in run_ranks(leave_without_a_word, 2)[0]


def stop_answering(rank, world_size):
    world = join(rank, world_size)
    group = world.create_group("tp", range(world_size))
    group.barrier()
    publish_pid(rank)
    victim = pid_of(VICTIM)
    out = np.empty(4, np.float32)
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGSTOP)  # continued by rank 0

        def go_on():  # what the others sent is there, so the first call may still complete
            group.all_reduce(np.ones(4, np.float32), out)
            group.barrier()

        raised_soon(go_on, PhalanxError)
        return ""
    with pytest.raises(PhalanxError) as caught:
        group.all_reduce(np.ones(4, np.float32), out, timeout_ms=700)
    (scratch() / f"told.{rank}").touch()
    if rank == 0:
        for other in (0, 2):
            await_file(f"told.{other}")
        os.kill(victim, signal.SIGCONT)
    assert f"rank {VICTIM}" in str(caught.value), str(caught.value)
    # One of them times out first; the other may hear of it from that one.
    assert isinstance(caught.value, (WaitTimeoutError, RevokedError))
    world.finalize()
    return caught.value.status_name


def test_a_stopped_rank_is_named_at_the_timeout():
    assert "PHX_ERR_TIMEOUT" in run_ranks(stop_answering, 3)


def disagree(rank, world_size, what):
    with join(rank, world_size) as world:
        group = world.create_group("tp", range(world_size))
        group.barrier()
        a, b, wide = np.ones(64, np.float32), np.empty(64, np.float32), np.empty(64 * world_size, np.float32)
        usual = {"op": "sum", "count": 32, "dtype": "float32"}
        odd = {
            "count": {**usual, "count": 64},
            "dtype": {**usual, "dtype": "int32"},
            "op": {**usual, "op": "max"},
        }
        given = odd[what] if rank == 1 and what in odd else usual
        try:
            if what == "operation" and rank == 1:
                group.all_gather(a.ctypes.data, wide.ctypes.data, 32, "float32")
            elif what == "root":
                group.broadcast(a, root_group_rank=1 if rank == 1 else 0)
            else:
                group.all_reduce(a.ctypes.data, b.ctypes.data, **given)
        except (MismatchError, RevokedError) as error:
            with pytest.raises(PhalanxError):
                group.barrier()
            return type(error).__name__, str(error)
        pytest.fail("no error")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("count", ("32", "64")),
        ("dtype", ("float32", "int32")),
        ("op", ("sum", "max")),
        ("operation", ("all_reduce", "all_gather")),
        ("root", ("0", "1")),
    ],
)
def test_ranks_that_disagree_are_told_both_sides(what, words):
    results = run_ranks(disagree, 3, what)
    assert "MismatchError" in {name for name, _ in results}
    for _, text in results:
        assert "rank 1" in text, text
        assert all(word in text for word in words), text
        assert "tp" in text, text


def disagree_on_uneven(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("tp", range(world_size))
        a = np.ones(8, np.float32)
        # Rank 0 sends 3 to rank 1, which expects 2.
        sent, received = ([1, 3], [1, 1]) if rank == 0 else ([1, 1], [2, 1])
        with pytest.raises((MismatchError, RevokedError)) as caught:
            group.all_to_all_v(a, sent, np.empty(8, np.float32), received)
        return str(caught.value)


def test_uneven_blocks_that_do_not_fit_are_a_mismatch():
    for text in run_ranks(disagree_on_uneven, 2):
        assert "3" in text
        assert "2" in text


def stay_away(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("tp", range(world_size))
        out = np.empty(4, np.float32)
        group.all_reduce(np.ones(4, np.float32), out)
        if rank == 2:
            for other in (0, 1):
                await_file(f"told.{other}")
            return ""
        with pytest.raises((WaitTimeoutError, RevokedError)) as caught:
            group.all_reduce(np.ones(4, np.float32), out, timeout_ms=400)
        (scratch() / f"told.{rank}").touch()
        return str(caught.value)


def test_a_rank_that_does_not_come_to_a_collective_is_named_with_its_number():
    texts = run_ranks(stay_away, 3)[:2]
    assert all("rank 2" in text and "tp" in text for text in texts), texts
    assert any("all_reduce" in text for text in texts)


def timeout_of_a_start(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("tp", range(world_size))
        if rank == 1:
            await_file("told")
            return
        work = group.all_reduce(np.ones(4, np.float32), np.empty(4, np.float32), blocking=False)
        with pytest.raises(WaitTimeoutError):
            work.wait(timeout_ms=200)
        (scratch() / "told").touch()
        error = work.error()
        assert error is None or isinstance(error, PhalanxError)


def test_waiting_for_a_work_has_a_timeout_of_its_own():
    run_ranks(timeout_of_a_start, 2)


def interrupt(rank, world_size):
    with join(rank, world_size, timeout_ms=3000) as world:
        group = world.create_group("g", range(world_size))
        if rank == 1:
            await_file("told")
            return
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        seen = []
        signal.signal(signal.SIGALRM, lambda *args: seen.append(time.monotonic()))
        with pytest.raises(WaitTimeoutError):
            group.barrier(timeout_ms=1000)
        assert seen  # the handler ran when the call returned, and the wait was not cut short by it
        (scratch() / "told").touch()


def test_a_signal_does_not_break_a_wait():
    run_ranks(interrupt, 2)
