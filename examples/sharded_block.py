"""Two ranks train a transformer block whose weights are sharded: the same program as on one process, and the same
losses and weights.

Only weights are given placements, so activations follow from the ops: products of the attention merge batch and heads,
which moves q, k and v to shards of the batch. For the usual two all_reduces see tensor_parallel.py."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.run import main as torchrun
from torch.nn.functional import layer_norm, mse_loss, relu, softmax

from phalanx.dtensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from phalanx.dtensor.debug import CommDebugMode, visualize_sharding

WIDTH, HEADS = 16, 4


# [block]
class Block(torch.nn.Module):
    """An ordinary module: nothing in it knows of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        y = layer_norm(x, (WIDTH,))
        q, k, v = (
            each(y).view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        weights = softmax(q @ k.transpose(2, 3) / (WIDTH // HEADS) ** 0.5, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, WIDTH))
        update: torch.Tensor = self.down(relu(self.up(layer_norm(x, (WIDTH,)))))
        return x + update


# [block end]
# [shard]
# Which dim of a weight is cut: each rank has some of the heads and of the hidden units.
PLACEMENTS = {"query": Shard(0), "key": Shard(0), "value": Shard(0), "up": Shard(0), "out": Shard(1), "down": Shard(1)}


def shard_parameters(name: str, module: torch.nn.Module, mesh: DeviceMesh) -> None:
    if name in PLACEMENTS:
        for key, parameter in list(module.named_parameters()):
            sharded = distribute_tensor(parameter.detach(), mesh, [PLACEMENTS[name]])
            module.register_parameter(key, torch.nn.Parameter(sharded))


# [shard end]


def train(block: torch.nn.Module, x: torch.Tensor, target: torch.Tensor) -> list[float]:
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.01)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = mse_loss(block(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    dist.init_process_group("phalanx")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same numbers on every rank
    x, target = torch.randn(2, 8, WIDTH), torch.randn(2, 8, WIDTH)
    alone = Block()
    # [train]
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    block = Block()
    block.load_state_dict(alone.state_dict())
    distribute_module(block, mesh, shard_parameters)
    inputs = [DTensor.from_local(each, mesh, [Replicate()]) for each in (x, target)]
    losses = train(block, *inputs)
    # [train end]
    expected = train(alone, x, target)
    # [look]
    visualize_sharding(block.up.weight, header="up.weight")
    with CommDebugMode() as mode:
        block(inputs[0]).sum().backward()
    # [look end]
    if rank == 0:
        print(
            "\n".join(
                f"step {i}: loss {a:.6f}, one process {b:.6f}"
                for i, (a, b) in enumerate(zip(losses, expected, strict=True))
            )
        )
        print({str(op): count for op, count in mode.get_comm_counts().items()})
    torch.testing.assert_close(losses, expected)
    for mine, whole in zip(block.parameters(), alone.parameters(), strict=True):
        assert isinstance(mine, DTensor)
        torch.testing.assert_close(mine.full_tensor(), whole, rtol=1e-4, atol=1e-5)
    print(f"rank {rank}: the same weights as one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:  # started without torchrun: start it
        torchrun(["--standalone", "--nproc-per-node=2", __file__])
