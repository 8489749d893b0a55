"""Windows of two ranks: a put with its signal there and back, and puts and gets of 16 MiB, on one host and between two.

    .venv/bin/python benchmarks/windows.py [--rounds 15] [--hosts one,two] [--json FILE]

Needs torch 2.14, and UCX for two hosts. "two": both ranks are on this machine and count as ranks of two hosts, which
UCX joins by TCP over the loopback. Each rank has a core. `put` of 16 MiB ends with the signal of the other side that it
has come; `copy` is a copy within a process, measured in the same rounds. "get alone": the other side is in no call of
the core. A cell is the median of the rounds, and in brackets the fastest.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from list_forms import answer_of, pin, save

SMALL, LARGE = 1 << 10, 16 << 20
TURNS = 200  # of a small put there and back in a round


def rank_main(rank: int, ranks: int, path: str, hosts: str, rounds: int, answers: Any) -> None:
    """One rank, from its start to its end."""
    pin(rank, ranks)
    if hosts == "two":
        os.environ["PHALANX_HOST_ID"] = str(7 + rank)
        os.environ.setdefault("UCX_TLS", "tcp")
    from phalanx import symm_mem
    from phalanx.collectives import c10d

    c10d.register()
    dist.init_process_group("phalanx", init_method=f"file://{path}", rank=rank, world_size=ranks)
    window = dist._new_window(symm_mem.empty(LARGE, dtype=torch.uint8))
    small, large, got = (torch.ones(size, dtype=torch.uint8) for size in (SMALL, LARGE, LARGE))
    peer = 1 - rank

    def there_and_back() -> None:
        for _ in range(TURNS):
            if rank == 0:
                window.put(small, peer, 0, False)
                window.wait_signal(peer, False)
            else:
                window.wait_signal(peer, False)
                window.put(small, peer, 0, False)

    def put() -> None:
        if rank == 0:
            window.put(large, peer, 0, False)
            window.wait_signal(peer, False)
        else:
            window.wait_signal(peer, False)
            window.signal(peer, False)

    def get() -> None:  # the other rank waits meanwhile
        if rank == 0:
            c10d.window_get(window, peer, got)
            window.signal(peer, False)
        else:
            window.wait_signal(peer, False)

    def get_alone() -> None:  # the other rank is in no call of the core
        if rank == 0:
            c10d.window_get(window, peer, got)

    def copy() -> None:
        if rank == 0:
            got.copy_(large)

    bodies: dict[str, Callable[[], None]] = {"small": there_and_back, "put": put, "get": get, "copy": copy}
    times: dict[str, list[float]] = {name: [] for name in bodies}
    for turn in range(rounds + 2):
        for name, body in bodies.items():
            dist.barrier()
            begin = time.perf_counter_ns()
            body()
            if turn >= 2:
                times[name].append((time.perf_counter_ns() - begin) / 1e3)
    store = dist.FileStore(f"{path}.alone", 2)
    alone = []
    for turn in range(rounds):
        if rank == 0:
            begin = time.perf_counter_ns()
            get_alone()
            alone.append((time.perf_counter_ns() - begin) / 1e3)
            store.set(str(turn), b"")
        else:
            store.wait([str(turn)])
    dist.barrier()
    window.tensor_deregister()
    if rank == 0:
        times["get alone"] = alone
        row: dict[str, Any] = {"hosts": hosts}
        for name, spent in times.items():
            both = median(spent), min(spent)
            if name == "small":
                row["one way us"] = [each / TURNS / 2 for each in both]
            else:
                row[f"{name} GB/s"] = [LARGE / 1e3 / each for each in both]
        answers.put([row])
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--hosts", type=lambda text: text.split(","), default=["one", "two"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for hosts in options.hosts:
        rows += answer_of(rank_main, 2, hosts, options.rounds)
    names = [name for name in rows[0] if name != "hosts"]
    print("hosts" + "".join(f"{name:>18}" for name in names))
    for row in rows:
        cells = (f"{row[name][0]:.2f} ({row[name][1]:.2f})" for name in names)
        print(f"{row['hosts']:5}" + "".join(f"{cell:>18}" for cell in cells))
    save(rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
