"""A collective written by hand in C: a fused all_reduce and RMS norm on symmetric memory. See own_kernel.c.

Run it as it is, or with torchrun --nproc-per-node=2. It needs a C compiler.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.run import main as torchrun

import phalanx.collectives as pc
from phalanx import symm_mem

SOURCE = Path(__file__).with_name("own_kernel.c")
ROWS, COLUMNS, EPSILON = 256, 1024, 1e-6


class Arguments(ctypes.Structure):
    """As `arguments` in own_kernel.c."""

    _fields_ = [
        ("rows", ctypes.c_size_t),
        ("columns", ctypes.c_size_t),
        ("input", ctypes.c_size_t),
        ("output", ctypes.c_size_t),
        ("weight", ctypes.c_void_p),
        ("epsilon", ctypes.c_float),
        ("timeout_ns", ctypes.c_uint64),
    ]


def compiled(folder: str) -> ctypes.CDLL:
    where = [sys.executable, "-m", "phalanx.core", "--include-dir"]
    include = subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip()
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        raise SystemExit("this example needs a C compiler (cc, gcc or clang)")
    library = os.path.join(folder, f"own_kernel.{os.getpid()}.so")
    flags = ["-std=gnu11", "-O3", "-march=native", "-fPIC", "-shared", "-I", include]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", library, "-lm"], check=True)
    return ctypes.CDLL(library)


def run(folder: str) -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    kernel = compiled(folder).all_reduce_rms_norm
    # [call]
    memory = symm_mem.empty(2, ROWS, COLUMNS)  # the input, and the result
    handle = symm_mem.rendezvous(memory, group)
    x, out = memory[0], memory[1]
    weight = torch.linspace(0.5, 1.5, COLUMNS)
    nbytes = x.numel() * x.element_size()
    arguments = Arguments(ROWS, COLUMNS, 0, nbytes, weight.data_ptr(), EPSILON, 60 * 10**9)

    def fused() -> torch.Tensor:
        status = kernel(ctypes.c_void_p(handle.team), ctypes.byref(arguments))
        if status != 0:
            raise RuntimeError(f"rank {status - 1} is late" if status > 0 else "the group has failed")
        return out

    # [call end]
    x.copy_(torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(rank)))

    def one_by_one() -> torch.Tensor:
        return torch.rms_norm(pc.all_reduce(x, "sum", group), [COLUMNS], weight, EPSILON)

    expected = one_by_one()
    torch.testing.assert_close(fused(), expected)
    took = {}
    for function in (one_by_one, fused, one_by_one, fused):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(50):
            function()
        took[function.__name__] = (time.perf_counter() - began) / 50 * 1e6
    if rank == 0:
        print(f"all_reduce, then rms_norm: {took['one_by_one']:.0f} us; in one kernel: {took['fused']:.0f} us")


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
        torchrun(["--standalone", "--nproc-per-node=2", __file__])
