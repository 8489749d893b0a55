"""A collective as a kernel in Triton: an all_reduce in which each program adds up a piece of the blocks of all ranks.

Symmetric memory is in host memory, so this runs in Triton's interpreter. It needs Triton.
"""

import os
import sys
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported
try:
    import triton
    import triton.language as tl
except ImportError:
    print("this example needs Triton (pip install triton)")
    sys.exit()

import torch
import torch.distributed as dist
from torch.distributed.run import main as torchrun

from phalanx import symm_mem
from phalanx.symm_mem.triton import phx_team_at, phx_team_barrier, team_of

NUMEL, BLOCK = 5000, 1024


# [kernel]
@triton.jit
def all_reduce(team, out, numel, status, timeout_ns, block: tl.constexpr):  # type: ignore[no-untyped-def]
    channel = tl.program_id(0)  # programs meet those of the same number on the other ranks
    late = phx_team_barrier(team, channel, timeout_ns)  # everybody's input is there
    if late == 0:
        at = channel * block + tl.arange(0, block)
        total = tl.full((block,), 0, tl.float32)
        for rank in range(team.group_size):  # in the same order on all ranks, so the sums are the same to the bit
            theirs = phx_team_at(team, rank, 0, tl.float32)
            total += tl.load(theirs + at, mask=at < numel, other=0)
        tl.store(out + at, total, mask=at < numel)
        late = phx_team_barrier(team, channel, timeout_ns)  # nobody reads any more: the input may change
    if late != 0:
        tl.store(status, late)


# [kernel end]


# [call]
def reduced(handle: symm_mem.SymmetricMemory, x: torch.Tensor, timeout_ns: int = 60 * 10**9) -> torch.Tensor:
    out = torch.empty(x.shape, device=x.device)
    status = torch.zeros(1, dtype=torch.int32, device=x.device)
    grid = (triton.cdiv(x.numel(), BLOCK),)  # at most handle.signal_channels programs, all of which run at a time
    all_reduce[grid](team_of(handle), out, x.numel(), status, timeout_ns, BLOCK)
    late = int(status)
    if late != 0:
        raise RuntimeError(f"rank {late - 1} is late" if late > 0 else "the group has failed")
    return out


# [call end]


def main() -> None:
    store, rank, size = next(dist.rendezvous("env://"))
    symm_mem.set_group_info("triton", rank, size, store)
    x = symm_mem.empty(NUMEL)
    handle = symm_mem.rendezvous(x, "triton")
    for turn in range(3):
        x.copy_(torch.arange(NUMEL) + 100 * turn + rank)
        expected: Any = torch.arange(NUMEL) * size + 100.0 * turn * size + sum(range(size))
        torch.testing.assert_close(reduced(handle, x), expected, rtol=0, atol=0)
    if rank == 0:
        print(f"{size} ranks have added up {NUMEL} numbers in Triton's interpreter")
    handle.barrier()  # a rank that leaves ends the group for the others


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:  # started without torchrun: start it
        torchrun(["--standalone", "--nproc-per-node=2", __file__])
