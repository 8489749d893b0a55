"""Symmetric tensors of one rank: sizes, strides, persistent allocations, allocators."""

import gc
import os
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx import symm_mem
from phalanx.core import (
    FileStore,
    InUseError,
    InvalidArgumentError,
    MismatchError,
    NotFoundError,
    OutOfMemoryError,
    PhalanxError,
    UnsupportedError,
)
from ranks import run_ranks, scratch


@pytest.fixture(autouse=True)
def rank():
    """A rank for each test."""
    with symm_mem.rank_context() as context:
        yield context


def allocate(count, alloc_id, dtype=torch.float32, group_name=None):
    return symm_mem.empty_strided_p2p((count,), (1,), dtype, "cpu", group_name, alloc_id)


# ---- shapes, strides, sizes ---------------------------------------------------------------------


@pytest.mark.parametrize("size", [(2, 3), ((2, 3),), ([2, 3],), (torch.Size([2, 3]),)], ids=repr)
def test_empty_takes_a_shape_in_every_form_that_torch_takes(size):
    tensor = symm_mem.empty(*size)
    assert tensor.shape == (2, 3)
    assert tensor.is_contiguous()
    assert tensor.dtype == torch.get_default_dtype()
    assert tensor.device == torch.device("cpu")


def test_empty_has_one_element_for_the_empty_shape():
    assert symm_mem.empty().shape == torch.Size([])
    assert symm_mem.empty(()).fill_(3).item() == 3


def test_dtype_and_device_default_to_those_of_torch(monkeypatch):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert symm_mem.empty(1).dtype == torch.float64
    finally:
        torch.set_default_dtype(before)
    assert symm_mem.empty(1, dtype=torch.int16, device="cpu").dtype == torch.int16


def test_memory_is_zeroed_and_an_ordinary_tensor():
    tensor = symm_mem.empty(1000, dtype=torch.int32)
    assert not tensor.any()
    tensor.copy_(torch.arange(1000))
    assert (tensor + 1).sum() == 1000 * 1001 // 2
    assert tensor._base is None
    weight = symm_mem.empty(3).fill_(2).requires_grad_()
    (weight * weight).sum().backward()
    assert weight.grad.tolist() == [4, 4, 4]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=4))
def test_shape_strides_and_storage_are_those_of_empty_strided(dims):  # M4 M11
    size, stride = [d[0] for d in dims], [d[1] for d in dims]
    with symm_mem.rank_context():
        tensor = symm_mem.empty_strided_p2p(size, stride, torch.int16, torch.device("cpu"))
        reference = torch.empty_strided(size, stride, dtype=torch.int16)
        assert (tensor.shape, tensor.stride()) == (reference.shape, reference.stride())
        if tensor.numel():
            assert tensor.untyped_storage().nbytes() == reference.untyped_storage().nbytes()
            assert symm_mem.get_mem_stats() == (1, reference.untyped_storage().nbytes())
        del tensor


def test_strides_may_reach_beyond_the_number_of_elements():  # M11
    tensor = symm_mem.empty_strided_p2p((3, 2), (5000, 3), torch.float64, "cpu")
    assert symm_mem.get_mem_stats().size_bytes == (2 * 5000 + 3 + 1) * 8
    tensor.copy_(torch.arange(6.0).reshape(3, 2))
    assert tensor.tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("size", [(2**31, 2**31, 8), (2**62, 4), (2**63 - 1, 3)])
def test_a_size_that_overflows_64_bits_is_refused(size):  # M10
    with pytest.raises(InvalidArgumentError, match="more than the largest size"):
        symm_mem.empty(*size, dtype=torch.float32)
    # The product is 2**66 here: modulo 2**64 it would look like a small one.
    with pytest.raises(InvalidArgumentError, match="more than the largest size"):
        symm_mem.empty_strided_p2p((2**33 + 1,), (2**33,), torch.int8, "cpu")
    assert symm_mem.get_mem_stats() == (0, 0)


def test_a_size_that_only_a_32_bit_product_would_find_small_is_too_much_memory():  # M10
    with pytest.raises(OutOfMemoryError, match=str(2**40)):  # 2**40 modulo 2**32 is 0
        symm_mem.empty(2**20, 2**20, dtype=torch.uint8)


def available_bytes():
    with open("/proc/meminfo") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))


# The slow one: two seconds on most machines.
@pytest.mark.skipif(available_bytes() < 6 << 30, reason="needs 6 GiB of free memory")
def test_an_allocation_may_have_more_than_two_gib():  # M10
    count = 2**31 + 4096
    tensor = symm_mem.empty(2, count // 2, dtype=torch.uint8)
    tensor[1, -1] = 7
    assert symm_mem.get_mem_stats().size_bytes == count
    from phalanx.core import MemoryStore

    symm_mem.set_group_info("one", 0, 1, MemoryStore())
    handle = symm_mem.rendezvous(tensor, "one")
    assert handle.buffer_size == count
    assert handle.get_buffer(0, (4,), torch.uint8, count - 4).tolist() == [0, 0, 0, 7]
    assert handle.get_buffer(0, (1,), torch.int64, count // 8 - 1).view(torch.uint8)[-1] == 7


@pytest.mark.parametrize("shape", [(0,), (4, 0, 3), (0, 2**40)])
def test_tensors_without_elements_are_symmetric_too(shape):  # M12
    first, second = symm_mem.empty(shape), symm_mem.empty(shape)
    assert first.shape == shape
    assert symm_mem.is_symm_mem_tensor(first)
    assert symm_mem.get_mem_stats() == (2, 0)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (((2, -1), (1, 1), torch.int8, "cpu"), "size is"),
        (((2, 2), (1, -1), torch.int8, "cpu"), "stride is"),
        (((2, 2), (1,), torch.int8, "cpu"), "2 dims"),
        (((2.5,), (1,), torch.int8, "cpu"), "sequence of integers"),
        (((2,), (1,), "float32", "cpu"), "torch.dtype"),
        (((2,), (1,), torch.int8, "cpu:1"), "index 0"),
        (((2,), (1,), torch.int8, "cpu", None, -1), "alloc_id"),
        (((2,), (1,), torch.int8, "cpu", None, 2**64), "alloc_id"),
        (((2,), (1,), torch.int8, "cpu", "a\0b", 1), "NUL"),
    ],
)
def test_wrong_arguments_are_named(arguments, text):
    with pytest.raises(InvalidArgumentError, match=text):
        symm_mem.empty_strided_p2p(*arguments)
    assert symm_mem.get_mem_stats() == (0, 0)


# ---- lifetime -----------------------------------------------------------------------------------


def test_memory_is_freed_with_the_last_view():  # M5
    tensor = symm_mem.empty(100)
    view = tensor[10:20].view(2, 5)
    array = tensor.numpy()
    del tensor
    assert symm_mem.get_mem_stats() == (1, 400)
    del view
    array[3] = 1
    assert symm_mem.get_mem_stats().blocks == 1
    del array
    assert symm_mem.get_mem_stats() == (0, 0)


def test_tensors_outlive_their_rank_context(rank):  # M5
    tensor = symm_mem.empty(4)
    rank.close()
    assert tensor.fill_(1).sum() == 4
    with pytest.raises(InvalidArgumentError, match="closed"):
        symm_mem.empty(4)


def test_only_tensors_made_here_and_their_views_are_symmetric():
    tensor = symm_mem.empty(8)
    assert symm_mem.is_symm_mem_tensor(tensor)
    assert symm_mem.is_symm_mem_tensor(tensor[3:])
    assert symm_mem.is_symm_mem_tensor(torch.from_numpy(tensor.numpy()[2:]))
    for other in (torch.empty(8), torch.empty(8, device="meta"), torch.eye(2).to_sparse(), tensor.clone()):
        assert not symm_mem.is_symm_mem_tensor(other)
    with pytest.raises(InvalidArgumentError, match="give a torch.Tensor"):
        symm_mem.is_symm_mem_tensor([1.0])


# ---- persistent allocations ---------------------------------------------------------------------


def test_an_alloc_id_gives_the_same_address_after_the_previous_tensor_died():  # M6
    first = allocate(100, 7)
    address = first.fill_(5).data_ptr()
    del first
    second = allocate(100, 7)
    assert second.data_ptr() == address
    assert second.tolist() == [5] * 100


def test_an_alloc_id_in_use_is_refused_and_views_count():  # M7
    tensor = allocate(10, 7)
    view = tensor[1:]
    text = "can not allocate with alloc_id == 7 because a previous allocation with the same alloc_id is still active."
    with pytest.raises(InUseError) as caught:
        allocate(10, 7)
    assert text in str(caught.value)
    del tensor
    with pytest.raises(InUseError, match="still active"):
        allocate(10, 7)
    del view
    assert allocate(10, 7).shape == (10,)


def test_an_alloc_id_keeps_its_number_of_bytes_but_not_its_shape_and_dtype():  # M8
    address = allocate(12, 1, torch.float32).data_ptr()
    with pytest.raises(MismatchError) as caught:
        allocate(13, 1, torch.float32)
    assert "48 bytes" in str(caught.value)
    assert "52" in str(caught.value)
    other = symm_mem.empty_strided_p2p((2, 3), (3, 1), torch.float64, "cpu", None, 1)
    assert other.data_ptr() == address


def test_alloc_ids_and_group_names_tell_allocations_apart():  # M9
    tensors = [allocate(4, 1), allocate(4, 2), allocate(4, 1, group_name="a"), allocate(4, 1, group_name="b")]
    assert len({tensor.data_ptr() for tensor in tensors}) == 4
    assert allocate(4, 2**64 - 1).numel() == 4


def test_persistent_memory_stays_until_it_is_dropped():  # M9
    tensor = allocate(4, 1, group_name="a")
    with pytest.raises(InUseError, match="still active"):
        symm_mem.drop(1, "a")
    del tensor
    assert symm_mem.get_mem_stats() == (1, 16)
    with pytest.raises(NotFoundError, match="no persistent allocation"):
        symm_mem.drop(1)
    symm_mem.drop(1, "a")
    assert symm_mem.get_mem_stats() == (0, 0)
    assert allocate(8, 1, group_name="a").tolist() == [0] * 8  # another size, zeroed


# ---- allocators ---------------------------------------------------------------------------------


class Counting(symm_mem.WorldAllocator):
    name = "counting"

    def __init__(self):
        self.sizes, self.freed = [], []

    def alloc(self, world, size, device, scope, alloc_id):
        self.sizes.append((size, device.type, scope, alloc_id))
        return super().alloc(world, size, device, scope, alloc_id)

    def free(self, memory):
        self.freed.append(memory.size)


def test_allocators_are_looked_up_by_device_type():  # M13
    assert symm_mem.has_allocator("cpu")
    assert symm_mem.get_allocator("cpu").name == "SHM"
    assert not symm_mem.has_allocator("xpu")
    for call in (lambda: symm_mem.get_allocator("xpu"), lambda: symm_mem.empty(1, device="xpu")):
        with pytest.raises(UnsupportedError, match="SymmetricMemory does not support device type xpu"):
            call()
    with pytest.raises(InvalidArgumentError, match="without an index"):
        symm_mem.get_allocator("cuda:1")


def test_a_registered_allocator_replaces_the_one_before_and_frees_what_it_made():  # M5 M13
    old = symm_mem.empty(1)
    counting = Counting()
    symm_mem.register_allocator("cpu", counting)
    assert symm_mem.get_allocator("cpu") is counting
    tensor = symm_mem.empty(10)
    persistent = allocate(3, 5, group_name="g")
    assert counting.sizes == [(40, "cpu", None, None), (12, "cpu", "g", 5)]
    second = Counting()
    symm_mem.register_allocator("cpu", second)
    del old, persistent
    view = tensor[1:]
    del tensor
    assert counting.freed == [12]
    del view
    assert counting.freed == [12, 40]
    assert second.sizes == []


def test_a_tensor_keeps_its_allocator_alive():  # M5
    symm_mem.register_allocator("cpu", Counting())
    alive = weakref.ref(symm_mem.get_allocator("cpu"))
    tensor = symm_mem.empty(10)
    symm_mem.register_allocator("cpu", Counting())  # of the same name: of another one both would stay
    gc.collect()
    assert alive() is not None
    del tensor
    gc.collect()
    assert alive() is None


def test_an_allocator_that_fails_leaves_nothing():
    class Failing(symm_mem.WorldAllocator):
        def alloc(self, world, size, device, scope, alloc_id):
            raise OutOfMemoryError("full")

    symm_mem.register_allocator("cpu", Failing())
    with pytest.raises(OutOfMemoryError, match="full"):
        symm_mem.empty(1)
    assert symm_mem.get_mem_stats() == (0, 0)


# ---- the rank of the process --------------------------------------------------------------------


def starts_anew(rank, world_size):
    store = FileStore(scratch() / "store")
    for turn in range(2):
        symm_mem.set_group_info("tp", 0, 1, store)  # the name is free again
        tensor = allocate(4, 1)
        assert tensor.tolist() == [0] * 4
        symm_mem.rendezvous(tensor.fill_(turn + 1), "tp").barrier()
        symm_mem.finalize()
        assert tensor.sum() == 4 * (turn + 1)
        del tensor


def test_after_finalize_the_rank_of_the_process_starts_anew():
    run_ranks(starts_anew, 1, check_leaks=True)


def test_a_forked_child_starts_anew_and_frees_nothing_of_its_parent():
    tensor = symm_mem.empty(4).fill_(3)
    child = os.fork()
    if child == 0:  # leaves by os._exit, whatever happens: it is a copy of the test runner
        status = 1
        try:
            with symm_mem.rank_context():
                own = symm_mem.empty(4).fill_(9)
                del tensor
                try:
                    symm_mem.empty(-1)
                except PhalanxError:
                    status = 0 if own.sum() == 36 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert tensor.sum() == 12
