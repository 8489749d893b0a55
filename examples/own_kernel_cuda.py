"""The kernel of own_kernel.c on GPUs: an all_reduce and RMS norm in one, compiled by nvcc, put on torch's stream.

Run it as it is (two ranks, which may share a GPU), or with torchrun --nproc-per-node=2. It needs torch with CUDA, a GPU
and nvcc, and says so where one of them is missing.
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
from own_kernel import COLUMNS, EPSILON, ROWS, SOURCE, Arguments
from torch.distributed.run import main as torchrun

from phalanx import symm_mem


def nvcc() -> str | None:
    """The compiler, in the PATH or where CUDA is usually installed."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=os.path.join(home, "bin"))


def missing() -> str | None:
    if not torch.cuda.is_available():
        return "a GPU (torch.cuda.is_available() is False)"
    return None if nvcc() else "nvcc"


def compile_for(capability: tuple[int, int], library: Path) -> None:
    where = [sys.executable, "-m", "phalanx.core", "--include-dir"]
    include = subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip()
    architecture = "{}{}".format(*capability)
    flags = ["-std=c++17", "-O3", "-x", "cu", "-Xcompiler", "-fPIC", "-shared", "-I", include]
    flags += ["-gencode", f"arch=compute_{architecture},code=sm_{architecture}"]
    subprocess.run([nvcc() or "nvcc", *flags, str(SOURCE), "-o", str(library)], check=True)


def run(folder: str) -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    torch.cuda.set_device(rank % torch.cuda.device_count())
    library = Path(folder, f"own_kernel_cuda.{os.getpid()}.so")
    compile_for(torch.cuda.get_device_capability(), library)
    # [call]
    kernel = ctypes.CDLL(str(library)).all_reduce_rms_norm
    kernel.argtypes = [ctypes.c_void_p] * 4
    memory = symm_mem.empty(2, ROWS, COLUMNS, device="cuda")  # the input, and the result
    handle = symm_mem.rendezvous(memory, group)
    x, out = memory[0], memory[1]
    weight = torch.linspace(0.5, 1.5, COLUMNS, device="cuda")
    nbytes = x.numel() * x.element_size()
    arguments = Arguments(ROWS, COLUMNS, 0, nbytes, weight.data_ptr(), EPSILON, 60 * 10**9)
    status = torch.zeros(1, dtype=torch.int32, device="cuda")

    def fused() -> torch.Tensor:
        stream = torch.cuda.current_stream().cuda_stream
        error = kernel(handle.team, ctypes.addressof(arguments), status.data_ptr(), stream)
        if error != 0:
            raise RuntimeError(f"the kernel could not be launched: CUDA error {error}")
        return out  # once the stream has come there

    # [call end]
    inputs = [
        torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(r)) for r in range(dist.get_world_size())
    ]
    x.copy_(inputs[rank])
    done = fused().cpu()  # waits for the stream
    late = status.item()
    if late != 0:
        raise RuntimeError(f"rank {late - 1} is late" if late > 0 else "the group has failed")
    total = torch.stack(inputs).sum(0)
    torch.testing.assert_close(done, torch.rms_norm(total, [COLUMNS], weight.cpu(), EPSILON))
    handle.barrier()  # nobody leaves while others read
    torch.cuda.synchronize()
    if rank == 0:
        print("all_reduce and rms_norm in one kernel on the GPU: as torch computes them")


def main() -> None:
    if needed := missing():
        print(f"skipped: this example needs {needed}")
        return
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        run(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:  # started without torchrun: start it
        torchrun(["--standalone", "--nproc-per-node=2", __file__])
