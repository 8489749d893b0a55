"""A multi-layer perceptron split over two ranks: one all-reduce per block, and the same result as on one process."""

import os
import tempfile

# [block]
import torch
import torch.distributed as dist

import phalanx.collectives as pc


class ParallelMLP(torch.nn.Module):
    """relu(x W1^T) W2^T with the hidden units dealt to the ranks of `group`."""

    def __init__(self, up: torch.Tensor, down: torch.Tensor, group: dist.ProcessGroup) -> None:
        super().__init__()
        rank, size = group.rank(), group.size()
        self.up = torch.nn.Parameter(up.chunk(size, dim=0)[rank].clone())  # rows: hidden units
        self.down = torch.nn.Parameter(down.chunk(size, dim=1)[rank].clone())  # the columns that read them
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = torch.relu(x @ self.up.T) @ self.down.T
        return pc.all_reduce(part, "sum", self.group)


# [block end]


def run(rank: int, world_size: int, path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    # [check]
    torch.manual_seed(0)  # the same weights and input on every rank
    up, down, x = torch.randn(256, 64), torch.randn(64, 256), torch.randn(8, 64)
    block = ParallelMLP(up, down, dist.group.WORLD)
    with torch.no_grad():
        difference = (block(x) - torch.relu(x @ up.T) @ down.T).abs().max().item()
    print(f"rank {rank}: {block.up.shape[0]} of {up.shape[0]} hidden units; greatest difference {difference:.1e}")
    assert difference < 1e-3
    # [check end]
    dist.destroy_process_group()


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(run, args=(2, os.path.join(directory, "store")), nprocs=2)


if __name__ == "__main__":
    main()
