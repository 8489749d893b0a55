"""A tensor-parallel block, forward and backward: our styles beside the block written by hand and torch's DTensor.

    python benchmarks/tensor_parallel.py [--rounds N] [--sequence] [--profile] [--json FILE]

The same weights and data in every variant, in turns within the same processes; outputs and gradients are compared
first.

- by hand: plain tensors, one autograd function before the column-wise and one after the row-wise layers, over
  phalanx.collectives;
- phalanx: phalanx.dtensor.parallel;
- torch/phalanx and torch/gloo: torch.distributed.tensor.parallel, over the backend `phalanx` and over gloo.

Two sizes: width 64 on a mesh of one rank, where nothing is sent and all of the time is that of the layers above; and
width 512 on two ranks. With --sequence the norms work on pieces of the sequence (sequence parallel).
"""

import argparse
import copy
import cProfile
import json
import os
import pstats
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as theirs
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.nn import functional

import phalanx.collectives as pc
import phalanx.dtensor.parallel as ours

BATCH = 2
SIZES = ({"ranks": 1, "width": 64, "length": 32}, {"ranks": 2, "width": 512, "length": 128})
HEAD = 16  # features of a head
VARIANTS = ("by hand", "phalanx", "torch/phalanx", "torch/gloo")


class Block(nn.Module):
    """Attention and an MLP, each after a norm. Written for the sizes that come out of the projections."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self.attend(self.norm1(x)))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


# ---- by hand ---------------------------------------------------------------------------------------------------------


class Spread(torch.autograd.Function):
    """Before column-wise layers: the same for all, and the gradients are added up (or gathered, and scattered)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, sequence: bool) -> torch.Tensor:
        ctx.given = group, sequence
        return pc.wait_tensor(pc.all_gather_tensor(x, 1, group)) if sequence else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        group, sequence = ctx.given
        if sequence:
            return pc.wait_tensor(pc.reduce_scatter_tensor(grads[0], "sum", 1, group)), None, None
        return pc.wait_tensor(pc.all_reduce(grads[0], "sum", group)), None, None


class Join(torch.autograd.Function):
    """After row-wise layers: the parts are added up (or scattered, and the gradient gathered)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, sequence: bool) -> torch.Tensor:
        ctx.given = group, sequence
        if sequence:
            return pc.wait_tensor(pc.reduce_scatter_tensor(x, "sum", 1, group))
        return pc.wait_tensor(pc.all_reduce(x, "sum", group))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        group, sequence = ctx.given
        return pc.wait_tensor(pc.all_gather_tensor(grads[0], 1, group)) if sequence else grads[0], None, None


class ByHand(Block):
    """The block with this rank's part of each weight."""

    def __init__(self, whole: Block, width: int, group: Any, sequence: bool) -> None:
        super().__init__(width)
        self.load_state_dict(whole.state_dict())
        rank, count = dist.get_rank(group), dist.get_world_size(group)
        self.given = group, sequence
        for name, part in self.named_children():
            if not isinstance(part, nn.Linear):
                continue
            dim = 1 if name in ("out", "down") else 0
            part.weight = nn.Parameter(part.weight.detach().chunk(count, dim)[rank].clone())
            if dim == 0:
                part.bias = nn.Parameter(part.bias.detach().chunk(count)[rank].clone())

    def _row(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        group, sequence = self.given
        if dist.get_world_size(group) == 1:
            return layer(x)
        return Join.apply(functional.linear(x, layer.weight), group, sequence) + layer.bias

    def _spread(self, x: torch.Tensor) -> torch.Tensor:
        group, sequence = self.given
        return x if dist.get_world_size(group) == 1 else Spread.apply(x, group, sequence)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._row(self.out, self.attend(self._spread(self.norm1(x))))
        return x + self._row(self.down, functional.gelu(self.up(self._spread(self.norm2(x)))))


# ---- with styles -----------------------------------------------------------------------------------------------------


def plan(styles: Any, sequence: bool) -> dict[str, Any]:
    cut = {"input_layouts": Shard(1)} if sequence else {}
    back = {"output_layouts": Shard(1)} if sequence else {}
    # fnmatch patterns: q, k, v and up; out and down.
    found = {"[qkvu]*": styles.ColwiseParallel(**cut), "out": styles.RowwiseParallel(**back)}
    found["down"] = styles.RowwiseParallel(**back)
    if sequence:
        found["norm?"] = styles.SequenceParallel(use_local_output=True)
    return found


def variants(width: int, sequence: bool, groups: dict[str, Any]) -> dict[str, nn.Module]:
    torch.manual_seed(1)
    whole = Block(width)
    meshes = {name: DeviceMesh.from_group(group, "cpu") for name, group in groups.items()}
    return {
        "by hand": ByHand(whole, width, groups["gloo"], sequence),
        "phalanx": ours.parallelize_module(copy.deepcopy(whole), meshes["gloo"], plan(ours, sequence)),
        "torch/phalanx": theirs.parallelize_module(copy.deepcopy(whole), meshes["phalanx"], plan(theirs, sequence)),
        "torch/gloo": theirs.parallelize_module(copy.deepcopy(whole), meshes["gloo"], plan(theirs, sequence)),
    }


def stepper(model: nn.Module, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        x.grad = None
        y = model(x)
        y.backward(x.detach())
        return y

    return step


def largest_difference(
    models: dict[str, nn.Module], steps: dict[str, Callable[[], torch.Tensor]], x: torch.Tensor
) -> float:
    """Of outputs, input gradients and weight gradients from those of the block by hand, relative to the largest."""
    seen: dict[str, list[torch.Tensor]] = {}
    for who, step in steps.items():
        y = step()
        values = [y.detach(), x.grad]
        for name, parameter in models[who].named_parameters():
            # With --sequence each rank has a term of these, and by hand nobody has added them up yet.
            if not name.startswith("norm") and name not in ("out.bias", "down.bias"):
                grad: Any = parameter.grad
                values.append(grad.to_local() if hasattr(grad, "to_local") else grad)
        seen[who] = [value.clone() for value in values]
    worst = 0.0
    for values in seen.values():
        for one, model in zip(values, seen["by hand"], strict=True):
            if one.shape == model.shape:
                worst = max(worst, float((one - model).abs().max() / model.abs().max().clamp(min=1e-3)))
    return worst


def run(rank: int, size: dict[str, int], path: str, options: argparse.Namespace, output: str) -> None:
    torch.set_num_threads(1)
    ranks, width = size["ranks"], size["width"]
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=ranks)
    groups = {"gloo": dist.group.WORLD, "phalanx": dist.new_group(backend="phalanx")}
    models = variants(width, options.sequence, groups)
    torch.manual_seed(2)
    x = torch.randn(BATCH, size["length"], width)
    x = x.chunk(ranks, 1)[rank].clone() if options.sequence else x
    x.requires_grad_()
    steps = {who: stepper(model, x) for who, model in models.items()}
    differ = largest_difference(models, steps, x)
    for who in VARIANTS:
        for _ in range(5):
            steps[who]()
    times: dict[str, list[float]] = {who: [] for who in VARIANTS}
    draw = random.Random(1)
    for _ in range(options.rounds):
        for who in draw.sample(VARIANTS, len(VARIANTS)):
            pc.barrier()
            began = time.perf_counter()
            steps[who]()
            times[who].append(1000 * (time.perf_counter() - began))
    row: dict[str, Any] = {**size, "sequence_parallel": options.sequence, "largest_relative_difference": differ}
    for who in VARIANTS:
        name = who.replace("/", "_over_").replace(" ", "_")
        row[f"{name}_ms"] = median(times[who])
        row[f"{name}_over_by_hand"] = median(a / b for a, b in zip(times[who], times["by hand"], strict=True))
    if options.profile and rank == 0 and ranks == 1:
        profile(steps["phalanx"])
    if rank == 0:
        Path(output).write_text(json.dumps(row))
    dist.destroy_process_group()


def profile(step: Callable[[], Any], count: int = 200) -> None:
    watch = cProfile.Profile()
    watch.enable()
    for _ in range(count):
        step()
    watch.disable()
    pstats.Stats(watch).sort_stats("tottime").print_stats(35)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--sequence", action="store_true")
    parser.add_argument("--profile", action="store_true", help="where the time of width 64 goes, after the measurement")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rows = []
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            output = os.path.join(folder, "row")
            arguments = (size, os.path.join(folder, "store"), options, output)
            torch.multiprocessing.spawn(run, args=arguments, nprocs=size["ranks"])
            rows.append(json.loads(Path(output).read_text()))
        row = rows[-1]
        differ = row["largest_relative_difference"]
        print(f"width {row['width']}, ranks {row['ranks']}, largest relative difference {differ:.1e}")
        for who in VARIANTS:
            name = who.replace("/", "_over_").replace(" ", "_")
            print(f"  {who:14} {row[f'{name}_ms']:8.2f} ms   {row[f'{name}_over_by_hand']:.2f} x by hand")
    if options.json:
        about = {"batch": BATCH, "rounds": options.rounds, "cores": os.cpu_count(), "torch": torch.__version__}
        Path(options.json).write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
