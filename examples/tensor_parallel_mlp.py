"""Two ranks train one MLP. Each has half of the hidden units; losses and weights are those of one process.

There is no code for the backward pass: the collectives are differentiable.
"""

import os

# [mlp]
import torch
import torch.distributed as dist
from torch.distributed.run import main as torchrun
from torch.nn.functional import mse_loss, relu

from phalanx.collectives import GroupLike, all_reduce


def parallel_mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, group: GroupLike) -> torch.Tensor:
    """relu(x up^T) down^T, where each rank has some rows of `up` and the columns of `down` that belong to them."""
    hidden = relu(x @ up.T)  # of this rank; nothing is sent
    return all_reduce(hidden @ down.T, "sum", group)  # waited for where it is used first


# [mlp end]
# [train]
def train(rank: int, world_size: int, group: GroupLike) -> None:
    torch.manual_seed(0)  # the same numbers on every rank
    x, target = torch.randn(32, 16), torch.randn(32, 16)
    whole_up, whole_down = torch.randn(64, 16) / 4, torch.randn(16, 64) / 8
    up = whole_up.chunk(world_size, dim=0)[rank].clone().requires_grad_()
    down = whole_down.chunk(world_size, dim=1)[rank].clone().requires_grad_()
    whole = [whole_up.requires_grad_(), whole_down.requires_grad_()]
    ranks_optimizer = torch.optim.SGD([up, down], lr=0.2)
    whole_optimizer = torch.optim.SGD(whole, lr=0.2)
    for step in range(5):
        ranks_optimizer.zero_grad()
        loss = mse_loss(parallel_mlp(x, up, down, group), target)
        # Every rank has this loss. The backward of all_reduce sums over the ranks, so each gives its share of it.
        (loss / world_size).backward()
        ranks_optimizer.step()

        whole_optimizer.zero_grad()
        expected = mse_loss(relu(x @ whole_up.T) @ whole_down.T, target)
        expected.backward()
        whole_optimizer.step()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.6f}, one process {expected.item():.6f}")
        torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(up, whole_up.chunk(world_size, dim=0)[rank])
    torch.testing.assert_close(down, whole_down.chunk(world_size, dim=1)[rank])


# [train end]


def main() -> None:
    dist.init_process_group("phalanx")
    train(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:  # started without torchrun: start it
        torchrun(["--standalone", "--nproc-per-node=2", __file__])
