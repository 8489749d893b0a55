"""Signals and barriers: order of data, channels, timeouts."""

import ctypes

import pytest
import torch

from phalanx import symm_mem
from phalanx.core import FileStore, InvalidArgumentError, MemoryStore, WaitTimeoutError
from ranks import run_ranks, scratch


def join(rank, world_size, name="tp"):
    symm_mem.set_group_info(name, rank, world_size, FileStore(scratch() / f"store-{name}"))


def fills_and_signals(rank, world_size):
    join(rank, world_size)
    tensor = symm_mem.empty(1024, dtype=torch.int32)
    handle = symm_mem.rendezvous(tensor, "tp")
    if rank == 1:
        handle.get_buffer(0, (1024,), torch.int32).fill_(42)
        handle.put_signal(0)
    else:
        handle.wait_signal(1)
        assert tensor.eq(42).all()
    handle.barrier()
    if rank == 0:
        handle.get_buffer(1, (1024,), torch.int32).copy_(torch.full((1024,), 43, dtype=torch.int32))
    handle.barrier()
    return tensor.unique().tolist()


def test_data_written_before_a_signal_or_a_barrier_is_there_after_it():  # M24 M25 M26 M27
    assert run_ranks(fills_and_signals, 2) == [[42], [43]]


def ring_without_torch(rank, world_size):
    join(rank, world_size)
    count = 5000
    tensor = symm_mem.empty(count, dtype=torch.int32)
    handle = symm_mem.rendezvous(tensor, "tp")
    following, previous = (rank + 1) % world_size, (rank - 1) % world_size
    source = (ctypes.c_int32 * count)()
    for turn in range(200):
        source[:] = [turn * 10 + rank] * count
        ctypes.memmove(handle.buffer_ptrs[following], source, 4 * count)
        handle.put_signal(following, channel=turn % 5)
        handle.wait_signal(previous, channel=turn % 5)
        assert tensor.unique().tolist() == [turn * 10 + previous]
        handle.put_signal(previous, channel=7)  # read: it may be overwritten
        handle.wait_signal(following, channel=7)
    handle.barrier()  # a rank that leaves ends the group for the others


def test_a_signal_also_orders_what_others_than_torch_write():  # M27
    run_ranks(ring_without_torch, 3)


def counted(rank, world_size):
    join(rank, world_size)
    handle = symm_mem.rendezvous(symm_mem.empty(1), "tp")
    peer = 1 - rank
    for _ in range(10):
        handle.put_signal(peer, timeout_ms=50)  # never waits for the peer to take the one before
    for _ in range(10):
        handle.wait_signal(peer)
    handle.barrier()
    with pytest.raises(WaitTimeoutError):
        handle.wait_signal(peer, timeout_ms=20)
    handle.barrier()


def test_signals_are_counted():  # M24
    run_ranks(counted, 2)


def isolated(rank, world_size):
    join(rank, world_size)
    handle = symm_mem.rendezvous(symm_mem.empty(1), "tp")
    peer = 1 - rank
    last = handle.signal_channels - 1
    handle.put_signal(peer, last)
    handle.barrier(3)  # a barrier takes no signal, of whatever channel
    handle.barrier(last)
    for channel in (0, 3, last - 1):
        with pytest.raises(WaitTimeoutError, match=f"channel {channel}"):
            handle.wait_signal(peer, channel, timeout_ms=10)
    handle.wait_signal(peer, last)
    handle.barrier()


def test_channels_do_not_disturb_each_other():  # M28
    run_ranks(isolated, 2)


def test_ranks_and_channels_out_of_range_are_refused():  # M28
    with symm_mem.rank_context(signal_channels=5):
        symm_mem.set_group_info("tp", 0, 1, MemoryStore())
        handle = symm_mem.rendezvous(symm_mem.empty(1), "tp")
        assert handle.signal_channels == 5
        assert handle.signal_pad_size == 16 * 4  # whole cache lines
        for call in (handle.barrier, lambda channel: handle.put_signal(0, channel), lambda c: handle.wait_signal(0, c)):
            for channel in (5, 2**31, -1, 2**40, "0"):
                with pytest.raises(InvalidArgumentError, match="channel"):
                    call(channel)
        for call in (handle.put_signal, handle.wait_signal):
            for rank in (1, -1, 2**40, None):
                with pytest.raises(InvalidArgumentError, match="group_rank"):
                    call(rank)
        for call in (handle.barrier, lambda timeout_ms: handle.wait_signal(0, timeout_ms=timeout_ms)):
            with pytest.raises(InvalidArgumentError, match="timeout_ms"):
                call(timeout_ms=-1)
        handle.put_signal(0, 4)
        handle.wait_signal(0, 4)
        handle.barrier(4)


def times_out_and_goes_on(rank, world_size):
    join(rank, world_size)
    tensor = symm_mem.empty(4)
    handle = symm_mem.rendezvous(tensor, "tp")
    peer = (rank + 1) % world_size
    texts = []
    if rank == 0:
        for _ in range(2):
            with pytest.raises(WaitTimeoutError) as caught:
                handle.wait_signal(1, channel=2, timeout_ms=30)
            texts.append((str(caught.value), caught.value.peer, caught.value.group))
        for _ in range(3):  # arrives once, whatever the number of tries
            with pytest.raises(WaitTimeoutError) as caught:
                handle.barrier(4, timeout_ms=30)
        texts.append((str(caught.value), caught.value.peer, caught.value.group))
    handle.barrier()
    if rank == 1:
        handle.get_buffer(0, (4,), torch.float32).fill_(5)
        handle.put_signal(0, channel=2)
    if rank == 0:
        handle.wait_signal(1, channel=2)
        assert tensor.eq(5).all()
    handle.barrier(4)
    handle.barrier(4)
    with pytest.raises(WaitTimeoutError):  # and no signal is left over
        handle.wait_signal(peer, channel=2, timeout_ms=10)
    handle.barrier()
    return texts


def test_a_wait_that_timed_out_names_the_peer_and_may_be_repeated():  # M30
    texts = run_ranks(times_out_and_goes_on, 3)[0]
    for (text, peer, group), channel in zip(texts, (2, 2, 4), strict=True):
        assert "30 ms" in text
        assert f"channel {channel}" in text
        assert "waits for rank 1 (pid " in text
        assert (peer, group) == (1, "tp")


def zero_at_hand_over(rank, world_size):
    join(rank, world_size)
    kept = []
    for _ in range(20):
        tensor = symm_mem.empty(1)
        handle = symm_mem.rendezvous(tensor, "tp")
        kept.append((tensor, handle))
        if rank == 0:  # at once: it must not be wiped by a peer that is late
            for peer in range(1, world_size):
                handle.put_signal(peer, channel=1)
            continue
        handle.wait_signal(0, channel=1, timeout_ms=10_000)
        pad = handle.get_signal_pad(rank, dtype=torch.int32).clone()
        assert pad[1].item() == 1  # of rank 0, channel 1
        pad[1] = 0
        assert not pad.any()
    kept[-1][1].barrier()


def test_pads_are_zero_at_hand_over_and_no_early_signal_is_lost():  # M33
    run_ranks(zero_at_hand_over, 3)


def by_hand(rank, world_size):
    join(rank, world_size)
    handle = symm_mem.rendezvous(symm_mem.empty(1), "tp")
    peer, channel = 1 - rank, 9
    stride = handle.symm.pad_stride
    theirs = handle.get_signal_pad(peer, dtype=torch.int32)
    mine = handle.get_signal_pad(rank, dtype=torch.int32)
    theirs[rank * stride + channel] = 17 + rank
    handle.barrier()
    assert mine[peer * stride + channel].item() == 17 + peer
    assert mine[rank * stride + channel].item() == 0
    handle.put_signal(peer, channel=10)  # other channels go on
    handle.wait_signal(peer, channel=10)
    handle.barrier()


def test_pad_words_of_a_channel_may_be_used_by_hand():  # M33
    run_ranks(by_hand, 2)
