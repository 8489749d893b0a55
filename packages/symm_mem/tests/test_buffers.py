"""Peer memory as tensors and as addresses: bounds, dtypes, pointers, reductions."""

import ctypes
import gc

import numpy as np
import pytest
import torch

from phalanx import symm_mem
from phalanx.core import FileStore, InvalidArgumentError, MemoryStore
from ranks import run_ranks, scratch

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


def join(rank, world_size, name="tp"):
    symm_mem.set_group_info(name, rank, world_size, FileStore(scratch() / f"store-{name}"))


@pytest.fixture
def alone():
    """A handle of one rank on 64 bytes that count up from 0, and its tensor."""
    with symm_mem.rank_context():
        symm_mem.set_group_info("tp", 0, 1, MemoryStore())
        tensor = symm_mem.empty(64, dtype=torch.uint8).copy_(torch.arange(64))
        yield symm_mem.rendezvous(tensor, "tp"), tensor


def all_operations(rank, world_size):
    join(rank, world_size)
    tensor = symm_mem.empty(6, 4)
    handle = symm_mem.rendezvous(tensor, "tp")
    peer = (rank + 1) % world_size
    previous = (rank - 1) % world_size
    theirs = handle.get_buffer(peer, tensor.shape, tensor.dtype)
    assert theirs.shape == tensor.shape
    assert theirs.is_contiguous()
    theirs.fill_(rank)
    handle.barrier()
    assert tensor.eq(previous).all()
    handle.barrier()
    theirs.copy_(torch.arange(24.0).reshape(6, 4) + 100 * rank)
    theirs.mul_(2)
    theirs[0].zero_()
    torch.add(theirs[1], 1, out=theirs[2])
    handle.barrier()
    expected = (torch.arange(24.0).reshape(6, 4) + 100 * previous) * 2
    expected[0] = 0
    expected[2] = expected[1] + 1
    assert torch.equal(tensor, expected)
    handle.barrier()
    # Reading: every rank sees every block, its own among them.
    tensor.fill_(rank + 1)
    handle.barrier()
    total = sum(handle.get_buffer(r, tensor.shape, tensor.dtype) for r in range(world_size))
    assert torch.equal(total, torch.full((6, 4), sum(range(world_size + 1)) * 1.0))
    handle.barrier()


def test_peer_memory_takes_all_operations_of_a_tensor():  # M22
    run_ranks(all_operations, 3)


def copies_every_dtype(rank, world_size):
    join(rank, world_size)
    peer = 1 - rank
    for dtype in DTYPES:
        values = torch.tensor([0, 1, 1, 0, 1]) * (2 + rank if dtype != torch.bool else 1)
        tensor = symm_mem.empty(5, dtype=dtype)
        handle = symm_mem.rendezvous(tensor, "tp")
        handle.get_buffer(peer, (5,), dtype).copy_(values.to(dtype))
        handle.barrier()
        expected = torch.tensor([0, 1, 1, 0, 1]) * (2 + peer if dtype != torch.bool else 1)
        assert tensor.to(torch.complex64).real.tolist() == expected.tolist(), dtype
        handle.barrier()


def test_buffers_have_any_dtype():  # M39
    run_ranks(copies_every_dtype, 2)


def test_shape_dtype_and_offset_of_a_buffer_are_free_within_the_block(alone):  # M22
    handle, tensor = alone
    assert handle.get_buffer(0, (2, 3), torch.uint8, 10).tolist() == [[10, 11, 12], [13, 14, 15]]
    assert handle.get_buffer(0, [2], torch.int16, 3).view(torch.uint8).tolist() == [6, 7, 8, 9]
    assert handle.get_buffer(0, (), torch.uint8, 63).item() == 63
    assert handle.get_buffer(0, (0,), torch.int64, 8).numel() == 0
    assert handle.get_buffer(0, (8,), torch.int64).data_ptr() == tensor.data_ptr()
    array = np.frombuffer(bytes(range(64)), dtype=np.int32)
    assert handle.get_buffer(0, (16,), torch.int32).tolist() == array.tolist()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda h: h.get_buffer(1, (1,), torch.uint8), "rank is 1; the ranks of group 'tp' are 0 to 0"),
        (lambda h: h.get_buffer(-1, (1,), torch.uint8), "rank is -1"),
        (lambda h: h.get_buffer("0", (1,), torch.uint8), "rank is '0'"),
        (lambda h: h.get_buffer(0, (65,), torch.uint8), "need 65 bytes; the block of rank 0 in group 'tp' has 64"),
        (lambda h: h.get_buffer(0, (8,), torch.int64, 1), "need 72 bytes"),
        (lambda h: h.get_buffer(0, (2**62, 2), torch.int64), "the block of rank 0"),
        (lambda h: h.get_buffer(0, (1,), torch.uint8, 64), "need 65 bytes"),
        (lambda h: h.get_buffer(0, (0,), torch.uint8, 65), "need 65 bytes"),
        (lambda h: h.get_buffer(0, (1,), torch.uint8, -1), "storage_offset is -1"),
        (lambda h: h.get_buffer(0, (-1,), torch.uint8), "sizes"),
        (lambda h: h.get_buffer(0, (1,), "uint8"), "torch.dtype"),
        (lambda h: h.get_remote_tensor(2, (1,), torch.uint8), "rank is 2"),
        (lambda h: h.get_remote_tensor(0, (65,), torch.uint8), "need 65 bytes"),
        (lambda h: h.get_remote_tensor(0, (1,), 8), "torch.dtype"),
        (lambda h: h.get_signal_pad(1), "rank is 1"),
        (lambda h: h.get_signal_pad(0, (65,)), "the signal pad of rank 0 in group 'tp' has 256"),
        (lambda h: h.get_signal_pad(0, (1,), torch.uint8, 256), "need 257 bytes"),
        (lambda h: h.get_signal_pad(0, (1,), 7), "torch.dtype"),
    ],
)
def test_what_does_not_fit_is_refused_and_says_where(alone, call, text):  # M22 M28
    handle, _ = alone
    with pytest.raises(InvalidArgumentError, match=text):
        call(handle)


def test_the_signal_pad_is_seen_in_any_shape_and_dtype(alone):  # M31 M33
    handle, _ = alone
    pad = handle.get_signal_pad(0)
    assert (pad.dtype, pad.shape) == (torch.uint32, (handle.signal_pad_size // 4,))
    assert handle.get_signal_pad(0, storage_offset=10).shape == (handle.signal_pad_size // 4 - 10,)
    assert handle.get_signal_pad(0, (4, 8), torch.int64).shape == (4, 8)
    handle.put_signal(0, channel=3)
    handle.put_signal(0, channel=3)
    assert handle.get_signal_pad(0, dtype=torch.int32)[3].item() == 2
    assert handle.get_signal_pad(0, (1,), torch.int32, 3).item() == 2


def pointers(rank, world_size):
    join(rank, world_size)
    tensor = symm_mem.empty(8, dtype=torch.int32).copy_(torch.arange(8) + 100 * rank)
    handle = symm_mem.rendezvous(tensor, "tp")
    handle.barrier()
    assert (handle.rank, handle.world_size) == (rank, world_size)
    assert handle.buffer_size == 32
    assert handle.signal_pad_size == handle.signal_channels * world_size * 4
    assert len(set(handle.buffer_ptrs)) == len(set(handle.signal_pad_ptrs)) == world_size
    assert handle.buffer_ptrs[rank] == tensor.data_ptr()
    for array, listed in (
        (handle.buffer_ptrs_dev, handle.buffer_ptrs),
        (handle.signal_pad_ptrs_dev, handle.signal_pad_ptrs),
    ):
        assert list((ctypes.c_void_p * world_size).from_address(array)) == listed
    for peer in range(world_size):
        block = (ctypes.c_int32 * 8).from_address(handle.buffer_ptrs[peer])
        assert list(block) == [100 * peer + i for i in range(8)]
        pad = (ctypes.c_uint32 * (handle.signal_pad_size // 4)).from_address(handle.signal_pad_ptrs[peer])
        assert not any(pad)
        assert handle.get_buffer(peer, (8,), torch.int32).data_ptr() == handle.buffer_ptrs[peer]
        assert handle.get_signal_pad(peer).data_ptr() == handle.signal_pad_ptrs[peer]
    handle.barrier()
    assert f"rank {rank} of {world_size} in group 'tp'" in repr(handle)


def test_pointers_and_sizes_are_those_of_every_rank():  # M31
    run_ranks(pointers, 3)


def outlives(rank, world_size):
    join(rank, world_size)
    tensor = symm_mem.empty(4).fill_(rank)
    handle = symm_mem.rendezvous(tensor, "tp")
    handle.barrier()
    buffers = [handle.get_buffer(peer, (4,), torch.float32) for peer in range(world_size)]
    pad = handle.get_signal_pad(1 - rank)
    handle.barrier()
    del tensor, handle
    gc.collect()
    assert [buffer.sum().item() for buffer in buffers] == [4.0 * peer for peer in range(world_size)]
    symm_mem.finalize()
    gc.collect()
    assert [buffer[0].item() for buffer in buffers] == list(range(world_size))
    assert pad.shape
    del buffers, pad


def test_buffers_keep_the_mapping_alive_after_tensor_handle_and_group():  # M22
    run_ranks(outlives, 2, check_leaks=True)


def reduces(rank, world_size):
    join(rank, world_size)
    results = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64):
        name = str(dtype).removeprefix("torch.")
        tensor = symm_mem.empty(1000, dtype=dtype).copy_(torch.arange(1000) % 7 + rank)
        handle = symm_mem.rendezvous(tensor, "tp")
        out = torch.zeros(1000, dtype=dtype)
        handle.symm.all_reduce(0, out.data_ptr(), 1000, name, "sum")
        assert torch.equal(out, ((torch.arange(1000) % 7) * world_size + sum(range(world_size))).to(dtype)), dtype
        results[name] = out.view(torch.uint8).tolist()
    # 256 + 1 + 1 is 258 in float32. Rounded to bfloat16 after each step it would stay 256.
    tensor = symm_mem.empty(1, dtype=torch.bfloat16).fill_(256.0 if rank == 0 else 1.0)
    out = torch.zeros(1, dtype=torch.bfloat16)
    symm_mem.rendezvous(tensor, "tp").symm.all_reduce(0, out.data_ptr(), 1, "bfloat16", "sum")
    assert out.item() == 258.0
    return results


def test_reductions_of_symmetric_memory_have_the_sum_in_every_dtype():  # M39
    first, *others = run_ranks(reduces, 3)
    assert all(other == first for other in others)


def gathered(rank, world_size):
    join(rank, world_size)
    tensor = symm_mem.empty(6 * 1024)  # six pages
    handle = symm_mem.rendezvous(tensor, "tp")
    for shape, dtype, start in (
        ((2, 512), torch.float32, 0),
        ((4096,), torch.bfloat16, 4096),
        ((3, 1024), torch.int32, 2048),
    ):
        whole = handle.get_gathered(shape, dtype, start)
        assert whole.shape == (world_size * shape[0], *shape[1:]) and whole.dtype == dtype and whole.is_contiguous()
        for turn in range(1, 4):
            handle.get_buffer(rank, shape, dtype, start).fill_(10 * turn + rank)
            handle.barrier()
            wanted = torch.cat([torch.full(shape, 10 * turn + each, dtype=dtype) for each in range(world_size)])
            assert torch.equal(whole, wanted)
            handle.barrier()
    whole[rank * 3] = rank + 70  # it is the ranks' memory
    handle.barrier()
    for peer in range(world_size):
        assert handle.get_buffer(peer, (3, 1024), torch.int32, 2048)[0].eq(peer + 70).all()
    handle.barrier()
    del tensor, handle
    gc.collect()
    assert whole[rank * 3].eq(rank + 70).all()  # it lives on its own


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_all_ranks_have_is_one_tensor_without_a_copy(world_size):
    run_ranks(gathered, world_size)


def test_only_whole_pages_inside_the_block_are_one_tensor():
    with symm_mem.rank_context():
        symm_mem.set_group_info("tp", 0, 1, MemoryStore())
        tensor = symm_mem.empty(3000)
        handle = symm_mem.rendezvous(tensor, "tp")
        for sizes, start, text in (
            ((1000,), 0, "whole pages"),
            ((1024,), 8, "whole pages"),
            ((4096,), 0, "inside"),
            ((), 0, "at least one dim"),
        ):
            with pytest.raises(InvalidArgumentError, match=text):
                handle.get_gathered(sizes, torch.float32, start)
        assert handle.get_gathered((0, 3), torch.float32).shape == (0, 3)
        with pytest.raises(InvalidArgumentError, match="give a torch.dtype"):
            handle.get_gathered((1024,), "float32")
