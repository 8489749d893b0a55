"""Training steps of fully_shard over tensor parallelism on 2 x 2 ranks: our DTensor beside torch's, in turns.

    python benchmarks/fsdp_over_tp.py [--steps N] [--json FILE]

Every variant is torch's fully_shard over each block and over the model; the blocks have parallel styles, and the norms
none. A step is forward, backward, clipping of gradients and AdamW. torch's own styles keep norms outside its mesh, and
its clip_grad_norm_ refuses parameters on two meshes, so each variant clips linear layers and norms on their own. All
are in the same four processes, start from the same weights and see the same data; the losses are compared step by step.
The processor time of a rank is shown, too: it says more than the clock where other programs run.

- torch/gloo: torch.distributed.tensor.parallel over gloo;
- ours/gloo: phalanx.dtensor.parallel over gloo;
- ours/phalanx: phalanx.dtensor.parallel over the backend `phalanx`.
"""

import argparse
import json
import os
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
from torch.distributed.fsdp import fully_shard

import phalanx.collectives  # noqa: F401 - makes the backend known
import phalanx.dtensor.parallel as ours

LAYERS, BATCH = 4, 64
WIDTHS = (64, 512)
VARIANTS = {"torch/gloo": (theirs, "gloo"), "ours/gloo": (ours, "gloo"), "ours/phalanx": (ours, "phalanx")}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return made


def make_model(width: int, styles: Any, mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(*[Block(width) for _ in range(LAYERS)])
    for block in model:
        styles.parallelize_module(block, mesh["tp"], {"up": styles.ColwiseParallel(), "down": styles.RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def stepper(model: nn.Module, width: int, data_rank: int) -> Callable[[int], float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    norms = [one for name, one in model.named_parameters() if ".norm." in name]
    linear = [one for name, one in model.named_parameters() if ".norm." not in name]

    def step(number: int) -> float:
        x = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(1000 * number + data_rank))
        optimizer.zero_grad()
        loss = (model(x) - x.flip(-1)).square().mean()
        loss.backward()
        for parameters in (linear, norms):
            nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return loss.item()

    return step


def run(rank: int, world_size: int, path: str, steps: int, output: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    names = ("dp", "tp")
    meshes = {
        backend: dist.init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=names, backend_override=dict.fromkeys(names, backend)
        )
        for backend in ("gloo", "phalanx")
    }
    rows = []
    draw = random.Random(1)
    for width in WIDTHS:
        steppers = {
            who: stepper(make_model(width, styles, meshes[backend]), width, rank // 2)
            for who, (styles, backend) in VARIANTS.items()
        }
        times: dict[str, list[float]] = {who: [] for who in VARIANTS}
        work: dict[str, list[float]] = {who: [] for who in VARIANTS}
        differ = 0.0
        for number in range(steps + 3):
            losses = {}
            for who in draw.sample(list(VARIANTS), len(VARIANTS)):
                dist.barrier()
                began, worked = time.perf_counter(), time.process_time()
                losses[who] = steppers[who](number)
                if number >= 3:
                    times[who].append(1000 * (time.perf_counter() - began))
                    work[who].append(1000 * (time.process_time() - worked))
            differ = max(differ, max(losses.values()) - min(losses.values()))
        first = times["torch/gloo"]
        rows.append(
            {
                "width": width,
                "ms": {who: median(each) for who, each in times.items()},
                "processor_ms_of_rank_0": {who: median(each) for who, each in work.items()},
                "over_torch": {
                    who: median(a / b for a, b in zip(each, first, strict=True)) for who, each in times.items()
                },
                "largest_difference_of_losses": differ,
            }
        )
    if rank == 0:
        for row in rows:
            for who, ms in row["ms"].items():
                busy, ratio = row["processor_ms_of_rank_0"][who], row["over_torch"][who]
                print(
                    f"width {row['width']:4} {who:13} {ms:8.1f} ms   over torch {ratio:.2f}   processor {busy:.1f} ms"
                )
            print(f"           largest difference of losses {row['largest_difference_of_losses']:g}")
        if output:
            about = {"ranks": world_size, "layers": LAYERS, "batch": BATCH, "steps": steps, "cores": os.cpu_count()}
            about |= {"load_average": os.getloadavg()[0], "torch": torch.__version__}
            Path(output).write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (4, os.path.join(folder, "store"), options.steps, options.json)
        torch.multiprocessing.spawn(run, args=arguments, nprocs=4)


if __name__ == "__main__":
    main()
