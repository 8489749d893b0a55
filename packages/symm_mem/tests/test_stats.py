"""What get_mem_stats tells."""

import pickle

import torch

from phalanx import symm_mem
from phalanx.core import FileStore
from ranks import run_ranks, scratch


def kept(alloc_id, size, group_name=None):
    return symm_mem.empty_strided_p2p((size,), (1,), torch.uint8, "cpu", group_name, alloc_id)


def test_persistent_blocks_are_told_with_their_ids():  # M9
    with symm_mem.rank_context():
        assert symm_mem.get_mem_stats() == (0, 0)
        ordinary = symm_mem.empty(5, dtype=torch.uint8)
        second, first = kept(2, 20), kept(1, 10, "tp")
        nothing = kept(3, 0)
        stats = symm_mem.get_mem_stats()
        assert stats == (4, 35)  # as it was before it told more
        assert stats.persistent == (
            symm_mem.PersistentBlock(1, "tp", ("cpu", 0), 10, live=True, handles=0),
            symm_mem.PersistentBlock(2, None, ("cpu", 0), 20, live=True, handles=0),
            symm_mem.PersistentBlock(3, None, ("cpu", 0), 0, live=True, handles=0),
        )
        del first, ordinary
        stats = symm_mem.get_mem_stats()
        assert (stats.blocks, stats.size_bytes) == (3, 30)
        assert [each.live for each in stats.persistent] == [False, True, True]
        assert (stats.live_persistent_blocks, stats.idle_persistent_blocks) == (2, 1)
        assert (stats.handles, stats.peer_size_bytes) == (0, 0)
        symm_mem.drop(1, "tp")
        del second, nothing
        stats = symm_mem.get_mem_stats()
        assert [each.alloc_id for each in stats.persistent] == [2, 3]
        assert pickle.loads(pickle.dumps(stats)).persistent == stats.persistent
        assert "MemStats(blocks=2, size_bytes=20, persistent=(PersistentBlock(alloc_id=2" in repr(stats)


def maps(rank, world_size):
    for name in ("tp", "dp"):
        symm_mem.set_group_info(name, rank, world_size, FileStore(scratch() / name))

    def told():
        stats = symm_mem.get_mem_stats()
        return stats.handles, stats.peer_size_bytes

    peers = world_size - 1
    tensor, persistent = symm_mem.empty(100, dtype=torch.uint8), kept(1, 30)
    whole = symm_mem.rendezvous(tensor, "tp")
    assert told() == (1, 100 * peers)
    assert symm_mem.rendezvous(tensor[:50], "tp") is whole
    symm_mem.rendezvous(tensor[50:], "tp")  # another handle, the same mapping
    assert told() == (2, 100 * peers)
    symm_mem.rendezvous(tensor, "dp")
    symm_mem.rendezvous(persistent, "dp")
    assert told() == (4, (100 + 100 + 30) * peers)
    assert [each.handles for each in symm_mem.get_mem_stats().persistent] == [1]
    del tensor, persistent
    assert symm_mem.get_mem_stats() == (1, 30)
    assert told() == (2, (100 + 30) * peers)  # that of the idle block, and the one that is held here
    whole.barrier()
    del whole
    symm_mem.drop(1)
    assert symm_mem.get_mem_stats() == (0, 0)
    assert told() == (0, 0)


def test_handles_and_what_they_have_mapped_are_counted():  # M37
    run_ranks(maps, 2)
