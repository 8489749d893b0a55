"""Threads of one rank, and ranks that are threads of one process."""

import gc
import threading

import pytest
import torch
import torch.distributed as dist

from phalanx import symm_mem
from phalanx.core import MemoryStore, NotFoundError


def in_threads(count, function):
    """Call function(i) in `count` threads; raise what the first that failed raised."""
    results, failures = [None] * count, []

    def run(i):
        try:
            results[i] = function(i)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


@pytest.mark.parametrize("make_store", [MemoryStore, dist.HashStore])
def test_ranks_can_be_threads(make_store):  # M15
    store, world_size = make_store(), 3

    def rank_of(rank):
        with symm_mem.rank_context(timeout_ms=30_000):
            symm_mem.set_group_info("tp", rank, world_size, store)
            tensor = symm_mem.empty(8, dtype=torch.int32)
            handle = symm_mem.rendezvous(tensor, "tp")
            for turn in range(20):
                handle.get_buffer((rank + 1) % world_size, (8,), torch.int32).fill_(10 * turn + rank)
                handle.barrier()
                assert tensor.unique().tolist() == [10 * turn + (rank - 1) % world_size]
                handle.barrier()
            return tensor[0].item()

    assert in_threads(world_size, rank_of) == [192, 190, 191]


def test_what_belongs_to_a_rank_is_not_seen_by_another():
    with symm_mem.rank_context():
        symm_mem.set_group_info("tp", 0, 1, MemoryStore())
        outer = symm_mem.empty_strided_p2p((4,), (1,), torch.int8, "cpu", None, 1)
        with symm_mem.rank_context():
            assert not symm_mem.is_symm_mem_tensor(outer)
            with pytest.raises(NotFoundError):
                symm_mem.get_group_info("tp")
            inner = symm_mem.empty_strided_p2p((4,), (1,), torch.int8, "cpu", None, 1)
            assert inner.data_ptr() != outer.data_ptr()
        assert symm_mem.is_symm_mem_tensor(outer)
        assert symm_mem.get_group_info("tp").world_size == 1


def test_threads_of_a_rank_share_it_when_they_enter_it():
    with symm_mem.rank_context() as context:
        symm_mem.set_group_info("tp", 0, 1, MemoryStore())
        tensor = symm_mem.empty(4)

        def enters(_):
            outside = symm_mem.is_symm_mem_tensor(tensor)
            with context.active():
                return outside, symm_mem.rendezvous(tensor, "tp")

        (outside, first), (_, second) = in_threads(2, enters)
        assert not outside
        assert first is second
        assert symm_mem.get_symmetric_memory(tensor, "tp") is first


def test_threads_may_allocate_meet_and_free_at_the_same_time():  # M15
    with symm_mem.rank_context() as context:
        symm_mem.set_group_info("tp", 0, 1, MemoryStore())

        def works(i):
            with context.active():
                for turn in range(100):
                    tensor = symm_mem.empty(16 + turn % 5, dtype=torch.int32).fill_(i)
                    handle = symm_mem.rendezvous(tensor, "tp")
                    assert handle.get_buffer(0, (16,), torch.int32).eq(i).all()
                    assert symm_mem.get_symmetric_memory(tensor, "tp") is handle
                    assert handle.buffer_ptrs == [tensor.data_ptr()]
                    persistent = symm_mem.empty_strided_p2p((4,), (1,), torch.int8, "cpu", f"scope {i}", turn)
                    del persistent, tensor, handle
                    symm_mem.drop(turn, f"scope {i}")

        in_threads(8, works)
        gc.collect()
        assert symm_mem.get_mem_stats() == (0, 0)


def test_one_name_is_given_once_whichever_thread_is_first():  # M2 M15
    with symm_mem.rank_context() as context:

        def defines(i):
            with context.active():
                try:
                    symm_mem.set_group_info("tp", i, 8, MemoryStore())
                    return i
                except RuntimeError:
                    return None

        winners = [i for i in in_threads(8, defines) if i is not None]
        assert winners == [symm_mem.get_group_info("tp").rank]
