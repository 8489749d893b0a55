"""Training steps of DistributedDataParallel and of fully_shard: the backend `phalanx` beside gloo, in turns.

    python benchmarks/data_parallel.py [--hosts] [--programs N] [--steps N] [--json FILE]

Two ranks and a model of 25 million parameters. Both groups are in the same two processes, each with a model of its own
that starts from the same weights and sees the same data; the losses are compared step by step. With --hosts each rank
is on a host of its own, which are two network namespaces of this machine; making them needs root. With --programs other
programs compute on the same cores, as loaders of data do.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import beside_programs
import between_hosts
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import phalanx.collectives  # noqa: F401 - makes the backend known

WIDTH, LAYERS, BATCH = 2048, 6, 8  # 25.2 million parameters
BACKENDS = ("phalanx", "gloo")


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(1)
    layers = [part for _ in range(LAYERS) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers)


def wrap(kind: str, group: dist.ProcessGroup) -> torch.nn.Module:
    model = make_model()
    if kind == "ddp":
        return DistributedDataParallel(model, process_group=group)
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def stepper(model: torch.nn.Module) -> Callable[[int], float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int) -> float:
        data = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        x = torch.randn(BATCH, WIDTH, generator=data)
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


def run(rank: int, world_size: int, meeting: str, steps: int, output: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    groups = {"gloo": dist.group.WORLD, "phalanx": dist.new_group(backend="phalanx")}
    rows = []
    draw = random.Random(1)
    for kind in ("ddp", "fsdp"):
        steppers = {who: stepper(wrap(kind, groups[who])) for who in BACKENDS}
        times: dict[str, list[float]] = {who: [] for who in BACKENDS}
        differ = 0.0
        for number in range(steps + 3):
            losses = {}
            for who in draw.sample(BACKENDS, 2):
                dist.barrier()
                began = time.perf_counter()
                losses[who] = steppers[who](number)
                if number >= 3:
                    times[who].append(1000 * (time.perf_counter() - began))
            differ = max(differ, abs(losses["phalanx"] - losses["gloo"]))
        ms = {f"{who}_ms": median(each) for who, each in times.items()}
        ratio = median(a / b for a, b in zip(times["phalanx"], times["gloo"], strict=True))
        rows.append({"kind": kind, **ms, "phalanx_over_gloo": ratio, "largest_difference_of_losses": differ})
    if rank == 0:
        for row in rows:
            print(
                "{kind:6} phalanx {phalanx_ms:8.1f} ms   gloo {gloo_ms:8.1f} ms   ratio {phalanx_over_gloo:.2f}   "
                "largest difference of losses {largest_difference_of_losses:g}".format(**row)
            )
        if output:
            about = {"ranks": world_size, "hosts": 2 if meeting.startswith("tcp") else 1, "cores": os.cpu_count()}
            about |= {"parameters": LAYERS * WIDTH * (WIDTH + 1), "batch": BATCH, "steps": steps}
            Path(output).write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


def on_two_hosts(options: argparse.Namespace) -> None:
    with between_hosts.Hosts() as hosts:
        words = [os.path.abspath(__file__), "--meeting", f"tcp://{hosts.addresses[0]}:{random.randrange(20000, 30000)}"]
        words += ["--steps", str(options.steps), "--json", options.json and os.path.abspath(options.json)]
        commands = [
            hosts.inside(rank, [sys.executable, *words, "--rank", str(rank)], hosts.cores[rank]) for rank in range(2)
        ]
        print(between_hosts.run_all(commands, {"GLOO_SOCKET_IFNAME": between_hosts.CARD})[0], end="")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", default="")
    parser.add_argument("--hosts", action="store_true")
    parser.add_argument("--programs", type=int, default=0)
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)  # of a process that --hosts starts
    parser.add_argument("--meeting", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank >= 0:
        run(options.rank, 2, options.meeting, options.steps, options.json)
    elif options.hosts:
        on_two_hosts(options)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with tempfile.TemporaryDirectory() as folder, beside_programs.programs_that_compute(options.programs):
            arguments = (2, f"file://{folder}/store", options.steps, options.json)
            torch.multiprocessing.spawn(run, args=arguments, nprocs=2)


if __name__ == "__main__":
    main()
