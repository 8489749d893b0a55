"""Groups: by name and store, and torch's own in every form."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from phalanx import symm_mem
from phalanx.core import (
    AlreadyExistsError,
    FileStore,
    InvalidArgumentError,
    MemoryStore,
    NotFoundError,
    RevokedError,
    UnsupportedError,
    WaitTimeoutError,
)
from ranks import run_ranks, scratch


def exchange(handle, world_size):
    """Every rank writes its number into its neighbour; returns what arrived."""
    own = handle.get_buffer(handle.rank, (1,), torch.int64)
    own.fill_(-1)
    handle.barrier()
    handle.get_buffer((handle.rank + 1) % world_size, (1,), torch.int64).fill_(handle.rank)
    handle.barrier()
    return own.item()


def without_process_group(rank, world_size):
    assert not dist.is_initialized()
    store = dist.FileStore(str(scratch() / "store"), world_size)
    symm_mem.set_group_info("tp", rank, world_size, store)
    info = symm_mem.get_group_info("tp")
    assert (info.rank, info.world_size, info.store) == (rank, world_size, store)
    handle = symm_mem.rendezvous(symm_mem.empty(4, dtype=torch.int64), "tp")
    assert (handle.rank, handle.world_size, handle.group_name) == (rank, world_size, "tp")
    assert handle.device == torch.device("cpu")
    return exchange(handle, world_size)


def test_a_group_of_a_name_and_a_store_needs_no_process_group():  # M1
    assert run_ranks(without_process_group, 3) == [2, 0, 1]


def test_a_name_is_taken_once():  # M2
    with symm_mem.rank_context():
        symm_mem.set_group_info("tp", 0, 1, MemoryStore())
        with pytest.raises(AlreadyExistsError, match="a group named 'tp' exists already"):
            symm_mem.set_group_info("tp", 0, 1, MemoryStore())
    with symm_mem.rank_context():  # names belong to a rank
        symm_mem.set_group_info("tp", 0, 1, MemoryStore())


def test_an_unknown_group_is_named():  # M3
    with symm_mem.rank_context():
        tensor = symm_mem.empty(1)
        for call in (
            lambda: symm_mem.get_group_info("no such"),
            lambda: symm_mem.enable_symm_mem_for_group("no such"),
            lambda: symm_mem.rendezvous(tensor, "no such"),
            lambda: symm_mem.get_symmetric_memory(tensor, "no such"),
        ):
            with pytest.raises(NotFoundError) as caught:
                call()
            assert ": there is no group named 'no such'" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("", 0, 1), "group_name"),
        ((None, 0, 1), "group_name"),
        (("tp", 0, 0), "world_size is 0"),
        (("tp", 2, 2), "rank is 2"),
        (("tp", -1, 2), "rank is -1"),
        (("tp", "0", 2), "rank is '0'"),
    ],
)
def test_wrong_group_infos_are_refused(arguments, text):
    with symm_mem.rank_context():
        with pytest.raises(InvalidArgumentError, match=text):
            symm_mem.set_group_info(*arguments, MemoryStore())
        with pytest.raises(InvalidArgumentError, match="a store needs the methods"):
            symm_mem.set_group_info("tp", 0, 1, object())
        symm_mem.set_group_info("tp", 0, 1, MemoryStore())  # nothing was kept


@pytest.mark.parametrize(
    ("group", "text"),
    [
        (3, "int is not a valid type for a group"),
        (("tp", 0), "rendezvous: a tuple as group must be"),
        ([0, 1], "there are no process groups"),
        (dist.GroupMember.NON_GROUP_MEMBER, "this rank is not in the group"),
    ],
)
def test_what_is_no_group_is_refused(group, text):
    with symm_mem.rank_context():
        with pytest.raises(InvalidArgumentError, match=text):
            symm_mem.rendezvous(symm_mem.empty(1), group)


def test_a_group_must_come_from_the_allocation_or_the_call():  # M4
    with symm_mem.rank_context():
        symm_mem.set_group_info("tp", 0, 1, MemoryStore())
        symm_mem.set_group_info("other", 0, 1, MemoryStore())
        tensor = symm_mem.empty(1)
        for call in (symm_mem.rendezvous, symm_mem.get_symmetric_memory):
            with pytest.raises(InvalidArgumentError, match="without a group_name"):
                call(tensor)
        tensor = symm_mem.empty_strided_p2p((1,), (1,), torch.int8, "cpu", "tp")
        assert symm_mem.rendezvous(tensor).group_name == "tp"
        assert symm_mem.rendezvous(tensor, "other").group_name == "other"


# ---- torch's groups -----------------------------------------------------------------------------


def every_form(rank, world_size):
    seen = []
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    for group in (dist.group.WORLD, dist.group.WORLD.group_name, mesh, (mesh, 0), (mesh, "tp")):
        handle = symm_mem.rendezvous(symm_mem.empty(4, dtype=torch.int64), group)
        seen.append(exchange(handle, world_size))
    symm_mem.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    assert symm_mem.get_group_info(dist.group.WORLD.group_name).world_size == world_size
    tensor = symm_mem.empty(1)
    handle = symm_mem.rendezvous(tensor, dist.group.WORLD)
    assert symm_mem.get_symmetric_memory(tensor, dist.group.WORLD.group_name) is handle
    with pytest.raises(AlreadyExistsError, match="set_group_info"):
        symm_mem.set_group_info(dist.group.WORLD.group_name, rank, world_size, MemoryStore())
    return seen


def test_a_process_group_a_name_and_a_mesh_all_work():  # M1
    assert run_ranks(every_form, 2, start_torch=True) == [[1] * 5, [0] * 5]


def two_dims(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(InvalidArgumentError, match="rendezvous: the group is a DeviceMesh of 2 dims"):
        symm_mem.rendezvous(symm_mem.empty(1), mesh)
    seen = {}
    for dim in ("dp", "tp"):
        handle = symm_mem.rendezvous(symm_mem.empty(1, dtype=torch.int64), (mesh, dim))
        assert handle.world_size == 2
        handle.get_buffer(1 - handle.rank, (1,), torch.int64).fill_(rank)
        handle.barrier()
        seen[dim] = handle.get_buffer(handle.rank, (1,), torch.int64).item()
    return seen


def test_each_dim_of_a_mesh_is_a_group_of_its_own():
    assert run_ranks(two_dims, 4, start_torch=True) == [
        {"dp": 2, "tp": 1},
        {"dp": 3, "tp": 0},
        {"dp": 0, "tp": 3},
        {"dp": 1, "tp": 2},
    ]


def global_ranks_in_errors(rank, world_size):
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    handle = symm_mem.rendezvous(symm_mem.empty(4), group)
    assert handle.rank == rank - 1
    error = None
    if rank == 1:
        with pytest.raises(WaitTimeoutError) as caught:
            handle.wait_signal(1, timeout_ms=20)
        error = (str(caught.value), caught.value.rank, caught.value.peer)
    handle.barrier()
    return error


def test_errors_of_a_process_group_name_global_ranks():
    text, rank, peer = run_ranks(global_ranks_in_errors, 3, start_torch=True)[1]
    assert "Ranks 0, 1 of group" in text
    assert "are the global ranks 1, 2" in text
    assert (rank, peer) == (1, 2)


def made_again(rank, world_size):
    for attempt in range(3):
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(scratch() / f"store{attempt}"), world_size),
            rank=rank,
            world_size=world_size,
        )
        name = dist.group.WORLD.group_name
        handle = symm_mem.rendezvous(symm_mem.empty(1, dtype=torch.int64), name)
        assert exchange(handle, world_size) == 1 - rank
        dist.barrier()
        dist.destroy_process_group()
        with pytest.raises(NotFoundError, match="there is no group named"):
            symm_mem.rendezvous(symm_mem.empty(1), name)


def test_a_process_group_that_was_destroyed_and_made_again_is_a_new_one():
    run_ranks(made_again, 2)


def fake_group(rank, world_size):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    with pytest.raises(UnsupportedError, match="fake"):
        symm_mem.rendezvous(symm_mem.empty(1), dist.group.WORLD)
    dist.destroy_process_group()


def test_a_fake_group_is_refused_at_once():
    run_ranks(fake_group, 1)


def group_of_threads(rank, world_size):
    import threading

    from torch.testing._internal.distributed import multi_threaded_pg

    def run(thread_rank):
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        dist.init_process_group("threaded", rank=thread_rank, world_size=3, store=store)
        with symm_mem.rank_context(timeout_ms=30_000):
            handle = symm_mem.rendezvous(symm_mem.empty(1, dtype=torch.int64), dist.group.WORLD)
            seen[thread_rank] = exchange(handle, 3)
        dist.destroy_process_group()

    seen, store = [None] * 3, dist.HashStore()
    multi_threaded_pg._install_threaded_pg()
    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


def test_a_group_of_threads_works_with_a_rank_context_each():  # M15
    assert run_ranks(group_of_threads, 1) == [[2, 0, 1]]


# ---- ranks that do not come ---------------------------------------------------------------------


def waits_in_vain(rank, world_size):
    symm_mem.set_group_info("tp", rank, world_size, FileStore(scratch() / "store"))
    if rank == 1:
        symm_mem.finalize()
        return None
    tensor = symm_mem.empty(4)
    with pytest.raises(WaitTimeoutError) as caught:
        symm_mem.rendezvous(tensor, "tp", timeout_ms=200)
    with pytest.raises(RevokedError, match="group of another name") as again:
        symm_mem.rendezvous(tensor, "tp", timeout_ms=200)
    assert str(caught.value) in str(again.value)
    symm_mem.set_group_info("alone", 0, 1, MemoryStore())  # the process and the memory are fine
    assert symm_mem.rendezvous(tensor, "alone").get_buffer(0, (4,), torch.float32).sum() == 0
    del tensor
    symm_mem.finalize()
    return str(caught.value), caught.value.peer


def test_a_group_whose_peer_never_comes_names_it():  # M30
    text, peer = run_ranks(waits_in_vain, 2, check_leaks=True)[0]
    assert "'tp'" in text
    assert "1" in text
    assert peer == 1
