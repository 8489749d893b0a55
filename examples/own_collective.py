"""A collective written by hand three times: in Python with signals, in C++, and in numba where it is installed.

All are an all_gather around a ring. See own_collective.cpp and own_collective_numba.py. Run it as it is, or with
torchrun --nproc-per-node=3. It needs a C++ compiler.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.run import main as torchrun

from phalanx import symm_mem

SOURCE = Path(__file__).with_name("own_collective.cpp")
NUMEL = 1 << 16


class Arguments(ctypes.Structure):
    """As `arguments` in own_collective.cpp."""

    _fields_ = [("bytes", ctypes.c_size_t), ("timeout_ns", ctypes.c_uint64)]


# [python]
def gather_in_python(handle: symm_mem.SymmetricMemory, x: torch.Tensor) -> None:
    """x[rank] is this rank's part; afterwards x has the parts of all."""
    rank, size = handle.rank, handle.world_size
    right, left = (rank + 1) % size, (rank - 1) % size
    theirs = handle.get_buffer(right, x.shape, x.dtype)  # the tensor x of the right neighbour
    handle.barrier()  # nobody reads the result of the last time any more
    for step in range(size - 1):
        part = (rank - step) % size
        theirs[part].copy_(x[part])
        handle.put_signal(right)
        handle.wait_signal(left)


# [python end]


def compiled(folder: str) -> ctypes.CDLL:
    where = [sys.executable, "-m", "phalanx.core", "--include-dir"]
    include = subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip()
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise SystemExit("this example needs a C++ compiler (c++, g++ or clang++)")
    library = os.path.join(folder, f"own_collective.{os.getpid()}.so")
    flags = ["-std=c++17", "-O3", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-I", include]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", library], check=True)
    return ctypes.CDLL(library)


def run(folder: str) -> None:
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    # [allocate]
    x = symm_mem.empty(size, NUMEL)  # not collective
    handle = symm_mem.rendezvous(x, group)  # collective: now each rank can reach the x of all others
    # [allocate end]
    # [call]
    kernel = compiled(folder).ring_all_gather
    arguments = Arguments(NUMEL * x.element_size(), 60 * 10**9)

    def gather_in_cpp() -> None:
        status = kernel(ctypes.c_void_p(handle.team), ctypes.byref(arguments))
        if status != 0:
            raise RuntimeError(f"rank {status - 1} is late" if status > 0 else "the group has failed")

    # [call end]
    ways = {"Python": lambda: gather_in_python(handle, x), "C++": gather_in_cpp}
    try:
        from own_collective_numba import gather
    except ImportError:
        if rank == 0:
            print("numba is not installed: without it")
    else:
        ways["numba"] = lambda: gather(handle, x)

    for turn, gather_all in enumerate(ways.values()):
        for again in range(3):
            mine = torch.full((NUMEL,), 100.0 * turn + 10 * again + rank) + torch.arange(NUMEL) / NUMEL
            expected = [torch.empty(NUMEL) for _ in range(size)]
            dist.all_gather(expected, mine)
            handle.barrier()  # a peer may still be writing into x what was gathered before
            x.fill_(-1)[rank] = mine
            gather_all()
            torch.testing.assert_close(x, torch.stack(expected), rtol=0, atol=0)
    if rank == 0:
        print(f"{', '.join(ways)}: {size} ranks have gathered what torch gathers")
    handle.barrier()  # a rank that leaves ends the group for the others


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:  # started without torchrun: start it
        torchrun(["--standalone", "--nproc-per-node=3", __file__])
