"""Symmetric memory: rendezvous, peer memory, signals, barriers, and collectives on it."""

import gc
import struct
import time

import pytest

from phalanx.core import (
    FileStore,
    InvalidArgumentError,
    MismatchError,
    NotFoundError,
    PhalanxError,
    UnsupportedError,
    WaitTimeoutError,
    World,
)
from ranks import run_ranks, scratch

np = pytest.importorskip("numpy", reason="needs numpy")


def await_file(name):
    while not (scratch() / name).exists():
        time.sleep(0.001)


def join(rank, world_size, timeout_ms=30_000, **options):
    return World(rank, world_size, FileStore(scratch() / "store"), timeout_ms=timeout_ms, **options)


def fill_and_signal(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        memory = world.alloc(4096)
        symm = group.rendezvous(memory)
        assert (symm.group_rank, symm.group_size, symm.size) == (rank, world_size, 4096)
        mine = memory.buffer().cast("i")
        if rank == 1:
            peer = symm.buffer(0).cast("i")
            for i in range(len(peer)):
                peer[i] = 42
            symm.put_signal(0)
        else:
            symm.wait_signal(1)
            assert mine.tolist() == [42] * 1024
        symm.barrier()
        if rank == 0:
            symm.buffer(1)[:] = b"\x2b" * 4096
        symm.barrier()
        if rank == 1:
            assert bytes(memory.buffer()) == b"\x2b" * 4096


def test_a_peer_fills_memory_signals_and_the_other_sees_it():
    run_ranks(fill_and_signal, 2)


def describe(rank, world_size):
    with join(rank, world_size, signal_channels=5) as world:
        group = world.create_group("all", range(world_size))
        memory = world.alloc(100)
        symm = group.rendezvous(memory)
        assert symm.signal_channels == 5
        assert symm.signal_pad_bytes == 16 * world_size * 4  # whole cache lines
        assert len(symm.buffer_ptrs) == len(symm.signal_pad_ptrs) == world_size
        assert symm.buffer_ptrs[rank] == memory.address
        assert len(set(symm.buffer_ptrs)) == len(set(symm.signal_pad_ptrs)) == world_size
        assert symm.buffer_ptrs_device != 0
        assert symm.signal_pad_ptrs_device != 0
        for peer in range(world_size):
            assert bytes(symm.signal_pad(peer)) == bytes(symm.signal_pad_bytes)
            assert len(symm.buffer(peer)) == 100
        for peer in (-1, world_size, "0"):
            with pytest.raises(InvalidArgumentError, match="group_rank"):
                symm.buffer(peer)
        group.barrier()


def test_a_handle_gives_pointers_and_pads_of_every_rank():
    run_ranks(describe, 3)


def find_again(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        memory, other = world.alloc(256), world.alloc(256)
        assert group.find_symm(memory) is None
        symm = group.rendezvous(memory)
        if rank == 0:  # no communication: the others do not call
            assert group.rendezvous(memory) == symm
            assert group.rendezvous(memory.address + 200) == symm
            assert group.find_symm(memory.buffer()[17:]) == symm
            assert hash(group.find_symm(memory)) == hash(symm)
        assert group.find_symm(other) is None
        assert group.rendezvous(other) != symm
        with pytest.raises(NotFoundError):
            group.rendezvous(bytearray(256))
        assert group.find_symm(bytearray(256)) is None
        group.barrier()


def test_a_rendezvous_is_remembered_and_ordinary_memory_is_refused():
    run_ranks(find_again, 2)


def keep_views(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        memory = world.alloc(64)
        memory.buffer()[:] = bytes([rank]) * 64
        views = [group.rendezvous(memory).buffer(peer) for peer in range(world_size)]
        group.barrier()
        del memory, group
        gc.collect()
        assert [bytes(view) for view in views] == [bytes([peer]) * 64 for peer in range(world_size)]
    gc.collect()
    assert [view[63] for view in views] == list(range(world_size))
    views.clear()
    gc.collect()


def test_views_keep_the_mappings_alive_after_handle_group_memory_and_world():
    run_ranks(keep_views, 3, check_leaks=True)


def disagree_about_size(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("tp", range(world_size))
        with pytest.raises(MismatchError) as caught:
            group.rendezvous(world.alloc(512 if rank == 1 else 256))
        return str(caught.value)


def test_different_sizes_are_told_on_every_rank_with_the_odd_one():
    for text in run_ranks(disagree_about_size, 3):
        assert "rank 1" in text
        assert "512" in text
        assert "256" in text
        assert "tp" in text


def miss_rendezvous(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("tp", range(world_size))
        if rank == 1:
            await_file("done")
            return ""
        with pytest.raises(WaitTimeoutError) as caught:
            group.rendezvous(world.alloc(64), timeout_ms=300)
        (scratch() / "done").touch()
        return str(caught.value)


def test_a_rank_that_misses_the_rendezvous_is_named():
    text = run_ranks(miss_rendezvous, 2)[0]
    assert "rank 1" in text
    assert "rendezvous" in text


def subgroup_then_whole(rank, world_size):
    with join(rank, world_size) as world:
        everyone = world.create_group("all", range(world_size))
        if rank < 2:
            pair = world.create_group("pair", [0, 1])
            for _ in range(3):
                pair.rendezvous(world.alloc(64))
        memory = world.alloc(128)
        whole = everyone.rendezvous(memory)
        whole.barrier()
        if rank < 2:  # one block, two groups: each has a pad of its own
            both = pair.rendezvous(memory)
            assert both != whole
            both.put_signal(1 - rank, 3)
            both.wait_signal(1 - rank, 3)
            assert bytes(whole.signal_pad(rank)) == bytes(whole.signal_pad_bytes)
        whole.barrier()


def test_rendezvous_of_a_subgroup_does_not_disturb_the_whole():
    run_ranks(subgroup_then_whole, 3)


def signal_on_channels(rank, world_size):
    with join(rank, world_size, signal_channels=4) as world:
        group = world.create_group("all", range(world_size))
        symm = group.rendezvous(world.alloc(16))
        peer = 1 - rank
        if rank == 0:
            symm.put_signal(peer, 2)
            symm.put_signal(peer, 2)
            symm.put_signal(peer, 0)
        else:
            symm.wait_signal(peer, 0)
            symm.wait_signal(peer, 2)
            symm.wait_signal(peer, 2)
            with pytest.raises(WaitTimeoutError, match="rank 0"):
                symm.wait_signal(peer, 2, timeout_ms=50)
            with pytest.raises(WaitTimeoutError):
                symm.wait_signal(peer, 3, timeout_ms=50)
            words = struct.unpack("32I", symm.signal_pad(1))
            assert words[:4] == (1, 0, 2, 0) and not any(words[4:])
        group.barrier()
        if rank == 0:
            symm.put_signal(peer, 2)
        else:  # the wait that timed out took nothing
            symm.wait_signal(peer, 2)
        for call in (
            lambda: symm.put_signal(peer, 4),
            lambda: symm.wait_signal(peer, 4),
            lambda: symm.barrier(4),
            lambda: symm.put_signal(2, 0),
            lambda: symm.wait_signal(-1, 0),
            lambda: symm.put_signal(peer, -1),
            lambda: symm.barrier(0, timeout_ms=-1),
        ):
            with pytest.raises(InvalidArgumentError):
                call()
        group.barrier()


def test_signals_count_per_channel_and_a_timed_out_wait_takes_none():
    run_ranks(signal_on_channels, 2)


def retry_barrier(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        symm = group.rendezvous(world.alloc(16))
        if rank == 0:
            for _ in range(3):
                with pytest.raises(WaitTimeoutError):
                    symm.barrier(5, timeout_ms=30)
            (scratch() / "go").touch()
            symm.barrier(5)
            (scratch() / "through").touch()
        else:
            await_file("go")
            symm.barrier(5)
        symm.barrier(5)
        assert (scratch() / "through").exists()
        for _ in range(200):
            symm.barrier(1)
        group.barrier()
        group.barrier()


def test_a_barrier_that_timed_out_goes_on_with_the_same_one():
    run_ranks(retry_barrier, 2)


def collectives(rank, world_size, count):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        offset = 64
        memory = world.alloc(offset + count * world_size * 4)
        symm = group.rendezvous(memory)
        block = np.frombuffer(memory.buffer(), np.float32)[offset // 4 :]
        whole = [np.arange(count * world_size, dtype=np.float32) + 1000 * r for r in range(world_size)]
        part = [each[:count] for each in whole]
        mine = slice(rank * count, (rank + 1) * count)

        def fill():
            group.barrier()
            block[:] = whole[rank]

        for algo in ("auto", "one_shot", "two_shot"):
            out = np.empty(count, np.float32)
            fill()
            symm.all_reduce(offset, out, algo=algo)
            np.testing.assert_array_equal(out, sum(part))
            np.testing.assert_array_equal(block, whole[rank])
            symm.all_reduce(offset, memory.address + offset, count, "float32", "max", algo=algo)
            np.testing.assert_array_equal(block[:count], part[-1])
        fill()
        symm.reduce_scatter(offset, out, op="sum")
        np.testing.assert_array_equal(out, sum(whole)[mine])
        long = np.empty(count * world_size, np.float32)
        fill()
        symm.all_gather(offset, long)
        np.testing.assert_array_equal(long, np.concatenate(part))
        fill()
        symm.all_to_all(offset, long)
        np.testing.assert_array_equal(long, np.concatenate([each[mine] for each in whole]))
        for root in range(world_size):
            fill()
            symm.broadcast(offset, count, "float32", root)
            np.testing.assert_array_equal(block[:count], part[root])
        fill()
        work = symm.all_reduce(offset, out, blocking=False)
        work.wait()
        np.testing.assert_array_equal(out, sum(part))
        group.barrier()


@pytest.mark.parametrize(("world_size", "count"), [(1, 100), (2, 1), (2, 100_000), (3, 5), (4, 30_000)])
def test_collectives_on_symmetric_memory_equal_numpy(world_size, count):
    run_ranks(collectives, world_size, count)


def uneven_and_rooted(rank, world_size, scale):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        everyone = range(world_size)
        counts = [(2 * r + 1) % 4 * scale for r in everyone]
        total, begin = sum(counts), sum(counts[:rank])
        offset = 64
        memory = world.alloc(offset + 4 * max(4 * scale * world_size, total))
        symm = group.rendezvous(memory)
        block = np.frombuffer(memory.buffer(), np.int32)[offset // 4 :]

        def of(r, count):
            return np.arange(count, dtype=np.int32) * (r + 1)

        def fill(values):
            symm.barrier()
            block[: len(values)] = values
            symm.barrier()

        fill(of(rank, counts[rank]))
        out = np.empty(total, np.int32)
        symm.all_gather_v(offset, out, counts)
        np.testing.assert_array_equal(out, np.concatenate([of(r, counts[r]) for r in everyone]))

        fill(of(rank, total))
        mine = np.empty(counts[rank], np.int32)
        symm.reduce_scatter_v(offset, mine, counts, op="sum")
        np.testing.assert_array_equal(mine, sum(of(r, total) for r in everyone)[begin : begin + counts[rank]])

        def length(i, j):  # from rank i to rank j
            return (i + 2 * j) % 4 * scale

        fill(np.concatenate([of(10 * rank + j, length(rank, j)) for j in everyone]))
        sent, received = [length(rank, j) for j in everyone], [length(i, rank) for i in everyone]
        out = np.empty(sum(received), np.int32)
        symm.all_to_all_v(offset, sent, out, received)
        np.testing.assert_array_equal(out, np.concatenate([of(10 * i + rank, length(i, rank)) for i in everyone]))

        for root in everyone:
            here = rank == root
            fill(of(rank, scale))
            out = np.full(scale, -1, np.int32)
            symm.reduce(offset, out if here else None, scale, "int32", root_group_rank=root)
            expected = sum(of(r, scale) for r in everyone)
            np.testing.assert_array_equal(out, expected if here else np.full(scale, -1))
            whole = np.empty(scale * world_size, np.int32)
            symm.gather(offset, whole, scale, "int32", root_group_rank=root)
            if here:
                np.testing.assert_array_equal(whole, np.concatenate([of(r, scale) for r in everyone]))
            fill(of(rank, scale * world_size))
            symm.scatter(offset, out, root_group_rank=root)
            np.testing.assert_array_equal(out, of(root, scale * world_size)[rank * scale : (rank + 1) * scale])

        fill(of(rank, scale))
        symm.all_reduce(offset, None, scale, "int32", channel=1)  # in place
        np.testing.assert_array_equal(block[:scale], expected)
        for text, call in (
            ("count is needed", lambda: symm.all_reduce(offset, None, dtype="int32")),
            ("dtype is needed", lambda: symm.all_reduce(offset, None, 1)),
            ("offset", lambda: symm.all_reduce(-4, None, 1, "int32")),
            ("out is missing: this is group rank", lambda: symm.reduce(0, None, 1, "int32", root_group_rank=rank)),
            ("count is needed", lambda: symm.reduce(0, None, dtype="int32", root_group_rank=(rank + 1) % world_size)),
            ("one for each rank", lambda: symm.all_gather_v(0, out, [1])),
            ("out has", lambda: symm.reduce_scatter_v(0, out[:0], [1] * world_size)),
            ("end beyond", lambda: symm.all_gather_v(memory.size, out, [1] + [0] * (world_size - 1))),
        ):
            if world_size > 1:
                with pytest.raises(InvalidArgumentError, match=text):
                    call()
        group.barrier()


@pytest.mark.parametrize(("world_size", "scale"), [(1, 10), (2, 1000), (4, 7)])
def test_uneven_and_rooted_collectives_on_symmetric_memory_equal_numpy(world_size, scale):  # M35
    run_ranks(uneven_and_rooted, world_size, scale)


def refuse_bad_offsets(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        symm = group.rendezvous(world.alloc(64))
        out = np.empty(16, np.float32)
        for call in (
            lambda: symm.all_reduce(4, out),
            lambda: symm.all_reduce(-4, out[:4]),
            lambda: symm.all_reduce(0, out, 17),
            lambda: symm.all_reduce(2**64 - 4, out[:4]),
            lambda: symm.all_reduce(0, out.ctypes.data, 17, "float32"),
            lambda: symm.reduce_scatter(0, out),
            lambda: symm.broadcast(0, 17, "float32"),
            lambda: symm.broadcast(0, 1, "float32", 2),
            lambda: symm.all_reduce(0, out, op="median"),
        ):
            with pytest.raises(InvalidArgumentError):
                call()
        assert group.sequence == 0  # all ranks have refused alike
        symm.all_reduce(0, out)
        assert (out == 0).all()


def test_offsets_and_counts_beyond_the_block_are_refused():
    run_ranks(refuse_bad_offsets, 2)


def reuse_by_alloc_id(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("tp", range(world_size))
        addresses = set()
        for step in range(5):
            memory = world.alloc(400, alloc_id=9, scope="tp")
            addresses.add(memory.address)
            symm = group.rendezvous(memory)
            array = np.frombuffer(memory.buffer(), np.float32)
            array[:] = rank + step
            out = np.empty(100, np.float32)
            symm.all_reduce(0, out)
            assert (out == sum(range(world_size)) + step * world_size).all()
            del memory, array
            gc.collect()
        assert len(addresses) == 1
        group.barrier()


def test_a_persistent_block_meets_its_peers_once_and_keeps_its_address():
    run_ranks(reuse_by_alloc_id, 2)


def free_locally(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        memory = world.alloc(4096)
        memory.buffer()[:] = bytes([rank + 1]) * 4096
        symm = group.rendezvous(memory)
        group.barrier()
        if rank == 0:  # frees alone; the others go on reading its memory
            del memory, symm
            gc.collect()
            (scratch() / "freed").touch()
            group.barrier()
            return
        await_file("freed")
        assert bytes(symm.buffer(0)) == b"\1" * 4096
        group.barrier()


def test_free_is_local_and_peers_keep_what_they_mapped():
    run_ranks(free_locally, 3)


def zero_bytes(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        symm = group.rendezvous(world.alloc(0))
        assert (symm.size, len(symm.buffer(0))) == (0, 0)
        symm.put_signal((rank + 1) % world_size)
        symm.wait_signal((rank - 1) % world_size)
        symm.barrier()
        with pytest.raises(PhalanxError):
            symm.all_reduce(0, np.empty(1, np.float32))
        group.barrier()


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_block_of_no_bytes_can_still_signal(world_size):
    run_ranks(zero_bytes, world_size)


def streams_on_the_host(rank, world_size):
    with join(rank, world_size) as world:
        symm = world.create_group("all", range(world_size)).rendezvous(world.alloc(64))
        calls = [
            lambda: symm.all_reduce(0, None, 4, "float32", stream=8),
            lambda: symm.broadcast(0, 4, "float32", stream=8),
            lambda: symm.all_gather(0, np.zeros(8, np.float32), stream=8),
            lambda: symm.reduce(0, np.zeros(4, np.float32), 4, "float32", stream=8),
            lambda: symm.all_to_all_v(0, [1, 1], np.zeros(2, np.float32), [1, 1], stream=8),
        ]
        for call in calls:
            with pytest.raises(InvalidArgumentError, match="the memory is not on a GPU"):
                call()
        with pytest.raises(InvalidArgumentError, match="stream"):
            symm.all_reduce(0, None, 4, "float32", stream=-1)
        for call in (
            lambda: symm.put_signal(0, stream=0),
            lambda: symm.wait_signal(0, stream=0),
            lambda: symm.barrier(stream=0),
        ):
            with pytest.raises(UnsupportedError, match="memory is not on a GPU"):
                call()
        symm.all_reduce(0, None, 4, "float32")  # nothing was sent


def test_a_stream_is_refused_where_no_gpu_is():
    run_ranks(streams_on_the_host, 2)


def gathered_in_one_range(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("g", range(world_size))
        symm = group.rendezvous(world.alloc(3 * 4096))
        whole = symm.gathered(4096, 8192)
        assert len(whole) == world_size * 8192
        symm.buffer(rank)[4096:] = bytes([rank + 1]) * 8192
        symm.all_gather(4096, whole, 8192, "uint8")  # moves nothing, and all have written
        assert bytes(whole) == b"".join(bytes([each + 1]) * 8192 for each in range(world_size))
        group.barrier()
        with pytest.raises(InvalidArgumentError, match="multiples of the page size"):
            symm.gathered(100, 4096)


def test_parts_of_all_ranks_are_one_range_without_a_copy():
    run_ranks(gathered_in_one_range, 2)
