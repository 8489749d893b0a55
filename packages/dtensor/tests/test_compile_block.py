"""A tensor-parallel transformer block, compiled: one graph, forward and backward, for all batch sizes."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from phalanx.dtensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from phalanx.dtensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from ranks import run_ranks

WIDTH, HEADS, LENGTH = 16, 4, 6


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        batch, length, _ = x.shape
        # -1: as many heads as this rank has
        q, k, v = (f(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.mlp = Attention(), MLP()
        self.double()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


# ---- four ways to spread it ------------------------------------------------------------------------------------------


class ByHand(nn.Module):
    """Parameters by distribute_module, one DTensor through the whole block: every move is chosen by cost."""

    def __init__(self, mesh, placements):
        super().__init__()
        self.block, self.mesh, self.placements = Block(), mesh, placements
        distribute_module(self.block, mesh, self.part)

    @staticmethod
    def part(name, module, mesh):
        if isinstance(module, nn.Linear):
            by_columns = name.rpartition(".")[2] in ("q", "k", "v", "up")
            weight, bias = (Shard(0), Shard(0)) if by_columns else (Shard(1), Replicate())
            module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [weight]))
            module.bias = nn.Parameter(distribute_tensor(module.bias.detach(), mesh, [bias]))

    def forward(self, x):
        made = DTensor.from_local(x, self.mesh, self.placements)
        return self.block(made).redistribute(placements=self.placements).to_local()


def by_styles(mesh):
    return parallelize_module(
        Block(),
        mesh,
        {
            "attention.[qkv]": ColwiseParallel(),
            "attention.o": RowwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(),
        },
    )


def on_sequences(mesh):
    gathered = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    return parallelize_module(
        Block(),
        mesh,
        {
            "norm[12]": SequenceParallel(),
            "attention": gathered,
            "attention.[qkv]": ColwiseParallel(),
            "attention.o": RowwiseParallel(output_layouts=Shard(1)),
            "mlp": gathered,
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        },
    )


WAYS = {
    "by hand": (lambda mesh: ByHand(mesh, [Replicate()]), False),
    "by hand, on sequences": (lambda mesh: ByHand(mesh, [Shard(1)]), True),
    "styles": (by_styles, False),
    "styles, on sequences": (on_sequences, True),
}


def gradients(module):
    """The whole gradients of all parameters, by name."""
    found = {}
    for name, parameter in module.named_parameters():
        grad = parameter.grad
        found[name.removeprefix("block.")] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


def trained(rank, size, way, backend, dynamic, batches, graphs):
    counters = torch._dynamo.utils.counters
    counters.clear()
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (size,))
    reference, (make, in_pieces) = Block(), WAYS[way]
    module = make(mesh)
    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=dynamic)
    for batch in batches:
        x = torch.randn(batch, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(batch))
        mine = x.chunk(size, 1)[rank] if in_pieces else x
        whole, mine = x.clone().requires_grad_(), mine.clone().requires_grad_()
        reference.zero_grad()
        module.zero_grad()
        wanted = reference(whole)
        wanted.sin().sum().backward()
        result = compiled(mine)
        result.sin().sum().backward()
        result = result.to_local() if isinstance(result, DTensor) else result
        torch.testing.assert_close(result, wanted.chunk(size, 1)[rank] if in_pieces else wanted)
        torch.testing.assert_close(mine.grad, whole.grad.chunk(size, 1)[rank] if in_pieces else whole.grad)
        grads, wanted_grads = gradients(module), gradients(reference)
        assert grads.keys() == wanted_grads.keys()
        for name, wanted_grad in wanted_grads.items():
            torch.testing.assert_close(grads[name], wanted_grad, msg=lambda text, name=name: f"{name}: {text}")
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["by hand", "styles, on sequences"])
def test_one_graph_serves_a_block_for_all_batch_sizes(name):
    run_ranks(trained, 2, name, "aot_eager", True, (4, 6, 5), 1, start_torch=True, timeout=280)


@pytest.mark.parametrize("name", [pytest.param("by hand, on sequences", marks=pytest.mark.slow), "styles"])
def test_a_block_becomes_dynamic_where_it_has_to(name):
    # The first size alone, then one graph for all.
    run_ranks(trained, 2, name, "eager", None, (4, 6, 5), 2, start_torch=True, timeout=280)


@pytest.mark.thorough
def test_inductor_compiles_a_block(tmp_path):
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    run_ranks(trained, 2, "styles", "inductor", True, (4, 7), 1, start_torch=True, timeout=400, env=env)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if WAYS[name][1] else []) for name in WAYS]
)
def test_a_block_on_one_rank_is_the_block(name):
    run_ranks(trained, 1, name, "aot_eager", False, (4,), 1, start_torch=True, timeout=280)
