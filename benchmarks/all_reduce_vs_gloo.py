"""all_reduce of float32, from Python, over Phalanx and over gloo: one run, in turns, on the same ranks.

    python benchmarks/all_reduce_vs_gloo.py [--json FILE] [--unpinned] [--ranks N] [--sizes BYTES,...] [--rounds N]

benchmarks/README.md says what is measured and how to read it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DEFAULT_SIZES = [1 << 10, 8 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
WARM_UP_ROUNDS = 3
GLOO, GLOO_UNPINNED = "gloo", "gloo, unpinned"


@dataclass(frozen=True)
class Job:
    """What the ranks are told."""

    ranks: int
    sizes: list[int]
    rounds: int
    unpinned: bool
    directory: str  # where the ranks meet; removed at the end
    allowed: list[int]  # cores of the parent
    cores: list[int]  # of each rank; empty: not pinned


def main() -> int:
    if len(sys.argv) == 4 and sys.argv[1] == "--rank":
        run_rank(int(sys.argv[2]), Job(**json.loads(sys.argv[3])))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="processes (default 2)")
    parser.add_argument("--sizes", type=read_sizes, default=DEFAULT_SIZES, metavar="BYTES,...", help="as 1k,64k,1m")
    parser.add_argument("--rounds", type=int, default=40, metavar="N", help="default 40; at least 30 to be quoted")
    parser.add_argument("--unpinned", action="store_true", help="a row for gloo whose threads may run on every core")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file as well")
    given = parser.parse_args()
    if given.ranks < 1 or given.rounds < 1:
        parser.error("--ranks and --rounds must be at least 1")
    allowed = sorted(os.sched_getaffinity(0))
    cores = allowed[: given.ranks] if len(allowed) >= given.ranks else []
    if not cores:
        print(f"{len(allowed)} cores for {given.ranks} ranks: they are not pinned", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="phalanx-benchmark-") as directory:
        job = Job(given.ranks, given.sizes, given.rounds, given.unpinned, directory, allowed, cores)
        if status := run_ranks(job):
            return status
        rows = json.loads(Path(directory, "rows").read_text())
    figures = {"benchmark": "all_reduce_vs_gloo", **about(job), "rows": rows}
    print_figures(figures)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def read_sizes(text: str) -> list[int]:
    """ "1k,64k,1m" in bytes."""
    units = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
    sizes = []
    for each in text.lower().split(","):
        sizes.append(int(each[:-1]) * units[each[-1]] if each[-1:] in units else int(each))
        if sizes[-1] < 4 or sizes[-1] % 4:
            raise argparse.ArgumentTypeError(f"{each} is no positive multiple of 4 bytes")
    return sizes


# ---- the parent ------------------------------------------------------------------------------------------------------


def run_ranks(job: Job) -> int:
    """Run the ranks; the first exit status that is not 0, after the others were ended."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    processes = []
    try:
        for rank in range(job.ranks):
            if job.cores:
                os.sched_setaffinity(0, {job.cores[rank]})  # inherited by all threads of the rank
            command = [sys.executable, __file__, "--rank", str(rank), json.dumps(asdict(job))]
            processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment))
        os.sched_setaffinity(0, job.allowed)
        running = list(processes)
        while running:
            for process in list(running):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
                    running.remove(process)
                    if process.returncode:
                        return process.returncode if process.returncode > 0 else 128 - process.returncode
        return 0
    finally:
        os.sched_setaffinity(0, job.allowed)
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()


def about(job: Job) -> dict[str, Any]:
    """Date, machine and versions."""
    from phalanx.core import ffi, lib

    with open("/proc/cpuinfo") as file:
        lines = dict(line.split(":", 1) for line in file if ":" in line)
    models = {key.strip(): value.strip() for key, value in lines.items()}
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": {
            "cpu": models.get("model name", platform.machine()),
            "cores": os.cpu_count(),
            "kernel": platform.release(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": importlib.metadata.version("torch"),
            "libphalanx": ffi.string(lib.phx_version()).decode(),
            "build": json.loads(ffi.string(lib.phx_build_info()).decode()),
        },
        "ranks": job.ranks,
        "pinned": bool(job.cores),
        "rounds": job.rounds,
    }


def print_figures(figures: dict[str, Any]) -> None:
    machine, versions = figures["machine"], figures["versions"]
    pinned = "pinned" if figures["pinned"] else "not pinned"
    print(
        f"all_reduce, float32, sum; {figures['ranks']} ranks, {pinned}; {figures['rounds']} rounds; {figures['date']}"
    )
    print(f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}")
    print(f"Python {versions['python']}, torch {versions['torch']}, libphalanx {versions['libphalanx']}")
    print(f"\n{'bytes':>10}  {'way':34} {'median us':>11} {'p10':>11} {'p90':>11}  gloo / this")
    last = None
    for row in figures["rows"]:
        size = f"{row['bytes']:,}" if row["bytes"] != last else ""
        times = " ".join(f"{row[key]:>11,.2f}" for key in ("median_us", "p10_us", "p90_us"))
        print(f"{size:>10}  {row['way']:34} {times}  {row['gloo_ratio']:>10.2f}x")
        last = row["bytes"]


# ---- a rank ----------------------------------------------------------------------------------------------------------


def run_rank(rank: int, job: Job) -> None:
    import torch
    import torch.distributed as dist

    from phalanx.core import FileStore, World, load_torch_ops

    torch.set_num_threads(1)
    # gloo's threads keep the cores that this thread has when the group is made.
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.directory}/torch",
        rank=rank,
        world_size=job.ranks,
        timeout=datetime.timedelta(minutes=5),
    )
    unpinned_group = None
    if job.unpinned:
        with on_cores(job.allowed):
            unpinned_group = dist.new_group()
    with World(rank, job.ranks, FileStore(f"{job.directory}/phalanx")) as world:
        group = world.create_group("benchmark", range(job.ranks))
        ops = load_torch_ops()
        ops.check(ops.lib.phxt_group_add(ops.lib.phxt_context(), b"benchmark", group.pointer))
        rows = []
        for size in job.sizes:
            rows += measure(size, job, rank, group, unpinned_group)
            if rank == 0:
                print(f"{size:,} bytes: done", file=sys.stderr)
        if rank == 0:
            Path(job.directory, "rows").write_text(json.dumps(rows))
        group.barrier()
        ops.check(ops.lib.phxt_group_remove(ops.lib.phxt_context(), b"benchmark"))
    dist.destroy_process_group()


def measure(size: int, job: Job, rank: int, group: Any, unpinned_group: Any) -> list[dict[str, Any]]:
    """Median, p10 and p90 of each way to all-reduce `size` bytes; the same on all ranks."""
    import torch
    import torch.distributed as dist

    count = size // 4
    # Small integers: their sums are exact. Both change in every round.
    source = input_of(rank, count)
    expected = torch.stack([input_of(each, count) for each in range(job.ranks)]).sum(0)
    buffer, output = torch.empty(count), torch.empty(count)
    ways = ways_of(buffer, output, group, unpinned_group, job)
    calls = max(1, min(50, (1 << 21) // size))  # in a round
    times_ns = torch.zeros(len(ways), job.rounds, calls, dtype=torch.float64)
    for number in range(-WARM_UP_ROUNDS, job.rounds):
        source.add_(1)
        expected.add_(job.ranks)
        for turn in range(len(ways)):
            way = (turn + number) % len(ways)  # nobody always comes after the same one
            name, call = ways[way]
            with on_cores(job.allowed) if name == GLOO_UNPINNED else contextlib.nullcontext():
                for index in range(calls):
                    buffer.copy_(source)
                    group.barrier()
                    started = time.perf_counter_ns()
                    result = call()
                    taken = time.perf_counter_ns() - started
                    times_ns[way, max(number, 0), index] = taken
            if not torch.equal(result, expected):
                raise RuntimeError(f"{name}: wrong result for {size} bytes in round {number}")
    dist.all_reduce(times_ns)  # a call's time is the mean over the ranks
    times_us = (times_ns / job.ranks / 1000).flatten(1)
    quantiles = torch.quantile(times_us, torch.tensor([0.5, 0.1, 0.9], dtype=torch.float64), dim=1)
    names = [name for name, _ in ways]
    gloo_us = quantiles[0, names.index(GLOO)].item()
    return [
        {
            "bytes": size,
            "way": name,
            "calls": job.rounds * calls,
            "median_us": round(quantiles[0, way].item(), 3),
            "p10_us": round(quantiles[1, way].item(), 3),
            "p90_us": round(quantiles[2, way].item(), 3),
            "gloo_ratio": round(gloo_us / quantiles[0, way].item(), 3),
        }
        for way, name in enumerate(names)
    ]


def input_of(rank: int, count: int) -> Any:
    """What a rank gives in round 0; the same wherever it is computed."""
    import torch

    return ((torch.arange(count) * 7 + rank * 31) % 61).to(torch.float32)


def ways_of(buffer: Any, output: Any, group: Any, unpinned_group: Any, job: Job) -> list[tuple[str, Callable[[], Any]]]:
    """Each way to all-reduce: its name, and a function that returns the tensor with the result."""
    import torch
    import torch.distributed as dist

    from phalanx.collectives import all_reduce, all_reduce_, wait_tensor
    from phalanx.core import ReduceOp, ffi, lib

    ops, world, count = torch.ops.phalanx, dist.group.WORLD, buffer.numel()
    given, taken = ffi.cast("void *", buffer.data_ptr()), ffi.cast("void *", output.data_ptr())
    pointer, float32, total = group.pointer, lib.PHX_F32, int(ReduceOp.SUM)

    def functional() -> Any:
        return wait_tensor(all_reduce(buffer, "sum", world))

    def functional_in_place() -> Any:
        return all_reduce_(buffer, "sum", world)

    def op() -> Any:
        return ops.wait_tensor(ops.all_reduce(buffer, "sum", "benchmark"))

    def op_in_place() -> Any:
        ops.all_reduce_(buffer, "sum", "benchmark")
        ops.wait_tensor(buffer)
        return buffer

    def core_method() -> Any:
        group.all_reduce(buffer.data_ptr(), output.data_ptr(), count, "float32")
        return output

    def c_call() -> Any:
        if lib.phx_all_reduce(pointer, given, taken, count, float32, total, ffi.NULL, ffi.NULL):
            raise RuntimeError(ffi.string(lib.phx_last_error()).decode())
        return output

    def gloo() -> Any:
        dist.all_reduce(buffer)
        return buffer

    def gloo_unpinned() -> Any:
        dist.all_reduce(buffer, group=unpinned_group)
        return buffer

    ways: list[tuple[str, Callable[[], Any]]] = [
        ("phalanx.collectives.all_reduce", functional),
        ("phalanx.collectives.all_reduce_", functional_in_place),
        ("torch.ops.phalanx.all_reduce", op),
        ("torch.ops.phalanx.all_reduce_", op_in_place),
        ("phalanx.core Group.all_reduce", core_method),
        ("phx_all_reduce (C, by cffi)", c_call),
        (GLOO, gloo),
    ]
    return [*ways, (GLOO_UNPINNED, gloo_unpinned)] if job.unpinned else ways


@contextlib.contextmanager
def on_cores(cores: list[int]) -> Iterator[None]:
    """Let this thread run on these cores, and then where it was."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


if __name__ == "__main__":
    sys.exit(main())
