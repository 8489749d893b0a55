"""Rendezvous: caching, views, disagreement between ranks, several groups."""

import gc

import pytest
import torch
import torch.distributed as dist

from phalanx import symm_mem
from phalanx.core import (
    FileStore,
    InvalidArgumentError,
    MemoryStore,
    MismatchError,
    NotFoundError,
    WaitTimeoutError,
)
from ranks import run_ranks, scratch


def join(rank, world_size, name="tp"):
    symm_mem.set_group_info(name, rank, world_size, FileStore(scratch() / f"store-{name}"))


def cached(rank, world_size):
    join(rank, world_size)
    tensor, other = symm_mem.empty(100), symm_mem.empty(100)
    with pytest.raises(NotFoundError) as caught:
        symm_mem.get_symmetric_memory(tensor, "tp")
    assert "get_symmetric_memory: this tensor had no rendezvous with group" in str(caught.value)  # M17
    handle = symm_mem.rendezvous(tensor, "tp")
    if rank == 0:  # no communication: the other does not call
        assert symm_mem.rendezvous(tensor, "tp") is handle
        assert symm_mem.rendezvous(tensor.view(10, 10), "tp") is handle
        assert symm_mem.rendezvous(tensor[:7].detach(), "tp") is handle
        assert symm_mem.get_symmetric_memory(tensor, "tp") is handle
    with pytest.raises(NotFoundError, match="had no rendezvous with group"):
        symm_mem.get_symmetric_memory(other, "tp")
    assert symm_mem.rendezvous(other, "tp") is not handle
    handle.barrier()


def test_a_rendezvous_happens_once_and_then_gives_the_same_handle():  # M16 M17
    run_ranks(cached, 2)


def view_with_offset(rank, world_size):
    join(rank, world_size)
    tensor = symm_mem.empty(10, dtype=torch.int32).fill_(rank)
    view = tensor[4:7]
    handle = symm_mem.rendezvous(view, "tp")  # the first rendezvous of the block
    assert handle.offset == 16
    assert handle.buffer_size == 40
    peer = 1 - rank
    assert handle.get_remote_tensor(peer, view.shape, view.dtype).tolist() == [peer] * 3
    handle.barrier()
    handle.get_remote_tensor(peer, view.shape, view.dtype).fill_(10 + rank)
    handle.get_buffer(peer, (1,), torch.int32, storage_offset=tensor[9:].storage_offset()).fill_(20 + rank)
    handle.barrier()
    assert tensor.tolist() == [rank] * 4 + [10 + peer] * 3 + [rank] * 2 + [20 + peer]
    # The whole tensor is the same block: another handle for its offset, the same mapping and signals.
    whole = symm_mem.rendezvous(tensor, "tp") if rank == 0 else symm_mem.get_symmetric_memory(tensor, "tp")
    assert whole.offset == 0
    assert whole.buffer_ptrs == handle.buffer_ptrs
    (whole if rank == 0 else handle).put_signal(peer, 1)
    (handle if rank == 0 else whole).wait_signal(peer, 1)
    assert symm_mem.rendezvous(view, "tp") is handle
    with pytest.raises(InvalidArgumentError, match="not a multiple"):
        symm_mem.rendezvous(tensor[1:], "tp").get_remote_tensor(0, (1,), torch.int64)
    from_numpy = torch.from_numpy(tensor.numpy()[4:])
    assert symm_mem.rendezvous(from_numpy, "tp") is handle
    handle.barrier()


def test_a_view_meets_with_its_offset():  # M18
    run_ranks(view_with_offset, 2)


def test_ordinary_memory_is_refused():  # M18
    with symm_mem.rank_context():
        symm_mem.set_group_info("tp", 0, 1, MemoryStore())
        tensor = symm_mem.empty(4)
        handle = symm_mem.rendezvous(tensor, "tp")
        for call in (symm_mem.rendezvous, symm_mem.get_symmetric_memory):
            for ordinary in (torch.empty(4), tensor.clone(), torch.empty(4, device="meta")):
                with pytest.raises(InvalidArgumentError, match="ordinary memory.*phalanx.symm_mem.empty"):
                    call(ordinary, "tp")
            with pytest.raises(InvalidArgumentError, match="give a torch.Tensor"):
                call(None, "tp")
        assert symm_mem.rendezvous(tensor, "tp") is handle


def odd_one(rank, world_size, kind):
    join(rank, world_size)
    odd = rank == 1
    tensor = {
        "sizes": lambda: symm_mem.empty(8 if odd else 4),
        "dtypes": lambda: symm_mem.empty(4, dtype=torch.float64 if odd else torch.float32),
        "alloc ids": lambda: symm_mem.empty_strided_p2p((4,), (1,), torch.int8, "cpu", "tp", 5 if odd else 6),
        "persistence": lambda: symm_mem.empty_strided_p2p((4,), (1,), torch.int8, "cpu", "tp", 5 if odd else None),
    }[kind]()
    with pytest.raises(MismatchError) as caught:
        symm_mem.rendezvous(tensor, "tp")
    # It left nothing behind that would stop the group.
    handle = symm_mem.rendezvous(symm_mem.empty(2), "tp")
    handle.barrier()
    return str(caught.value), caught.value.peer, caught.value.group


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("sizes", ["16 bytes on ranks 0, 2", "32 bytes on rank 1"]),
        ("dtypes", ["16 bytes on ranks 0, 2", "32 bytes on rank 1"]),
        ("alloc ids", ["alloc_id 6 on ranks 0, 2", "alloc_id 5 on rank 1"]),
        ("persistence", ["no alloc_id on ranks 0, 2", "alloc_id 5 on rank 1"]),
    ],
)
def test_ranks_that_disagree_all_learn_who_is_odd(kind, texts):  # M19
    for error, peer, group in run_ranks(odd_one, 3, kind):
        for text in texts:
            assert text in error
        assert (peer, group) == (1, "tp")


def sub_then_all(rank, world_size):
    join(rank, world_size, "all")
    if rank < 2:
        join(rank, 2, "sub")
        for _ in range(3):  # counts that the others do not have
            symm_mem.rendezvous(symm_mem.empty(4), "sub").barrier()
    tensor = symm_mem.empty(1, dtype=torch.int64)
    handle = symm_mem.rendezvous(tensor, "all")
    handle.get_buffer((rank + 1) % world_size, (1,), torch.int64).fill_(rank + 1)
    handle.barrier()
    if rank < 2:
        symm_mem.rendezvous(symm_mem.empty(4), "sub").barrier()
    symm_mem.rendezvous(symm_mem.empty(4), "all").barrier()
    return tensor.item()


def test_a_subgroup_does_not_disturb_a_larger_group():  # M20
    assert run_ranks(sub_then_all, 4) == [4, 1, 2, 3]


def two_groups(rank, world_size):
    join(rank, world_size, "a")
    join(rank, world_size, "b")
    tensor = symm_mem.empty(4, dtype=torch.int32)
    a, b = symm_mem.rendezvous(tensor, "a"), symm_mem.rendezvous(tensor, "b")
    assert a is not b
    assert a.buffer_ptrs[rank] == b.buffer_ptrs[rank]
    assert not set(a.signal_pad_ptrs) & set(b.signal_pad_ptrs)
    peer = 1 - rank
    a.put_signal(peer)
    a.barrier()  # by now the signal has arrived, on a
    with pytest.raises(WaitTimeoutError):
        b.wait_signal(peer, timeout_ms=20)
    a.wait_signal(peer)
    b.barrier()
    assert not b.get_signal_pad(rank).to(torch.int64).any()


def test_two_groups_on_one_allocation_have_signals_of_their_own():  # M29
    run_ranks(two_groups, 2)


class WatchedStore:
    """torch's store, counting what is asked of it."""

    def __init__(self, target):
        self.target, self.calls = target, 0

    def __getattr__(self, name):
        self.calls += 1
        return getattr(self.target, name)


def store_is_for_bootstrap(rank, world_size):
    store = WatchedStore(dist.FileStore(str(scratch() / "store"), world_size))
    symm_mem.set_group_info("tp", rank, world_size, store)
    symm_mem.rendezvous(symm_mem.empty(4), "tp").barrier()
    calls = store.calls
    assert calls > 0
    for _ in range(5):
        symm_mem.rendezvous(symm_mem.empty(4), "tp").barrier()
    assert store.calls == calls


def test_the_store_is_used_to_meet_and_not_after_that():  # M21
    run_ranks(store_is_for_bootstrap, 2)


def zero_sizes(rank, world_size):
    join(rank, world_size)
    tensor = symm_mem.empty(0, 3)
    handle = symm_mem.rendezvous(tensor, "tp")
    assert handle.buffer_size == 0
    for peer in range(world_size):
        assert handle.get_buffer(peer, (0, 3), torch.float32).shape == (0, 3)
        with pytest.raises(InvalidArgumentError, match="has 0"):
            handle.get_buffer(peer, (1,), torch.int8)
    handle.barrier()
    handle.put_signal((rank + 1) % world_size)
    handle.wait_signal((rank - 1) % world_size)
    assert symm_mem.rendezvous(tensor, "tp") is handle
    another = symm_mem.rendezvous(symm_mem.empty(0), "tp")
    assert another is not handle
    another.barrier()


@pytest.mark.parametrize("world_size", [1, 2])
def test_blocks_without_bytes_meet_and_signal(world_size):  # M12
    run_ranks(zero_sizes, world_size)


def alone(rank, world_size):
    join(rank, world_size)
    tensor = symm_mem.empty(4, dtype=torch.int32).fill_(8)
    handle = symm_mem.rendezvous(tensor, "tp")
    assert handle.get_buffer(0, (4,), torch.int32).tolist() == [8] * 4
    handle.barrier()
    handle.put_signal(0)
    handle.wait_signal(0)
    del tensor, handle
    gc.collect()
    assert symm_mem.get_mem_stats() == (0, 0)
    symm_mem.finalize()


def test_a_group_of_one_rank_works_like_any_other():  # M12
    run_ranks(alone, 1, check_leaks=True)


def misses_second(rank, world_size):
    join(rank, world_size)
    first = symm_mem.rendezvous(symm_mem.empty(4), "tp")
    if rank == 0:
        with pytest.raises(WaitTimeoutError) as caught:
            symm_mem.rendezvous(symm_mem.empty(8), "tp", timeout_ms=200)
        (scratch() / "done").touch()
        return str(caught.value)
    while not (scratch() / "done").exists():
        pass
    del first
    return None


def test_a_rank_that_misses_a_rendezvous_is_named():  # M30
    text = run_ranks(misses_second, 2)[0]
    assert "rank 1" in text or "rank(s) 1" in text
    assert "'tp'" in text
