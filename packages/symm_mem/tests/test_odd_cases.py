"""What is rare, between ranks: odd strides, huge and empty blocks, overlapping groups, forks, collected objects, many
allocations."""

import gc
import os
import sys
import threading
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx import symm_mem
from phalanx.core import FileStore, InvalidArgumentError, MemoryStore, UnsupportedError, WaitTimeoutError
from ranks import run_ranks, scratch

CYCLES = 100_000 if os.environ.get("PHALANX_TEST_HUGE") == "1" else 300


def join(rank, world_size, name="tp"):
    symm_mem.set_group_info(name, rank, world_size, FileStore(scratch() / f"store-{name}"))


# ---- shapes --------------------------------------------------------------------------------------


def odd_shapes(rank, world_size):
    join(rank, world_size)
    peer, before = (rank + 1) % world_size, (rank - 1) % world_size
    # M11: the elements lie far apart, and a peer reaches the last one.
    size, stride = (3, 2), (50_000, 3)
    spread = symm_mem.empty_strided_p2p(size, stride, torch.float64, "cpu")
    handle = symm_mem.rendezvous(spread, "tp")
    span = 2 * 50_000 + 3 + 1
    assert handle.buffer_size == span * 8
    theirs = handle.get_buffer(peer, (span,), torch.float64)
    theirs.as_strided(size, stride).copy_(torch.arange(6.0).view(3, 2) + 10 * rank)
    handle.barrier()
    assert spread.tolist() == [[10 * before + i, 10 * before + i + 1] for i in (0, 2, 4)]
    assert spread.untyped_storage().nbytes() == span * 8
    whole = handle.get_buffer(rank, (span,), torch.float64)
    assert whole.count_nonzero() == spread.count_nonzero()  # and nothing else was written
    # Elements that overlap, as of an expanded tensor, are one: the block is no larger than that.
    expanded = symm_mem.empty_strided_p2p((1000, 2), (0, 1), torch.int32, "cpu")
    narrow = symm_mem.rendezvous(expanded, "tp")
    assert narrow.buffer_size == 8
    narrow.get_buffer(peer, (2,), torch.int32).copy_(torch.tensor([rank, 7]))
    narrow.barrier()
    assert expanded[999].tolist() == [before, 7] and expanded.sum() == 1000 * (before + 7)
    # M18: views that are transposed, that skip, and that have no elements, of one block.
    matrix = symm_mem.empty(4, 6, dtype=torch.int32)
    handles = [symm_mem.rendezvous(view, "tp") for view in (matrix, matrix.t(), matrix[1:, ::2], matrix[2:2])]
    assert [each.offset for each in handles] == [0, 0, 24, 48]
    assert handles[0] is handles[1] and len({tuple(each.buffer_ptrs) for each in handles}) == 1
    handles[0].get_buffer(peer, (6, 4), torch.int32).copy_(torch.arange(24).view(6, 4) + 100 * rank)
    handles[3].barrier()
    assert matrix.t()[:, 0].tolist() == [100 * before + i for i in range(6)]
    assert handles[2].get_remote_tensor(rank, (3,), torch.int32).tolist() == matrix[1, :3].tolist()
    with pytest.raises(InvalidArgumentError, match="need 100 bytes"):
        handles[2].get_remote_tensor(peer, (19,), torch.int32)
    # M12: no elements, whatever the strides and the other dims say.
    for shape, steps in (((0,), (1,)), ((3, 0, 2**40), (0, 2**50, 1)), ((0, 5), (5, 1))):
        empty = symm_mem.empty_strided_p2p(shape, steps, torch.float32, "cpu")
        nothing = symm_mem.rendezvous(empty, "tp")
        assert nothing.buffer_size == 0 and nothing.get_buffer(peer, shape, torch.float32).shape == shape
        nothing.put_signal(peer)
        nothing.wait_signal(before)
        nothing.barrier()
    handle.barrier()


@pytest.mark.parametrize("world_size", [1, 3])
def test_odd_strides_views_and_empty_blocks_reach_peers(world_size):  # M10 M11 M12 M18 M22
    run_ranks(odd_shapes, world_size)


def copies(rank, world_size):
    join(rank, world_size)
    numel = 1 << 16
    tensor = symm_mem.empty(numel)
    handle = symm_mem.rendezvous(tensor, "tp")
    theirs = handle.get_buffer(1 - rank, (numel,), torch.float32)
    source, out = torch.arange(numel) + 0.5 + rank, torch.empty(numel)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        theirs.copy_(source)
        handle.barrier()
        out.copy_(theirs)
    used = [(event.name, event.cpu_memory_usage) for event in profile.events() if event.name != "[memory]"]
    assert used == [("aten::copy_", 0)] * 2
    assert torch.equal(out, source) and torch.equal(tensor, source + 1 - 2 * rank)
    handle.barrier()


def test_a_contiguous_copy_to_or_from_a_peer_is_one_copy():  # M23
    run_ranks(copies, 2)


def available_bytes():
    text = Path("/proc/meminfo").read_text()
    return 1024 * next(int(line.split()[1]) for line in text.splitlines() if line.startswith("MemAvailable"))


def huge(rank, world_size):
    join(rank, world_size)
    numel = 2**31 + 2**20 + 5  # bytes
    tensor = symm_mem.empty(numel, dtype=torch.uint8)
    handle = symm_mem.rendezvous(tensor, "tp")
    assert handle.buffer_size == numel
    peer = 1 - rank
    last = handle.get_buffer(peer, (5,), torch.uint8, numel - 5)
    last.copy_(torch.arange(5) + 10 * rank + 1)
    words = handle.get_buffer(peer, (3,), torch.int64, 2**28)  # from byte 2^31 on
    words.fill_(2**40 + rank)
    handle.barrier()
    assert tensor[-5:].tolist() == [10 * peer + i for i in range(1, 6)]
    assert tensor[2**31 : 2**31 + 24].view(torch.int64).tolist() == [2**40 + peer] * 3
    assert not tensor[:24].any() and not tensor[2**31 - 24 : 2**31].any()  # no offset was cut to 32 bits
    assert last.tolist() == [10 * rank + i for i in range(1, 6)]
    with pytest.raises(InvalidArgumentError, match=f"need {numel + 1} bytes"):
        handle.get_buffer(peer, (6,), torch.uint8, numel - 5)
    view = symm_mem.rendezvous(tensor[2**31 :], "tp")
    assert view.offset == 2**31
    assert view.get_remote_tensor(peer, (3,), torch.int64).tolist() == [2**40 + rank] * 3
    view.barrier()


@pytest.mark.slow
@pytest.mark.skipif(available_bytes() < 6 << 30, reason="needs 6 GiB of free memory")
def test_blocks_of_more_than_two_gib_are_reached_to_their_last_byte():  # M10
    run_ranks(huge, 2, timeout=120)


# ---- groups --------------------------------------------------------------------------------------


def overlapping_groups(rank, world_size):
    """M20: every order of small and large groups, on allocations of their own and on one that they share."""
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    mine = [pair for pair in pairs if rank in dist.get_process_group_ranks(pair)]
    shared = symm_mem.empty(world_size, dtype=torch.int64)
    seen = []
    for group in (*mine, dist.group.WORLD, *mine[::-1], dist.group.WORLD):
        for tensor in (shared, symm_mem.empty(world_size, dtype=torch.int64)):
            handle = symm_mem.rendezvous(tensor, group)
            handle.barrier()
            tensor.zero_()
            handle.barrier()
            for peer in range(handle.world_size):
                handle.get_buffer(peer, (world_size,), torch.int64)[handle.rank] = 1 + rank
            handle.barrier()
            ranks = dist.get_process_group_ranks(group)
            assert tensor.tolist() == [1 + each for each in ranks] + [0] * (world_size - len(ranks))
            handle.barrier()
        seen.append(handle.world_size)
    # M29: groups on one allocation share its memory, and neither signals nor barriers.
    handles = [symm_mem.get_symmetric_memory(shared, group) for group in (*mine, dist.group.WORLD)]
    assert len({each.buffer_ptrs[each.rank] for each in handles}) == 1
    assert len({pointer for each in handles for pointer in each.signal_pad_ptrs}) == sum(
        each.world_size for each in handles
    )
    world, pair = handles[-1], handles[0]
    world.put_signal((rank + 1) % world_size, channel=1)
    world.barrier()
    for peer in range(pair.world_size):
        with pytest.raises(WaitTimeoutError):
            pair.wait_signal(peer, channel=1, timeout_ms=5)
    assert not pair.get_signal_pad(pair.rank).to(torch.int64).any()
    world.wait_signal((rank - 1) % world_size, channel=1)
    world.barrier()
    return seen


def test_groups_that_overlap_use_one_allocation_and_do_not_disturb_each_other():  # M20 M29
    assert run_ranks(overlapping_groups, 3, start_torch=True) == [[2, 3, 2, 3], [2, 2, 3, 2, 2, 3], [2, 3, 2, 3]]


# ---- ends ----------------------------------------------------------------------------------------


def collected_elsewhere(rank, world_size):
    """M37: cycles with tensors, handles and buffers, collected on threads that know nothing of them."""
    join(rank, world_size)
    peer = 1 - rank
    last = symm_mem.rendezvous(symm_mem.empty(1), "tp")
    used = []
    gc.disable()
    for turn in range(20):
        tensor = symm_mem.empty(1000, dtype=torch.int32).fill_(turn)
        handle = symm_mem.rendezvous(tensor, "tp")
        used.append(handle.get_buffer(peer, (1000,), torch.int32))  # outlives both, here and over there
        cycle = {"tensor": tensor, "handle": handle, "buffer": handle.get_buffer(peer, (10,), torch.int32)}
        cycle["self"] = cycle
        del tensor, handle, cycle
    assert symm_mem.get_mem_stats().blocks == 20  # `last` has lost its tensor
    last.barrier()
    collectors = [threading.Thread(target=gc.collect) for _ in range(1 + rank)]
    if rank == 0:  # one rank collects while the other one writes into what is collected
        for thread in collectors:
            thread.start()
    for turn, buffer in enumerate(used):
        assert buffer.eq(turn).all()
        buffer.fill_(100 + turn)
    if rank == 1:
        for thread in collectors:
            thread.start()
    for thread in collectors:
        thread.join()
    gc.enable()
    assert symm_mem.get_mem_stats().blocks == 0
    last.barrier()
    assert [buffer.unique().tolist() for buffer in used] == [[100 + turn] for turn in range(20)]
    last.barrier()
    del used, buffer, last
    symm_mem.finalize()


def test_a_collection_on_any_thread_frees_while_peers_still_use_the_memory():  # M37
    run_ranks(collected_elsewhere, 2, check_leaks=True)


def in_child(function):
    """Call it in a fork of this process; its answer as an exit status, which is 99 if it raised."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            status = function()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def forks(rank, world_size):
    join(rank, world_size)
    tensor = symm_mem.empty(8).fill_(rank)
    persistent = symm_mem.empty_strided_p2p((4,), (1,), torch.float32, "cpu", "tp", 3).fill_(5)
    handle = symm_mem.rendezvous(tensor, "tp")
    theirs = handle.get_buffer(1 - rank, (8,), torch.float32)
    handle.barrier()

    def child():
        nonlocal persistent
        # It is a fresh rank: no groups, no allocations, and the alloc id means other memory.
        assert symm_mem.get_mem_stats().blocks == 0
        assert not symm_mem.is_symm_mem_tensor(tensor)
        symm_mem.set_group_info("tp", 0, 1, MemoryStore())
        own = symm_mem.empty_strided_p2p((4,), (1,), torch.float32, "cpu", "tp", 3)
        assert own.tolist() == [0] * 4 and own.data_ptr() != persistent.data_ptr()
        alone = symm_mem.rendezvous(own, "tp")
        alone.put_signal(0)
        alone.wait_signal(0)
        alone.barrier()
        own.fill_(99)
        # The parent's tensors are the parent's memory: what either writes, both see. They cannot meet here.
        assert tensor.tolist() == [rank] * 8
        assert theirs[1:].tolist() == [1 - rank] * 7  # the other one's child may have written the first already
        tensor[0] = 50 + rank
        for call in (handle.barrier, lambda: handle.put_signal(1 - rank), lambda: handle.wait_signal(1 - rank)):
            with pytest.raises(UnsupportedError, match="is a fork of it"):
                call()
        with pytest.raises(InvalidArgumentError, match="ordinary memory"):
            symm_mem.rendezvous(tensor, "tp")
        del persistent  # frees nothing of the parent's
        gc.collect()
        symm_mem.finalize()
        return 7

    assert in_child(child) == 7
    assert symm_mem.get_mem_stats().blocks == 2
    assert tensor.tolist() == [50 + rank] + [rank] * 7 and persistent.tolist() == [5] * 4
    handle.barrier()
    assert theirs[0].item() == 51 - rank
    handle.put_signal(1 - rank)  # the group has not noticed the child: no signal came or went
    handle.wait_signal(1 - rank)
    with pytest.raises(WaitTimeoutError):
        handle.wait_signal(1 - rank, timeout_ms=5)
    handle.barrier()
    assert symm_mem.rendezvous(symm_mem.empty(3), "tp").world_size == world_size
    with symm_mem.rank_context():  # a context that was entered is the parent's in the child, and says so
        symm_mem.empty(1)
        assert in_child(refuses) == 8
    handle.barrier()


def refuses():
    with pytest.raises(UnsupportedError, match="is a fork of it"):
        symm_mem.empty(1)
    with symm_mem.rank_context():
        assert symm_mem.empty(2).fill_(4).sum() == 8
    return 8


def test_a_forked_child_is_a_fresh_rank_and_leaves_its_parent_alone():  # M37
    run_ranks(forks, 2)


# ---- many ----------------------------------------------------------------------------------------


def held():
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("/memfd:"), resident


def cycles(rank, world_size, count):
    join(rank, world_size)
    last = symm_mem.rendezvous(symm_mem.empty(1), "tp")
    steady = None
    for turn in range(count + 200):
        if turn == 200:
            last.barrier()  # or what a peer has sent for the next rendezvous may have arrived
            steady = held()
            last.barrier()
        tensor = symm_mem.empty(1024 + turn % 7)
        handle = symm_mem.rendezvous(tensor, "tp")
        if turn % 50 == 0:
            handle.get_buffer(1 - rank, (8,), torch.float32).fill_(turn)
            handle.barrier()
            assert tensor[:8].eq(turn).all()
        del tensor, handle
    last.barrier()
    now = held()
    assert now[:2] == steady[:2]
    assert now[2] - steady[2] < 8 << 20
    assert symm_mem.get_mem_stats().blocks == 0
    last.barrier()
    return steady, now


def test_descriptors_mappings_and_memory_stay_flat_over_many_allocations():  # M34 M38
    for rank, (steady, now) in enumerate(run_ranks(cycles, 2, CYCLES, timeout=60 + CYCLES / 100)):
        print(f"rank {rank}: fds, mappings, resident bytes: {steady}, and {now} after {CYCLES} cycles")
