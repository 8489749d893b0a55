"""Two ranks train one MLP whose activations are symmetric memory: torch's own ops allocate them there.

The partial results are summed where they are, and each rank reads the other's hidden units without a message. Losses
are those of one process. The first run on a host compiles for a quarter of a minute; it needs a C++ compiler.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.run import main as torchrun
from torch.nn.functional import mse_loss, relu

from phalanx import symm_mem


# [sum]
class SumOverRanks(torch.autograd.Function):
    """The sum of the ranks' partial results, in place. Each rank has the gradient of the sum already."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group_name: str) -> torch.Tensor:
        ctx.mark_dirty(partial)
        torch.ops.phalanx.two_shot_all_reduce_(partial, "sum", group_name)
        return partial

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


# [sum end]


def train(rank: int, world_size: int, group_name: str) -> None:
    torch.manual_seed(0)  # the same numbers on every rank
    x, target = torch.randn(256, 64), torch.randn(256, 64)
    whole_up, whole_down = torch.randn(512, 64) / 8, torch.randn(64, 512) / 24
    up = whole_up.chunk(world_size, dim=0)[rank].clone().requires_grad_()
    down = whole_down.chunk(world_size, dim=1)[rank].clone().requires_grad_()
    whole = [whole_up.requires_grad_(), whole_down.requires_grad_()]
    ranks_optimizer = torch.optim.SGD([up, down], lr=0.5)
    whole_optimizer = torch.optim.SGD(whole, lr=0.5)

    # [step]
    pool = symm_mem.get_mem_pool()

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        with symm_mem.use_mem_pool(pool):
            hidden = relu(x @ up.T)  # ordinary ops, symmetric results
            output = SumOverRanks.apply(hidden @ down.T, group_name)
            loss = mse_loss(output, target)
            loss.backward()
        return hidden.detach(), loss.detach()

    # [step end]
    for number in range(5):
        ranks_optimizer.zero_grad()
        hidden, loss = step()
        ranks_optimizer.step()
        assert symm_mem.is_symm_mem_tensor(hidden)

        whole_optimizer.zero_grad()
        expected_hidden = relu(x @ whole_up.T)
        expected = mse_loss(expected_hidden @ whole_down.T, target)
        expected.backward()
        whole_optimizer.step()
        torch.testing.assert_close(loss, expected)

        # [peer]
        handle = symm_mem.rendezvous(hidden, group_name)
        handle.barrier()  # both have computed theirs
        theirs = [handle.get_remote_tensor(peer, hidden.shape, hidden.dtype) for peer in range(world_size)]
        everything = torch.cat(theirs, dim=1)
        handle.barrier()  # both have read: it may be freed
        # [peer end]
        torch.testing.assert_close(everything, expected_hidden)
        if rank == 0:
            print(f"step {number}: loss {loss.item():.6f}, one process {expected.item():.6f}")
    torch.testing.assert_close(up, whole_up.chunk(world_size, dim=0)[rank])
    layouts = [0] * world_size
    dist.all_gather_object(layouts, pool.layout())
    assert len(set(layouts)) == 1  # the ranks' tensors are at the same places
    if rank == 0:
        print(pool)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("phalanx")
    assert dist.group.WORLD is not None
    train(dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:  # started without torchrun: start it
        torchrun(["--standalone", "--nproc-per-node=2", __file__])
