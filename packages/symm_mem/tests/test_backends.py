"""Backends by name and device type."""

import pytest
import torch

from phalanx import symm_mem
from phalanx.core import InvalidArgumentError, UnsupportedError


class Arena(symm_mem.WorldAllocator):
    name = "ARENA"

    def __init__(self):
        self.sizes = []

    def alloc(self, world, size, *rest):
        self.sizes.append(size)
        return super().alloc(world, size, *rest)


@pytest.fixture(autouse=True)
def _a_rank():
    with symm_mem.rank_context():
        yield


def test_memory_of_the_cpu_is_shared_memory():  # M13
    for device in ("cpu", torch.device("cpu"), torch.device("cpu", 0)):
        assert symm_mem.get_backend(device) == "SHM"
    for device in ("cuda", "cuda:1", torch.device("meta")):
        assert symm_mem.get_backend(device) is None


def test_a_registered_allocator_is_a_backend_by_its_name():  # M13
    arena = Arena()
    symm_mem.register_allocator("cpu", arena)
    assert symm_mem.get_backend("cpu") == "ARENA"
    first = symm_mem.empty(3)
    symm_mem.set_backend("SHM")  # at any time; what was made stays
    assert symm_mem.get_backend("cpu") == "SHM"
    symm_mem.empty(4)
    symm_mem.set_backend("ARENA")
    assert symm_mem.get_allocator("cpu") is arena
    symm_mem.empty(5)
    assert arena.sizes == [12, 20]
    assert symm_mem.is_symm_mem_tensor(first)
    newer = Arena()
    newer.name = "NEWER"
    symm_mem.register_allocator("cpu", newer)  # which replaces it
    symm_mem.set_backend("SHM")
    symm_mem.set_backend("NEWER")
    assert symm_mem.get_allocator("cpu") is newer
    with pytest.raises(UnsupportedError, match=r"backend 'ARENA'; this rank has NEWER \(cpu\), SHM \(cpu\)"):
        symm_mem.set_backend("ARENA")
    with symm_mem.rank_context():  # backends belong to a rank
        assert symm_mem.get_backend("cpu") == "SHM"


def test_a_backend_may_be_for_several_device_types():  # M13
    arena = Arena()
    symm_mem.register_allocator("xpu", arena)
    assert symm_mem.get_backend("xpu:0") == "ARENA"
    assert symm_mem.get_backend("cpu") == "SHM"
    symm_mem.set_backend("ARENA")
    assert symm_mem.get_backend("cpu") == "SHM"  # for which it was not registered
    symm_mem.register_allocator("cpu", arena)
    symm_mem.set_backend("SHM")
    assert (symm_mem.get_backend("cpu"), symm_mem.get_backend("xpu")) == ("SHM", "ARENA")


@pytest.mark.parametrize("name", ["CUDA", "NVSHMEM", "NCCL", "shm", "", None])
def test_an_unknown_backend_is_refused_with_those_that_there_are(name):
    symm_mem.register_allocator("xpu", Arena())
    with pytest.raises(UnsupportedError, match=rf"backend {name!r}; this rank has ARENA \(xpu\), SHM \(cpu\)"):
        symm_mem.set_backend(name)
    assert symm_mem.get_backend("cpu") == "SHM"


def test_an_allocator_needs_a_name():
    with pytest.raises(InvalidArgumentError, match="has no attribute `name`"):
        symm_mem.register_allocator("cpu", object())
    assert symm_mem.get_backend("cpu") == "SHM"
