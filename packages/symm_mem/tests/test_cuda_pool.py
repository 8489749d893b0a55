"""Memory pools on GPUs: the allocator that torch's are given, by itself, and torch's where it was built for CUDA."""

import pytest
import torch
from cuda_ranks import WAYS, on_cuda, run_cuda_ranks

import fake_torch_cuda
from phalanx import symm_mem
from phalanx.core import InvalidArgumentError, UnsupportedError, load_torch_ops
from phalanx.symm_mem import _state
from phalanx.symm_mem._cuda import storage_at, tensor_of
from phalanx.symm_mem._pool import cuda

MIB = 1 << 20


class Segments:
    """Does what torch does with an allocator of C: takes large pieces, and makes tensors in them."""

    def __init__(self):
        self.ops = load_torch_ops()

    def take(self, size, device=0):
        made = self.ops.lib.phxt_pool_alloc(size, device, self.ops.ffi.NULL)
        return int(self.ops.ffi.cast("uintptr_t", made))

    def give_back(self, address, size):
        self.ops.lib.phxt_pool_free(self.ops.ffi.cast("void *", address), size, 0, self.ops.ffi.NULL)


def tensor_in(address, numel):
    return tensor_of(storage_at(address, 4 * numel, torch.device("cuda", 0), None), torch.float32, (numel,), (1,))


@on_cuda
def lies_in_a_segment(rank, size, name):
    segments, context = Segments(), _state.current()
    assert segments.take(MIB) == 0  # no world was entered
    context.segment_number = cuda.segment_number  # as a pool does
    with cuda.entered(context.world):
        block = segments.take(2 * MIB)
        other = segments.take(MIB)
        assert 0 not in (block, other) and symm_mem.get_mem_stats() == (2, 3 * MIB)
    first, second = tensor_in(block + 4096, 256), tensor_in(block + MIB, 100)
    assert symm_mem.is_symm_mem_tensor(first) and not symm_mem.is_symm_mem_tensor(torch.ones(2, device="cuda"))
    first.fill_(rank + 1)
    handle = symm_mem.rendezvous(first, name)  # the one meeting of the segment
    assert handle.offset == 4096 and symm_mem.get_symmetric_memory(second, name).symm == handle.symm
    torch.ops.phalanx.two_shot_all_reduce_(first, "sum", name)
    assert first.unique().tolist() == [size * (size + 1) / 2]
    handle.barrier()
    torch.cuda.current_stream().synchronize()
    handle.symm.barrier()
    number = cuda.segment_number(block)
    del first, second, handle
    segments.give_back(block, 2 * MIB)
    segments.give_back(block, 2 * MIB)  # of which nothing is known any more
    assert cuda.segment_number(block) == 0 and symm_mem.get_mem_stats() == (1, MIB)
    assert not symm_mem.is_symm_mem_tensor(tensor_in(block, 4))
    with cuda.entered(context.world):
        again = segments.take(2 * MIB)
    assert cuda.segment_number(again) > number
    third = tensor_in(again, 4)
    assert symm_mem.rendezvous(third, name).offset == 0
    torch.ops.phalanx.one_shot_all_reduce(third, "sum", name)
    torch.cuda.current_stream().synchronize()
    symm_mem.get_symmetric_memory(third, name).symm.barrier()
    segments.give_back(again, 2 * MIB)
    segments.give_back(other, MIB)


@pytest.mark.parametrize("way", WAYS)
def test_tensors_in_segments_that_torch_takes_are_symmetric(way):
    run_cuda_ranks(lies_in_a_segment, 2, way)


@on_cuda
def without_cuda(rank, size, name):
    if torch.version.cuda is None:
        with pytest.raises(UnsupportedError, match="this torch was built without CUDA"):
            symm_mem.get_mem_pool("cuda")
    assert symm_mem.get_mempool_allocator("cuda").name == "CUDA"
    with pytest.raises(InvalidArgumentError, match="expected a result of get_mem_pool"), symm_mem.use_mem_pool("cuda"):
        pass


def test_a_torch_without_cuda_has_none():
    run_cuda_ranks(without_cuda, 1, "processes")


@on_cuda
def pooled(rank, size, name):
    pool = symm_mem.get_mem_pool("cuda")
    assert pool is symm_mem.get_mem_pool("cuda:0")
    with symm_mem.use_mem_pool(pool):
        x = torch.randn(1000, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        y = (x * (rank + 1)).relu()
    assert symm_mem.is_symm_mem_tensor(y) and not symm_mem.is_symm_mem_tensor(torch.ones(4, device="cuda"))
    expected = x.relu() * (size * (size + 1) / 2)
    torch.ops.phalanx.two_shot_all_reduce_(y, "sum", name)
    torch.testing.assert_close(y, expected)
    torch.cuda.synchronize()
    symm_mem.get_symmetric_memory(y, name).symm.barrier()


@pytest.mark.skipif(torch.version.cuda is None, reason="a torch that was built for CUDA, with its memory pools")
def test_what_torch_allocates_inside_a_pool_is_symmetric():
    if not fake_torch_cuda.is_real():
        pytest.skip("a GPU: torch.cuda.MemPool asks the CUDA runtime for a driver, which is not that of the tests")
    run_cuda_ranks(pooled, 2, "processes")
