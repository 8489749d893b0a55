"""Life of a world: cycles, forks, exits, threads as ranks, other Python threads while it waits."""

import gc
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from phalanx.core import (
    FileStore,
    InvalidArgumentError,
    MemoryStore,
    PrefixStore,
    UnsupportedError,
    WaitTimeoutError,
    World,
    set_log,
)
from ranks import run_ranks, scratch

np = pytest.importorskip("numpy", reason="needs numpy")


def join(rank, world_size, **options):
    return World(rank, world_size, FileStore(scratch() / "store"), timeout_ms=30_000, **options)


def open_files():
    return len(os.listdir("/proc/self/fd"))


def mappings():
    with open("/proc/self/maps") as file:
        return sum("memfd:" in line for line in file)


def use_a_world(rank, world_size, store, job):
    with World(rank, world_size, store, timeout_ms=60_000, job=job) as world:
        group = world.create_group("all", range(world_size))
        symm = group.rendezvous(world.alloc(4096))
        out = np.empty(10, np.float32)
        group.all_reduce(np.full(10, rank, np.float32), out)
        assert (out == sum(range(world_size))).all()
        symm.barrier()


def held():
    gc.collect()
    return open_files(), mappings(), threading.active_count(), len(os.listdir("/proc/self/task"))


def make_many_worlds(rank, world_size):
    store = FileStore(scratch() / "store")
    for i in range(200):
        use_a_world(rank, world_size, store, f"job{i}")
        if i == 4:
            settled = held()
    return settled, held()


def test_two_hundred_worlds_leave_no_file_mapping_or_thread():
    for before, after in run_ranks(make_many_worlds, 2, timeout=240):
        assert after == before


def one_world(rank, world_size):
    use_a_world(rank, world_size, FileStore(scratch() / "store"), None)
    gc.collect()


def test_a_world_leaves_nothing_behind():
    run_ranks(one_world, 3, check_leaks=True)


def test_ranks_may_be_threads_of_one_process():
    size, store = 4, MemoryStore()

    def rank_thread(rank):
        with World(rank, size, store, timeout_ms=60_000) as world:
            group = world.create_group("all", range(size))
            memory = world.alloc(400)
            symm = group.rendezvous(memory)
            array = np.frombuffer(memory.buffer(), np.float32)
            out, whole = np.empty(100, np.float32), np.empty(100 * size, np.float32)
            for step in range(50):
                array[:] = rank + step
                symm.all_reduce(0, out)
                assert (out == sum(range(size)) + step * size).all()
                group.all_gather(np.full(100, rank, np.float32), whole)
                assert (whole == np.repeat(np.arange(size), 100)).all()
            symm.put_signal((rank + 1) % size)
            symm.wait_signal((rank - 1) % size)
            group.barrier()
            return group.id

    with ThreadPoolExecutor(size) as pool:
        ids = list(pool.map(rank_thread, range(size), timeout=120))
    assert len(set(ids)) == 1


def test_several_worlds_of_one_process_do_not_disturb_each_other():
    base = MemoryStore()

    def rank_thread(job, rank):
        use_a_world(rank, 2, PrefixStore(base, job), job)
        return True

    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(rank_thread, job, rank) for job in ("a", "b", "c") for rank in range(2)]
        assert all(future.result(timeout=120) for future in futures)


def test_other_threads_run_while_a_rank_waits():
    store, ticks, through = MemoryStore(), [], threading.Event()

    def first():
        with World(0, 2, store, timeout_ms=60_000) as world:
            world.create_group("g", [0, 1]).barrier()
            through.set()

    thread = threading.Thread(target=first)
    thread.start()
    with World(1, 2, store, timeout_ms=60_000) as world:
        group = world.create_group("g", [0, 1])
        for _ in range(1000):  # the other waits for us, without the interpreter lock
            ticks.append(time.monotonic())
        assert not through.is_set()
        group.barrier()
        assert through.wait(60)
    thread.join()
    assert len(ticks) == 1000


def fork_and_use(rank, world_size):
    world = join(rank, world_size)
    group = world.create_group("all", range(world_size))
    memory = world.alloc(64)
    symm = group.rendezvous(memory)
    group.barrier()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for call in (
                group.barrier,
                symm.barrier,
                world.check,
                lambda: world.alloc(16),
                lambda: symm.buffer(0),
                lambda: group.sequence,
            ):
                with pytest.raises(UnsupportedError, match="after the fork") as caught:
                    call()
                assert str(os.getppid()) in str(caught.value)
            assert "parent" in repr(world)
            world.finalize()  # C1: does nothing
            del symm, group, memory
            gc.collect()  # must not free or leave anything on behalf of the parent
            with World(0, 1) as fresh:
                assert fresh.create_group("own", [0]).group_size == 1
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    group.barrier()
    memory.buffer()[:] = bytes([rank]) * 64
    symm.barrier()
    assert [symm.buffer(r)[0] for r in range(world_size)] == list(range(world_size))
    group.barrier()
    world.finalize()


def test_a_forked_child_cannot_use_the_world_and_does_not_disturb_the_parent():
    run_ranks(fork_and_use, 2)


def fork_and_exit(rank, world_size):
    world = join(rank, world_size)
    group = world.create_group("all", range(world_size))
    pid = os.fork()
    if pid == 0:
        code = "import sys; sys.exit(0)"
        os.execv(sys.executable, [sys.executable, "-c", code])
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    child = subprocess.run([sys.executable, "-c", "pass"], timeout=60)
    assert child.returncode == 0
    group.barrier()
    world.finalize()


def test_children_that_exec_and_end_are_not_taken_for_the_rank():
    run_ranks(fork_and_exit, 2)


def exit_without_finalize(rank, world_size):
    # What is still alive at exit: a module-level world with everything in use.
    global kept
    world = join(rank, world_size)
    group = world.create_group("all", range(world_size))
    memory = world.alloc(64)
    symm = group.rendezvous(memory)
    out = np.empty(4, np.float32)
    work = group.all_reduce(np.ones(4, np.float32), out, blocking=False)
    kept = [world, group, memory, symm, work, memory.buffer(), symm.buffer(0), out]
    kept.append(kept)
    group.barrier()
    return True


kept = None


def test_exit_without_finalize_is_clean():
    assert run_ranks(exit_without_finalize, 2, fresh=True) == [True, True]


def drop_everything(rank, world_size):
    world = join(rank, world_size)
    group = world.create_group("all", range(world_size))
    symm = group.rendezvous(world.alloc(64))
    symm.barrier()
    del symm, group, world  # without finalize
    gc.collect()


def test_dropping_all_references_is_enough():
    run_ranks(drop_everything, 2, check_leaks=True)


def test_a_store_key_of_another_job_is_not_seen():
    store = MemoryStore()
    with World(0, 1, store, job="a") as first, World(0, 1, store, job="b") as second:
        assert first.create_group("g", [0]).id is not None
        assert second.create_group("g", [0]).group_size == 1


def test_the_same_rank_twice_is_an_error_or_a_new_life():
    store = MemoryStore()
    with World(0, 1, store):
        pass
    with World(0, 1, store) as again:
        assert again.create_group("g", [0]).group_size == 1


def test_a_default_timeout_can_be_changed():
    with World(0, 2, MemoryStore(), timeout_ms=60_000) as world:
        world.set_timeout(50)
        with pytest.raises(WaitTimeoutError, match="1"):
            world.create_group("g", [0, 1])
        with pytest.raises(InvalidArgumentError, match="timeout_ms"):
            world.set_timeout(-1)
        world.set_timeout(0)


def test_the_log_goes_to_the_function_that_was_set():
    lines = []
    set_log(lambda *line: lines.append(line), 0)
    try:
        with World(0, 1) as world:
            world.create_group("g", [0]).revoke("for the log")
    finally:
        set_log(None)
    assert all(isinstance(level, int) and isinstance(text, str) for level, _, _, text in lines)
    count = len(lines)
    with World(0, 1):
        pass
    assert len(lines) == count


def compute_after_a_start(rank, world_size, options):
    with join(rank, world_size, **options) as world:
        group = world.create_group("all", range(world_size))
        data = np.full(1 << 20, rank, np.float32)
        work = group.all_reduce(data, data, blocking=rank != 0)
        if rank == 0:
            while not (scratch() / "done").exists():  # the others complete while this rank calls nothing
                time.sleep(0.001)
            work.wait()
        else:
            (scratch() / "done").touch()
        assert (data == sum(range(world_size))).all()


@pytest.mark.parametrize("named", [True, False], ids=["argument", "variable"])
def test_a_world_with_progress_moves_what_a_rank_has_started_while_it_computes(named):
    if named:
        run_ranks(compute_after_a_start, 2, {"progress": True})
    else:
        run_ranks(compute_after_a_start, 2, {}, env={"PHALANX_PROGRESS": "1"})
