"""What the reduction order `ranks` costs compared with `hosts`, in turns, on processes that count as several hosts.

    .venv/bin/python benchmarks/reduction_order.py [--hosts 0,0,1,1] [--sizes 1k,16k,64k,1m,16m] [--rounds 15]

Prints the medians of the time of one call with `hosts`, in microseconds, and of the ratios of the rounds: time with
`ranks` / time with `hosts`. The processes are on one machine, so what crosses goes through its loopback device.
"""

import argparse
import multiprocessing as mp
import os
import tempfile
import time
from pathlib import Path
from statistics import median

SUFFIXES = {"k": 1 << 10, "m": 1 << 20}
ORDERS = ("hosts", "ranks")


def size_of(text: str) -> int:
    return int(text[:-1]) * SUFFIXES[text[-1]] if text[-1] in SUFFIXES else int(text)


def measure(rank: int, hosts: list[str], store: str, sizes: list[int], rounds: int, out: "mp.Queue[object]") -> None:
    os.environ["PHALANX_HOST_ID"] = str(7 + int(hosts[rank]))
    import numpy as np

    from phalanx.core import FileStore, World

    n = len(hosts)
    with World(rank, n, FileStore(store)) as world:
        groups = [world.create_group(order, range(n), reduction_order=order) for order in ORDERS]
        for what in ("all_reduce", "reduce_scatter"):
            for size in sizes:
                count = size // 4 // n * n
                x = np.random.default_rng(rank).standard_normal(count).astype(np.float32)
                y = np.empty(count if what == "all_reduce" else count // n, np.float32)
                calls = max(1, min(20, (1 << 21) // size))
                times: dict[str, list[float]] = {order: [] for order in ORDERS}
                for turn in range(rounds + 1):
                    for order, group in list(zip(ORDERS, groups, strict=True))[:: 1 if turn % 2 else -1]:
                        group.barrier()
                        begin = time.perf_counter()
                        for _ in range(calls):
                            getattr(group, what)(x, y)
                        group.barrier()
                        if turn > 0:  # the first one warms up
                            times[order].append((time.perf_counter() - begin) / calls * 1e6)
                if rank == 0:
                    ratio = median(b / a for a, b in zip(*times.values(), strict=True))
                    out.put((what, size, median(times["hosts"]), ratio))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="0,0,1,1", help="the host of each rank")
    parser.add_argument("--sizes", default="1k,16k,64k,1m,16m", help="bytes of a rank's input")
    parser.add_argument("--rounds", type=int, default=15)
    wish = parser.parse_args()
    hosts, sizes = wish.hosts.split(","), [size_of(text) for text in wish.sizes.split(",")]
    spawn = mp.get_context("spawn")
    out: mp.Queue[object] = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        given = (hosts, str(Path(folder) / "store"), sizes, wish.rounds, out)
        ranks = [spawn.Process(target=measure, args=(rank, *given)) for rank in range(len(hosts))]
        for process in ranks:
            process.start()
        for _ in range(2 * len(sizes)):
            print("{:<15} {:>9} bytes  hosts {:>9.1f} us  ranks/hosts {:.2f}".format(*out.get(timeout=600)), flush=True)  # type: ignore[misc]
        for process in ranks:
            process.join()


if __name__ == "__main__":
    main()
