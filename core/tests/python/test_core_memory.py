"""Blocks: how long they live, and what an alloc id promises. One rank is enough for all of it."""

import gc
import subprocess
import sys
import threading

import pytest

from phalanx.core import (
    InUseError,
    InvalidArgumentError,
    MemoryCount,
    MismatchError,
    NotFoundError,
    UnsupportedError,
    World,
)


@pytest.fixture
def world():
    with World(0, 1) as world:
        yield world
    gc.collect()


def test_a_block_is_zeroed_writable_memory(world):
    memory = world.alloc(1000)
    view = memory.buffer()
    assert (len(view), view.nbytes, view.readonly) == (1000, 1000, False)
    assert bytes(view) == bytes(1000)
    view[3:6] = b"abc"
    assert bytes(memory.buffer()[:8]) == b"\0\0\0abc\0\0"


def test_find_knows_every_address_of_a_block_and_no_other(world):
    memory = world.alloc(4096)
    for offset in (0, 1, 4095):
        info = world.find(memory.address + offset)
        assert (info.address, info.size, info.live) == (memory.address, 4096, True)
        assert (info.alloc_id, info.device) == (None, ("cpu", 0))
    assert world.find(memory.buffer()).address == memory.address
    assert world.find(memory).address == memory.address
    assert world.find(id(world)) is None
    assert world.find(0) is None


def test_a_block_lives_as_long_as_any_view_of_it(world):
    memory = world.alloc(64)
    address = memory.address
    view = memory.buffer()[8:16].cast("q")
    del memory
    gc.collect()
    assert world.find(address).live
    view[0] = 7
    assert world.mem_count() == MemoryCount(1, 64)
    del view
    gc.collect()
    assert world.find(address) is None
    assert world.mem_count() == MemoryCount(0, 0)


def test_an_array_keeps_its_block_alive(world):
    numpy = pytest.importorskip("numpy", reason="needs numpy")
    array = numpy.frombuffer(world.alloc(32).buffer(), dtype=numpy.float64)[1:]
    gc.collect()
    array[:] = 2.5
    assert array.sum() == 7.5
    assert world.mem_count() == MemoryCount(1, 32)
    del array
    gc.collect()
    assert world.mem_count() == MemoryCount(0, 0)


def test_a_tensor_keeps_its_block_alive(world):
    torch = pytest.importorskip("torch", reason="needs torch")
    tensor = torch.frombuffer(world.alloc(32).buffer(), dtype=torch.float32)
    view = tensor.view(2, 4)[1]
    del tensor
    gc.collect()
    view.fill_(3)
    assert world.mem_count() == MemoryCount(1, 32)
    assert view.sum().item() == 12
    del view
    gc.collect()
    assert world.mem_count() == MemoryCount(0, 0)


def test_a_block_may_die_on_another_thread_and_after_its_world_is_finalized():
    with World(0, 1) as world:
        views = [world.alloc(16).buffer()]
    views[0][0] = 1
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert world.mem_count() == MemoryCount(0, 0)


def test_a_block_outlives_the_last_reference_to_its_world():
    view = World(0, 1).alloc(16).buffer()
    gc.collect()
    view[:4] = b"here"
    assert bytes(view[:4]) == b"here"


EXIT = """
import sys
sys.path[:] = {path!r}
from phalanx.core import CallbackStore, World

class DictStore(dict):
    set = dict.__setitem__
    get = dict.__getitem__

    def add(self, key, amount):
        self[key] = str(int(dict.get(self, key, b"0")) + amount).encode()
        return int(self[key])

    def wait(self, keys, timeout):
        pass

world = World(0, 1, CallbackStore(DictStore()))
view = world.alloc(4096).buffer()
kept = world.alloc(64, alloc_id=1)
cycle = [world.alloc(16)]
cycle.append(cycle)
group = world.attach_group("g", 0, 1, DictStore())
symm = group.rendezvous(kept)
work = group.all_reduce(view[:4], view[8:12], dtype="float32", blocking=False)
{more}
"""


@pytest.mark.parametrize(
    "more",
    [
        "sys.kept = (view, group)",
        "cycle += [world, group, symm, work, kept, view]; del world, group, symm, work, kept, view",
        "world.cycle = cycle; cycle.append(world); del world",
        "world.finalize(); sys.kept = work",
        "raise SystemExit(0)",
    ],
)
def test_interpreter_exit_with_everything_alive_is_clean(more):
    code = EXIT.format(path=sys.path, more=more)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_cycle_of_garbage_is_released_in_the_right_order():
    for _ in range(20):
        world = World(0, 1)
        group = world.create_group("g", [0])
        cycle = [world.alloc(16).buffer(), group.rendezvous(world.alloc(64)), group, world]
        cycle.append(group.all_reduce(bytearray(4), bytearray(4), dtype="float32", blocking=False))
        world.cycle = cycle
        cycle.append(cycle)
        del world, group, cycle
        gc.collect()


def test_a_failed_call_whose_traceback_is_garbage_does_no_harm(world):
    group = world.create_group("g", [0])
    for _ in range(20):
        view, own = world.alloc(16).buffer(), memoryview(bytearray(16))
        try:
            group.all_reduce(view, own, dtype="float32", op="band")
        except UnsupportedError as error:
            error.itself = error  # a cycle that holds all frames
        del view, own
        gc.collect()
    assert world.mem_count() == MemoryCount(0, 0)


@pytest.mark.parametrize("size", [0, 1, 4095, 4097, 1 << 21])
def test_blocks_of_any_size_are_distinct(world, size):
    blocks = [world.alloc(size) for _ in range(3)]
    assert len({block.address for block in blocks}) == 3
    assert all(len(block.buffer()) == size for block in blocks)


def available_bytes():
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))


@pytest.mark.skipif(available_bytes() < 4 << 30, reason="needs 4 GiB of available memory")
def test_a_block_of_more_than_two_gib_is_addressed_in_full(world):
    size = (1 << 31) + 4096
    view = world.alloc(size).buffer()
    view[size - 1] = 9
    view[0] = 4
    assert (view[size - 1], view[0], view[1 << 31]) == (9, 4, 0)


@pytest.mark.parametrize("size", [-1, 1 << 63, 1.0, "4", None])
def test_a_bad_size_is_named(world, size):
    with pytest.raises(InvalidArgumentError, match="size"):
        world.alloc(size)
    assert world.mem_count() == MemoryCount(0, 0)


@pytest.mark.parametrize("device", ["gpu", "cpu:x", "cpu:-1", ("cpu",), ("cpu", -1), 7, None, "", (9, 0)])
def test_a_bad_device_is_named(world, device):
    with pytest.raises(InvalidArgumentError, match="device"):
        world.alloc(16, device=device)


def test_a_device_without_an_allocator_is_unsupported(world):
    with pytest.raises(UnsupportedError):
        world.alloc(16, device=("cuda", 99))


# ---- alloc ids ----------------------------------------------------------------------------------


def test_the_same_alloc_id_gives_the_same_address_after_the_block_died(world):
    memory = world.alloc(256, alloc_id=42)
    address = memory.address
    memory.buffer()[:2] = b"hi"
    del memory
    gc.collect()
    info = world.find(address)
    assert (info.live, info.alloc_id, info.size) == (False, 42, 256)
    assert world.mem_count() == MemoryCount(1, 256)
    again = world.alloc(256, alloc_id=42)
    assert again.address == address
    assert bytes(again.buffer()[:2]) == b"hi"


def test_an_alloc_id_whose_block_is_alive_is_in_use(world):
    view = world.alloc(256, alloc_id=42).buffer()[10:20]
    gc.collect()
    text = "can not allocate with alloc_id == 42 because a previous allocation with the same alloc_id is still active"
    with pytest.raises(InUseError, match=text):
        world.alloc(256, alloc_id=42)
    with pytest.raises(InUseError):
        world.drop(42)
    del view
    gc.collect()
    world.alloc(256, alloc_id=42)


def test_an_alloc_id_with_another_size_is_an_error_with_both(world):
    world.alloc(256, alloc_id=42)
    gc.collect()
    with pytest.raises(MismatchError, match=r"42.*256.*512"):
        world.alloc(512, alloc_id=42)
    world.alloc(256, alloc_id=42)


def test_different_alloc_ids_and_scopes_give_different_addresses(world):
    blocks = [world.alloc(64, alloc_id=1), world.alloc(64, alloc_id=2), world.alloc(64, alloc_id=2**64 - 1)]
    blocks += [world.alloc(64, alloc_id=1, scope=scope) for scope in ("tp", "dp")]
    assert len({block.address for block in blocks}) == 5


def test_an_idle_block_can_be_dropped_and_its_id_used_with_another_size(world):
    world.alloc(64, alloc_id=1, scope="tp")
    gc.collect()
    with pytest.raises(NotFoundError):
        world.drop(1)
    world.drop(1, scope="tp")
    assert world.mem_count() == MemoryCount(0, 0)
    with pytest.raises(NotFoundError):
        world.drop(1, scope="tp")
    assert world.alloc(128, alloc_id=1, scope="tp").size == 128


def test_a_persistent_block_is_kept_when_views_die_on_many_threads(world):
    for _ in range(20):
        view = [world.alloc(64, alloc_id=5).buffer()]
        thread = threading.Thread(target=view.clear)
        thread.start()
        thread.join()
    assert world.mem_count() == MemoryCount(1, 64)


@pytest.mark.parametrize("alloc_id", [-1, 1 << 64, "1", 1.5])
def test_a_bad_alloc_id_is_named(world, alloc_id):
    with pytest.raises(InvalidArgumentError, match="alloc_id"):
        world.alloc(16, alloc_id=alloc_id)


def test_a_scope_without_an_alloc_id_is_an_error(world):
    with pytest.raises(InvalidArgumentError, match="scope"):
        world.alloc(16, scope="tp")
