"""A device "cuda" for tests where there is no GPU: torch's tensors in the memory of the driver of core/tests/fake_cuda.

    import fake_torch_cuda

    def sums(rank, world_size):          # in a rank (see ranks.py), before anything of ours looks for a GPU
        fake_torch_cuda.load()
        x = torch.ones(4, device="cuda")     # in memory that the host cannot read where the GPU has it
        ...

    def test_ranks_agree_on_the_sum():
        fake_torch_cuda.needs_cuda()         # skips where there is neither a GPU nor a compiler
        assert run_ranks(sums, 2) == [3.0, 3.0]

Where torch has a GPU, load() does nothing, and the test runs on it.

Ops of torch run on the host, when their stream has come to them, and while it is captured go into the graph. Kernels of
Phalanx run on threads, when the stream comes to them. There are streams, events, graphs of one stream (and of those
that wait for it), two GPUs, and memory that is given away again in the order of streams, as by torch's allocator.
libcuda.so.1 is the driver from then on in this process, and PHALANX_CUDA_KERNELS names its kernels.

The libraries are compiled when they are first needed, and kept in the user's cache directory ($PHALANX_TEST_CACHE).
"""

import contextlib
import ctypes
import os

import pytest

torch = pytest.importorskip("torch")

from fake_torch_cuda import building, patches  # noqa: E402

# Then torch asks whether there is a GPU without starting its driver, which this process need not have.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

__all__ = ["alive", "empty_cache", "is_real", "load", "needs_cuda"]

_driver: ctypes.CDLL | None = None
_device: ctypes.CDLL | None = None


def is_real() -> bool:
    """Whether torch has a GPU of its own, so that nothing here is used."""
    return _device is None and torch.cuda.is_available()


def load() -> None:
    """Give this process the device, once. To be called before the core first looks for a GPU."""
    global _driver, _device
    if _device is not None or torch.cuda.is_available():
        return
    driver, device = building.libraries()
    # The core asks for libcuda.so.1, and gets this one, as it has that name.
    _driver = ctypes.CDLL(str(driver))
    os.environ["PHALANX_CUDA_KERNELS"] = str(driver)
    _device = ctypes.CDLL(str(device))
    patches.apply(_device)


def needs_cuda() -> None:
    """Skip the test where there is neither a GPU nor what it takes to build one."""
    if torch.cuda.is_available():
        return
    try:
        building.libraries()
    except building.CannotBuild as problem:
        pytest.skip(f"no GPU, and no way to build the device of the tests: {problem}")


def alive() -> int | None:
    """What the driver has handed out and not got back: memory, mappings, streams, ...; None on a real one."""
    return None if _driver is None else _driver.fake_cuda_alive()


def empty_cache() -> None:
    """Give memory that no tensor has back to the driver."""
    with contextlib.suppress(AttributeError):
        torch.cuda.empty_cache()
