"""An all_reduce through torch.distributed while other programs compute on the same cores.

    .venv/bin/python benchmarks/beside_programs.py [--programs 0,2] [--ranks 2,4] [--sizes 256,64k,1m] [--json FILE]
    .venv/bin/python benchmarks/beside_programs.py --library BEFORE/libphalanx.so.0 --library AFTER/libphalanx.so.0

The programs are loops of Python. The back ends (Phalanx, once for each library, and gloo) take turns of some seconds; a
row has the mean and the median of the calls, and is the median of the turns. The mean tells what a step of a program
pays: most calls fit between two slices of time of another program, and a few wait for a whole one.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from two_builds import size_of

LIBRARY = "PHALANX_LIBRARY"


def rank_main(rank: int, ranks: int, backend: str, nbytes: int, seconds: float, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(backend, rank=rank, world_size=ranks, store=dist.FileStore(store, ranks))
    data = torch.ones(nbytes // 4)
    for _ in range(20):
        dist.all_reduce(data)
    times: list[float] = []
    end = time.perf_counter() + seconds
    over = torch.zeros(1)
    while not over.item():
        for _ in range(20):
            begin = time.perf_counter()
            dist.all_reduce(data)
            times.append((time.perf_counter() - begin) * 1e6)
        over.fill_(time.perf_counter() > end)
        dist.all_reduce(over)
    if rank == 0:
        results.put((mean(times), median(times)))
    dist.destroy_process_group()


@contextlib.contextmanager
def programs_that_compute(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def turn(ranks: int, backend: str, nbytes: int, seconds: float) -> tuple[float, float]:
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (ranks, backend, nbytes, seconds, folder + "/store", results), nprocs=ranks)
    found: tuple[float, float] = results.get()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", default="0,2")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--sizes", default="256,64k,1m")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--library", action="append", default=[])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kinds = [("phalanx", library) for library in options.library or [os.environ.get(LIBRARY, "")]] + [("gloo", "")]
    rows = []
    for programs in map(int, options.programs.split(",")):
        with programs_that_compute(programs):
            for ranks in map(int, options.ranks.split(",")):
                for nbytes in map(size_of, options.sizes.split(",")):
                    found: dict[tuple[str, str], list[tuple[float, float]]] = {kind: [] for kind in kinds}
                    for _ in range(options.turns):
                        for backend, library in kinds:
                            os.environ[LIBRARY] = library
                            found[backend, library].append(turn(ranks, backend, nbytes, options.seconds))
                    for number, ((backend, _), turns) in enumerate(found.items()):
                        means, medians = zip(*turns, strict=True)
                        row: dict[str, Any] = {"programs": programs, "ranks": ranks, "bytes": nbytes}
                        row |= {"backend": backend, "library": number if backend == "phalanx" else None}
                        row |= {"mean_us": round(median(means), 1), "median_us": round(median(medians), 1)}
                        print(*(f"{key} {value}" for key, value in row.items()), sep="  ", flush=True)
                        rows.append(row)
    if options.json:
        about = {"torch": torch.__version__, "cores": os.cpu_count()}
        about |= {"turns": options.turns, "seconds": options.seconds}
        options.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
