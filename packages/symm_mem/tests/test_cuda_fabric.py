"""Symmetric memory of GPUs that processes without a common group share."""

import gc

import pytest
import torch
from cuda_ranks import on_cuda, run_cuda_ranks

import fake_torch_cuda
from phalanx import symm_mem
from phalanx.core import DeviceError, InvalidArgumentError, NotFoundError, UnsupportedError
from ranks import scratch


def has_fabric():
    """Whether the GPU gives handles; a real one may not, and the driver of the tests does as it is told."""
    try:
        symm_mem.export_fabric(symm_mem.empty(1, device="cuda"))
    except UnsupportedError as error:
        assert fake_torch_cuda.is_real() and "fabric" in str(error)
        return False
    return True


def pass_on(name, content=None):
    """Through a file, as any other means would do."""
    path = scratch() / name
    if content is not None:
        path.with_suffix(".part").write_bytes(content)
        path.with_suffix(".part").rename(path)
        return content
    while not path.exists():  # the test's own limit is the end of it
        torch.cuda.synchronize()
    return path.read_bytes()


@on_cuda
def hands_over(rank, world_size, name):
    if not has_fabric():
        return None
    if rank == 0:
        block = symm_mem.empty(3, 4, dtype=torch.int32, device="cuda")
        block.copy_(torch.arange(12, dtype=torch.int32).view(3, 4))
        torch.cuda.synchronize()
        pass_on("handle", symm_mem.export_fabric(block[1:]))  # a view stands for its block
        pass_on("written")
        return block.tolist()
    theirs = symm_mem.import_fabric(pass_on("handle"), (3, 4), (4, 1), torch.int32)
    column = symm_mem.import_fabric(pass_on("handle"), (2,), (4,), torch.int32, "cuda:0", storage_offset=6)
    assert theirs.is_cuda and not symm_mem.is_symm_mem_tensor(theirs)
    seen = theirs.tolist(), column.tolist()
    theirs[0].fill_(-1)
    column.add_(100)
    torch.cuda.synchronize()
    pass_on("written", b"yes")
    return seen


def test_a_tensor_is_read_and_written_where_no_group_is_common():  # C2
    values = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    first, second = run_cuda_ranks(hands_over, 2, "processes")
    if first is None:
        pytest.skip("a GPU with fabric handles")
    assert second == (values, [6, 10])
    assert first == [[-1] * 4, [4, 5, 106, 7], [8, 9, 110, 11]]


@on_cuda
def ends(rank, world_size, name):
    if not has_fabric():
        return False
    torch.cuda.synchronize()  # memory counts until the streams that could use it are through, the question's above too
    counted = symm_mem.get_mem_stats()
    block = symm_mem.empty(8, device="cuda")
    handle = symm_mem.export_fabric(block)
    torch.cuda.synchronize()
    mapped = symm_mem.import_fabric(handle, (8,), (1,), torch.float32)
    view = mapped[2:]
    del block, mapped
    gc.collect()
    assert view.fill_(3).tolist() == [3.0] * 6  # the memory lives as long as a mapping
    del view
    gc.collect()
    torch.cuda.synchronize()
    assert symm_mem.get_mem_stats() == counted  # counting frees what the streams are through with
    if not fake_torch_cuda.is_real():
        with pytest.raises(DeviceError, match="importing memory of a GPU"):
            symm_mem.import_fabric(handle, (8,), (1,), torch.float32)
    assert symm_mem.get_mem_stats() == counted
    return True


def test_memory_lives_as_long_as_what_is_mapped():
    if run_cuda_ranks(ends, 1, "processes") == [False]:
        pytest.skip("a GPU with fabric handles")


@on_cuda
def refuses(rank, world_size, name):
    if not has_fabric():
        return False
    block = symm_mem.empty(8, device="cuda")
    handle = symm_mem.export_fabric(block)
    with pytest.raises(InvalidArgumentError, match="not in symmetric memory"):
        symm_mem.export_fabric(torch.ones(3, device="cuda"))
    with pytest.raises(UnsupportedError, match="memory is not on a GPU"):
        symm_mem.export_fabric(symm_mem.empty(3))
    with pytest.raises(InvalidArgumentError, match="needs 36 bytes, and the block has 32"):
        symm_mem.import_fabric(handle, (8,), (1,), torch.float32, storage_offset=1)
    with pytest.raises(InvalidArgumentError, match="negative values"):
        symm_mem.import_fabric(handle, (8,), (1,), torch.float32, storage_offset=-1)
    with pytest.raises(InvalidArgumentError, match="give a torch.dtype"):
        symm_mem.import_fabric(handle, (8,), (1,), "float32")
    with pytest.raises(UnsupportedError, match="must be a GPU"):
        symm_mem.import_fabric(handle, (8,), (1,), torch.float32, "cpu")
    with pytest.raises(InvalidArgumentError, match="give the bytes of export_fabric"):
        symm_mem.import_fabric("handle", (8,), (1,), torch.float32)
    with pytest.raises(InvalidArgumentError, match="95 bytes instead of 96"):
        symm_mem.import_fabric(handle[:-1], (8,), (1,), torch.float32)
    with pytest.raises(InvalidArgumentError, match="not a handle of"):
        symm_mem.import_fabric(bytes(96), (8,), (1,), torch.float32)
    theirs = symm_mem.import_fabric(handle, (8,), (1,), torch.float32)
    with pytest.raises((InvalidArgumentError, NotFoundError), match="symmetric"):
        symm_mem.rendezvous(theirs, name)
    return True


def test_what_does_not_fit_is_refused():
    if run_cuda_ranks(refuses, 1, "processes") == [False]:
        pytest.skip("a GPU with fabric handles")


@on_cuda
def says_why_not(rank, world_size, name):
    with pytest.raises(UnsupportedError, match="nvidia-imex"):
        symm_mem.export_fabric(symm_mem.empty(8, device="cuda"))


def test_a_host_without_the_service_says_so(monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_IMEX", "0")
    fake_torch_cuda.needs_cuda()
    if torch.cuda.is_available():
        pytest.skip("a real GPU does not do as it is told")
    run_cuda_ranks(says_why_not, 1, "processes")
