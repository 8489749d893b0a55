"""Symmetric memory on GPUs: rendezvous, memory of peers, signals and barriers of streams."""

import os
import signal

import pytest
import torch
from cuda_ranks import WAYS, on_cuda, run_cuda_ranks

from phalanx import symm_mem
from phalanx.core import (
    FileStore,
    InvalidArgumentError,
    NotFoundError,
    PeerDeadError,
    UnsupportedError,
    WaitTimeoutError,
)
from ranks import scratch

ways = pytest.mark.parametrize("way", WAYS)


@on_cuda
def fills_and_signals(rank, world_size, name):
    tensor = symm_mem.empty(1024, dtype=torch.int32, device="cuda")
    assert tensor.device == torch.device("cuda", 0) and not tensor.cpu().any()
    handle = symm_mem.rendezvous(tensor, name)
    if rank == 1:
        handle.get_buffer(0, (1024,), torch.int32).fill_(42)
        handle.put_signal(0)
    else:
        handle.wait_signal(1)
        assert tensor.eq(42).all().item()
    handle.barrier()  # of the channel that the signal went through
    if rank == 0:
        handle.get_buffer(1, (1024,), torch.int32).copy_(torch.full((1024,), 43, dtype=torch.int32))
    handle.barrier()
    return tensor.unique().tolist()


@ways
def test_data_written_before_a_signal_or_a_barrier_is_there_after_it(way):  # M23 M24 M25 M26 M27
    assert run_cuda_ranks(fills_and_signals, 2, way) == [[42], [43]]


@on_cuda
def ring(rank, world_size, name):
    tensor = symm_mem.empty(100, dtype=torch.int64, device="cuda")
    handle = symm_mem.rendezvous(tensor, name)
    following, previous = (rank + 1) % world_size, (rank - 1) % world_size
    theirs = handle.get_buffer(following, (100,), torch.int64)
    for turn in range(30):
        theirs.fill_(turn * 10 + rank)
        handle.put_signal(following, channel=turn % 5)
        handle.wait_signal(previous, channel=turn % 5)
        assert tensor.unique().tolist() == [turn * 10 + previous]
        handle.put_signal(previous, channel=7)  # read: it may be overwritten
        handle.wait_signal(following, channel=7)
    handle.barrier()
    torch.cuda.current_stream().synchronize()


@ways
def test_signals_of_channels_are_counted_by_themselves(way):  # M24 M28
    run_cuda_ranks(ring, 3, way)


def signals_of(handle):
    """This rank's, by sender and channel; launches and barriers have words of their own behind those of a sender."""
    words = handle.get_signal_pad(handle.rank, (handle.world_size, handle.symm.pad_stride), torch.int32)
    return words.cpu()[:, : handle.signal_channels]


@on_cuda
def gets_buffers(rank, world_size, name):
    tensor = symm_mem.empty(16, dtype=torch.float32, device="cuda:0")
    with pytest.raises(NotFoundError, match="had no rendezvous with group"):  # M17
        symm_mem.get_symmetric_memory(tensor, name)
    handle = symm_mem.rendezvous(tensor, name)
    assert handle is symm_mem.rendezvous(tensor, name) is symm_mem.get_symmetric_memory(tensor, name)  # M16
    assert (handle.rank, handle.world_size, handle.device, handle.offset) == (rank, world_size, tensor.device, 0)
    assert len(set(handle.buffer_ptrs)) == world_size == len(set(handle.signal_pad_ptrs))  # M31
    assert handle.buffer_ptrs[rank] == tensor.data_ptr()
    assert 0 not in (handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev, handle.team)
    tensor.copy_(torch.arange(16.0) + 100 * rank)
    handle.barrier()
    for peer in range(world_size):
        block = torch.arange(16.0) + 100 * peer
        theirs = handle.get_buffer(peer, (2, 8), torch.float32)
        assert theirs.is_cuda and theirs.is_contiguous() and torch.equal(theirs.cpu(), block.view(2, 8))
        assert torch.equal(handle.get_buffer(peer, (3,), torch.int32, 5).cpu(), block.view(torch.int32)[5:8])
        assert torch.equal(handle.get_buffer(peer, (4,), torch.bfloat16, 8).cpu(), block.view(torch.bfloat16)[8:12])
        assert handle.get_buffer(peer, (0, 4), torch.float32).shape == (0, 4)
        assert handle.get_buffer(peer, (), torch.float32, 15).item() == block[15]
    view = symm_mem.rendezvous(tensor[4:8], name)  # M18
    assert (view.offset, view.symm) == (16, handle.symm)
    assert torch.equal(view.get_remote_tensor(0, (4,), torch.float32).cpu(), torch.arange(4.0, 8.0))
    for call, text in (
        (lambda: handle.get_buffer(world_size, (1,), torch.float32), f"rank is {world_size}"),
        (lambda: handle.get_buffer(0, (17,), torch.float32), "need 68 bytes; the block of rank 0 in group 'tp' has 64"),
        (lambda: handle.get_signal_pad(0, (1,), torch.uint32, 1 << 20), "the signal pad of rank 0"),
        (lambda: symm_mem.rendezvous(torch.ones(3, device="cuda"), name), "is ordinary memory"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            call()
    pad = handle.get_signal_pad(rank)  # M33
    assert pad.is_cuda and pad.dtype == torch.uint32 and pad.numel() * 4 == handle.signal_pad_size
    assert not signals_of(handle).any()
    handle.barrier()
    handle.put_signal((rank + 1) % world_size, channel=2)
    handle.barrier()
    assert signals_of(handle).nonzero().tolist() == [[(rank - 1) % world_size, 2]]
    handle.barrier()
    torch.cuda.current_stream().synchronize()


@ways
def test_memory_of_all_ranks_is_there_as_ordinary_tensors(way):  # M16 M17 M18 M22 M31 M33
    run_cuda_ranks(gets_buffers, 3, way)


@on_cuda
def keeps_mappings(rank, world_size, name):
    other = 1 - rank
    quiet = symm_mem.rendezvous(symm_mem.empty(1, device="cuda"), name)
    tensor = symm_mem.empty(1000, device="cuda")
    theirs = symm_mem.rendezvous(tensor, name).get_buffer(other, (1000,), torch.float32)
    theirs.fill_(rank + 1)
    quiet.barrier()
    assert tensor.eq(other + 1).all().item()
    quiet.barrier()
    del tensor  # on its own; what the other one has mapped stays
    assert not symm_mem.is_symm_mem_tensor(torch.empty(4, device="cuda"))
    quiet.barrier()
    torch.cuda.current_stream().synchronize()
    assert symm_mem.get_mem_stats() == (0, 0)
    assert theirs.add_(1).eq(rank + 2).all().item()
    quiet.barrier()
    torch.cuda.current_stream().synchronize()


@ways
def test_a_tensor_of_a_peer_keeps_its_memory(way):  # M22 M37
    run_cuda_ranks(keeps_mappings, 2, way)


@on_cuda
def from_two_streams(rank, world_size, name):
    tensor = symm_mem.empty(8, dtype=torch.int32, device="cuda")
    handle = symm_mem.rendezvous(tensor, name)
    own = torch.cuda.current_stream()
    streams = [own, torch.cuda.Stream(), torch.cuda.Stream()]
    for turn in range(12):
        with torch.cuda.stream(streams[(turn + rank) % 3]):  # nobody orders them
            handle.put_signal(1 - rank, channel=2)
            handle.wait_signal(1 - rank, channel=2)
            handle.barrier(channel=2)
            torch.ops.phalanx.one_shot_all_reduce(tensor, "sum", name)
    torch.cuda.synchronize() if rank == 0 else own.synchronize()
    handle.symm.barrier()
    words = handle.get_signal_pad(rank, (world_size, handle.symm.pad_stride), torch.int32)
    assert words.cpu()[:, 2].tolist() == [12 * (rank == 1), 12 * (rank == 0)]
    handle.symm.barrier()


def test_calls_of_several_streams_keep_their_order():  # M29
    run_cuda_ranks(from_two_streams, 2, "processes")


@on_cuda
def in_two_groups(rank, world_size, name):
    store = FileStore(scratch() / "second-store")
    symm_mem.set_group_info("reversed", world_size - 1 - rank, world_size, store)
    tensor = symm_mem.empty(8, device="cuda")
    first, second = symm_mem.rendezvous(tensor, name), symm_mem.rendezvous(tensor, "reversed")
    assert not set(first.signal_pad_ptrs) & set(second.signal_pad_ptrs)
    for _ in range(3):
        first.put_signal(1 - rank)
    second.barrier()
    assert not signals_of(second).any()
    second.get_buffer(1 - second.rank, (8,), torch.float32).fill_(rank)
    second.barrier()
    assert tensor.unique().tolist() == [1 - rank]
    for _ in range(3):
        first.wait_signal(1 - rank)
    first.barrier()
    torch.cuda.current_stream().synchronize()
    first.symm.barrier()


def test_two_groups_on_one_allocation_have_signals_of_their_own():  # M29
    run_cuda_ranks(in_two_groups, 2, "processes")


@on_cuda
def gives_up(rank, world_size, name):
    tensor = symm_mem.empty(4, device="cuda")
    handle = symm_mem.rendezvous(tensor, name)
    if rank == 0:
        handle.wait_signal(1, channel=3, timeout_ms=50)  # returns at once
        torch.cuda.current_stream().synchronize()  # for which nobody waits for ever
        with pytest.raises(WaitTimeoutError, match="rank 1"):
            handle.barrier()
        assert (tensor + 1).sum().item() == 4  # the context is as good as before
    else:
        with pytest.raises(Exception, match=r"rank 0|timeout|revoked"):  # until rank 0 has found out
            handle.symm.barrier()
    return True


@ways
def test_a_wait_that_times_out_is_the_error_of_the_next_call(way):  # M30
    assert run_cuda_ranks(gives_up, 2, way) == [True, True]


@on_cuda
def dies(rank, world_size, name):
    handle = symm_mem.rendezvous(symm_mem.empty(4, device="cuda"), name)
    handle.symm.barrier()  # of the hosts
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    handle.barrier()  # the kernel ends when rank 1 dies
    torch.cuda.current_stream().synchronize()
    with pytest.raises(PeerDeadError, match="rank 1"):
        handle.barrier()


def test_a_killed_rank_ends_what_waits_for_it_and_is_named():  # M30
    run_cuda_ranks(dies, 2, "processes", expect_exit={1: -signal.SIGKILL})


@on_cuda
def captures(rank, world_size, name):
    tensor = symm_mem.empty(8, device="cuda")
    handle = symm_mem.rendezvous(tensor, name)
    theirs, other = handle.get_buffer(1 - rank, (8,), torch.float32), symm_mem.empty(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        theirs.add_(rank + 1)
        handle.put_signal(1 - rank, channel=1)
        handle.wait_signal(1 - rank, channel=1)
        handle.barrier()
        with pytest.raises(UnsupportedError, match="a stream is being captured"):
            symm_mem.empty(8, device="cuda")
        with pytest.raises(UnsupportedError, match="a stream is being captured"):
            symm_mem.rendezvous(other, name)
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    handle.symm.barrier()
    assert tensor.tolist() == [5.0 * (2 - rank)] * 8
    symm_mem.rendezvous(other, name)
    handle.symm.barrier()


def test_signals_and_barriers_are_captured_into_graphs():
    run_cuda_ranks(captures, 2, "processes")


@on_cuda
def one_sided(rank, world_size, name):
    tensor = symm_mem.empty(4, 3, device="cuda")
    handle = symm_mem.rendezvous(tensor, name)
    if rank == 0:
        symm_mem.put_signal(torch.arange(12.0).view(3, 4).t().to("cuda"), handle, 1)
        with pytest.raises(InvalidArgumentError, match="give a tensor on cuda:0"):
            symm_mem.put_signal(torch.ones(2), handle, 1)
    else:
        symm_mem.wait_signal(handle, 0)
        assert torch.equal(tensor.cpu(), torch.arange(12.0).view(3, 4).t())
    handle.barrier()
    torch.cuda.current_stream().synchronize()


@ways
def test_data_can_be_put_with_its_signal(way):
    run_cuda_ranks(one_sided, 2, way)
