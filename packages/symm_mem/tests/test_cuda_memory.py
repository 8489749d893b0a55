"""Tensors in symmetric memory of GPUs: how they are made, found, kept, counted and freed."""

import gc

import pytest
import torch
from cuda_ranks import WAYS, on_cuda, run_cuda_ranks

import fake_torch_cuda
from phalanx import symm_mem
from phalanx.core import InUseError, MismatchError, UnsupportedError
from phalanx.symm_mem import _state

ways = pytest.mark.parametrize("way", WAYS)


def persistent(numel, alloc_id=7, device="cuda", group_name="tp"):
    return symm_mem.empty_strided_p2p((numel,), (1,), torch.float32, device, group_name, alloc_id)


@on_cuda
def allocates(rank, world_size, name):
    plain = symm_mem.empty(3, 5, dtype=torch.bfloat16, device="cuda")
    assert plain.shape == (3, 5) and plain.dtype == torch.bfloat16 and plain.device == torch.device("cuda", 0)
    assert plain.cpu().eq(0).all()
    strided = symm_mem.empty_strided_p2p((3, 4), (100, 2), torch.int64, torch.device("cuda"))  # M4 M11
    strided.copy_(torch.arange(12).view(3, 4))
    assert strided.stride() == (100, 2) and strided.cpu().tolist() == torch.arange(12).view(3, 4).tolist()
    assert strided.untyped_storage().nbytes() == 8 * 207
    empty = symm_mem.empty(0, 4, device="cuda")  # M12
    assert empty.shape == (0, 4) and symm_mem.is_symm_mem_tensor(empty)
    for tensor in (plain, plain[1:], strided.t()):
        assert symm_mem.is_symm_mem_tensor(tensor)
    assert not symm_mem.is_symm_mem_tensor(torch.ones(3, device="cuda"))
    last = torch.cuda.device_count() - 1
    second = symm_mem.empty(2, device=f"cuda:{last}")
    assert second.device.index == last and second.add_(1).tolist() == [1, 1]
    with torch.device("cuda"):
        assert symm_mem.empty(2).is_cuda
    with pytest.raises(UnsupportedError, match="does not support device type xpu"):
        symm_mem.empty(2, device="xpu")


def test_tensors_are_made_with_any_shape_and_strides():  # M4 M11 M12
    run_cuda_ranks(allocates, 1, "processes")


@on_cuda
def same_address(rank, world_size, name):
    first = persistent(64)
    address = first.data_ptr()
    handle = symm_mem.rendezvous(first)
    view = first[1:]
    with pytest.raises(InUseError, match="alloc_id == 7"):  # M7
        persistent(64)
    del first
    with pytest.raises(InUseError, match="alloc_id == 7"):
        persistent(64)
    del view
    with pytest.raises(MismatchError, match=r"256.*512|512.*256"):  # M8
        persistent(128)
    for step in range(20):
        again = persistent(64)
        assert again.data_ptr() == address and symm_mem.rendezvous(again) is handle  # M6
        again.fill_(step)
        handle.barrier()
        assert handle.get_buffer((rank + 1) % world_size, (64,), torch.float32).eq(step).all().item()
        handle.barrier()
        del again
    elsewhere = ("cuda", torch.cuda.device_count() - 1) if torch.cuda.device_count() > 1 else ("cpu", 0)
    others = [
        persistent(64, 8),
        persistent(64, 7, torch.device(*elsewhere)),
        persistent(64, 7, group_name="other"),
    ]  # M9
    assert len({address, *(each.data_ptr() for each in others)}) == 4
    blocks = symm_mem.get_mem_stats().persistent
    listed = [(each.alloc_id, each.group_name, each.device, each.size_bytes, each.live) for each in blocks]
    assert sorted(listed) == sorted(
        [
            (7, "other", ("cuda", 0), 256, True),
            (7, "tp", ("cuda", 0), 256, False),
            (7, "tp", elsewhere, 256, True),
            (8, "tp", ("cuda", 0), 256, True),
        ]
    )
    with pytest.raises(InUseError):
        symm_mem.drop(8, "tp", "cuda")
    symm_mem.drop(7, "tp", "cuda")
    assert symm_mem.get_mem_stats().blocks == 3
    handle.symm.barrier()


@ways
def test_a_persistent_allocation_has_one_address_and_one_handle(way):  # M6 M7 M8 M9 M36
    run_cuda_ranks(same_address, 2, way)


@on_cuda
def frees_late(rank, world_size, name):
    quiet = symm_mem.empty(1, device="cuda")
    handle = symm_mem.rendezvous(quiet, name)
    handle.barrier()
    torch.cuda.current_stream().synchronize()
    own = torch.cuda.current_stream()
    if rank == 0:
        tensor = symm_mem.empty(1000, device="cuda")
        handle.wait_signal(1)  # the stream stands here, with what is put on it later
        event = own.record_event()
        del tensor
        gc.collect()
        assert not event.query() and symm_mem.get_mem_stats().blocks == 2  # it may still be used
        handle.symm.barrier()
        own.synchronize()
        assert symm_mem.get_mem_stats().blocks == 1
    else:
        handle.symm.barrier()
        handle.put_signal(0)
    handle.barrier()
    own.synchronize()


@ways
def test_memory_is_freed_when_the_stream_is_through_with_it_and_nobody_waits(way):  # M37
    run_cuda_ranks(frees_late, 2, way)


@on_cuda
def frees_in_capture(rank, world_size, name):
    tensor, kept = symm_mem.empty(1000, device="cuda"), symm_mem.empty(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept.add_(1)
        del tensor
        gc.collect()
        assert len(_state.current().retained) == 1  # no event of it may get into the graph
    graph.replay()
    for _ in range(2):  # the first one asks the stream that was captured, which may take a moment
        symm_mem.get_mem_stats()
        torch.cuda.synchronize()
    assert symm_mem.get_mem_stats().blocks == 1 and not _state.current().retained
    assert kept.tolist() == [1.0] * 4


def test_what_ends_while_a_stream_is_captured_is_freed_after_it():
    run_cuda_ranks(frees_in_capture, 1, "processes")


@on_cuda
def nothing_left(rank, world_size, name):
    torch.ones(3, device="cuda").add_(1)  # what torch makes once
    fake_torch_cuda.empty_cache()
    torch.cuda.synchronize()
    steady = None
    for step in range(12):
        tensor = symm_mem.empty(1000 + step, device="cuda")
        handle = symm_mem.rendezvous(tensor, name)
        handle.get_buffer((rank + 1) % world_size, (10,), torch.float32).fill_(1)
        handle.barrier()
        torch.cuda.current_stream().synchronize()
        handle.symm.barrier()
        del tensor, handle
        torch.cuda.current_stream().synchronize()
        symm_mem.get_mem_stats()
        if step == 3:
            steady = fake_torch_cuda.alive()
    assert fake_torch_cuda.alive() == steady
    assert symm_mem.get_mem_stats() == (0, 0)


def test_memory_mappings_and_events_of_the_driver_stay_flat():  # M38
    run_cuda_ranks(nothing_left, 2, "processes")


@on_cuda
def backends(rank, world_size, name):
    class Counting(symm_mem.WorldAllocator):
        name = "COUNTING"

        def __init__(self):
            self.sizes, self.freed = [], []

        def alloc(self, world, size, device, *rest):
            self.sizes.append((size, str(device)))
            return super().alloc(world, size, device, *rest)

        def free(self, memory):
            self.freed.append(memory.size)

    assert symm_mem.has_allocator("cuda") and symm_mem.get_backend("cuda:0") == "CUDA"
    assert symm_mem.get_allocator("cuda").name == "CUDA" and symm_mem.get_backend("cpu") == "SHM"
    counting = Counting()
    symm_mem.register_allocator("cuda", counting)
    assert symm_mem.get_backend("cuda") == "COUNTING"
    tensor = symm_mem.empty(10, device="cuda")
    view = tensor[2:]
    del tensor
    assert (counting.sizes, counting.freed) == ([(40, "cuda:0")], [])
    del view
    assert counting.freed == [40]
    symm_mem.set_backend("CUDA")
    symm_mem.empty(10, device="cuda")
    assert len(counting.sizes) == 1 and symm_mem.get_backend("cpu") == "SHM"
    symm_mem.set_backend("COUNTING")
    assert symm_mem.get_allocator("cuda") is counting


def test_backends_are_by_device_type():  # M5 M13
    run_cuda_ranks(backends, 1, "processes")


@on_cuda
def workspaces(rank, world_size, name):
    host = symm_mem.get_symm_mem_workspace(name, 1000)
    handle = symm_mem.get_symm_mem_workspace(name, 1000, "cuda")
    assert host.device.type == "cpu" and handle.device == torch.device("cuda", 0)
    assert symm_mem.get_symm_mem_workspace(name, 2000, "cuda:0") is handle
    grown = symm_mem.get_symm_mem_workspace(name, 200_000, "cuda")  # M34
    assert grown.buffer_size >= 200_000 and grown is not handle
    handle.get_buffer((rank + 1) % world_size, (8,), torch.int64).fill_(rank)  # valid as before
    handle.barrier()
    assert handle.get_buffer(rank, (8,), torch.int64).unique().tolist() == [(rank - 1) % world_size]
    handle.symm.barrier()


@ways
def test_each_device_has_a_workspace_that_grows(way):  # M34
    run_cuda_ranks(workspaces, 2, way)


@on_cuda
def counts(rank, world_size, name):
    tensor, host = symm_mem.empty(1024, device="cuda"), symm_mem.empty(100)
    symm_mem.rendezvous(tensor, name)
    stats = symm_mem.get_mem_stats()
    assert stats == (2, 4096 + 400)
    assert stats.by_device == {("cpu", 0): (1, 400), ("cuda", 0): (1, 4096)}
    assert (stats.handles, stats.peer_size_bytes) == (1, (world_size - 1) * 4096)
    symm_mem.get_symmetric_memory(tensor, name).symm.barrier()
    del host


def test_memory_is_counted_by_device():
    run_cuda_ranks(counts, 2, "processes")
