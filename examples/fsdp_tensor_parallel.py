"""Four ranks train a small transformer: FSDP2 over tensor and sequence parallelism, with a loss on sharded logits.

The mesh is 2 x 2. Losses and weights are those of one process. Run by torchrun it needs --nproc-per-node 4.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.run import main as torchrun
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from phalanx.dtensor import DTensor, Replicate, Shard
from phalanx.dtensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

WORDS, WIDTH, HEAD, LENGTH, BATCH = 64, 32, 8, 16, 4


# [model]
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(gelu(self.up(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.mlp_norm, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Model(nn.Module):
    """An ordinary model: nothing in it knows of ranks, but for a number of heads that it does not fix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


# [model end]
# [plan]
GATHERED = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
PLAN = {
    # After the embedding each rank has a part of every sequence.
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "blocks.*.*_norm": SequenceParallel(),
    "blocks.*.attention": GATHERED,  # once for q, k and v
    "blocks.*.attention.[qkv]": ColwiseParallel(),
    "blocks.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "blocks.*.mlp": GATHERED,
    "blocks.*.mlp.up": ColwiseParallel(),
    "blocks.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    # The logits stay sharded on the words.
    "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
}
# [plan end]


def train(model: nn.Module, part: slice) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(3):
        text = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))[part]
        # [loss]
        with loss_parallel():  # the logits are never gathered
            logits = model(text[:, :-1])
            loss = cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            loss.backward()
        # [loss end]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    dist.init_process_group("phalanx")
    # [mesh]
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)  # the same first weights on every rank
    model = Model()
    parallelize_module(model, mesh["tp"], PLAN)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    # [mesh end]
    losses = torch.tensor(train(model, slice(mesh.get_local_rank("dp"), None, 2)))
    dist.all_reduce(losses, dist.ReduceOp.AVG, mesh.get_group("dp"))
    torch.manual_seed(0)
    alone = Model()
    expected = train(alone, slice(None))
    torch.testing.assert_close(losses, torch.tensor(expected), rtol=1e-4, atol=1e-4)
    for shard, whole in zip(model.parameters(), alone.parameters(), strict=True):
        assert isinstance(shard, DTensor)
        torch.testing.assert_close(shard.full_tensor(), whole, rtol=1e-3, atol=1e-4)
    if dist.get_rank() == 0:
        print(f"losses {losses.tolist()}, one process {expected}; the weights agree")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:  # started without torchrun: start it
        torchrun(["--standalone", "--nproc-per-node=4", __file__])
