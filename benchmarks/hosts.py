"""all_reduce of a group that spans two hosts of two ranks, by the core and by gloo.

    python benchmarks/hosts.py [--rounds N] [--json FILE]

The hosts are network namespaces joined by a pair of virtual cards, so it needs root. In each round every size is
measured with both, in turns drawn anew; every result is checked.
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import phalanx.collectives as pc

HOSTS, RANKS_OF_HOST = 2, 2
SIZES = [1 << 10, 64 << 10, 1 << 20, 16 << 20]
CALLS = {1 << 10: 20, 64 << 10: 20, 1 << 20: 5, 16 << 20: 1}


def by_phalanx(x: torch.Tensor) -> torch.Tensor:
    return pc.wait_tensor(pc.all_reduce(x, "sum", dist.group.WORLD))


def by_gloo(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x


def measure(rounds: int) -> dict[str, dict[int, list[float]]]:
    """Microseconds of one call, by who and size, of every round."""
    found: dict[str, dict[int, list[float]]] = {"phalanx": {}, "gloo": {}}
    functions = {"phalanx": by_phalanx, "gloo": by_gloo}
    draw = random.Random(1)  # the same order on all ranks
    for turn in range(rounds + 2):
        for nbytes in SIZES:
            for who in draw.sample(list(functions), 2):
                inputs = [torch.full((nbytes // 4,), float(dist.get_rank() + turn)) for _ in range(CALLS[nbytes])]
                dist.barrier()
                began = time.perf_counter()
                done = [functions[who](x) for x in inputs]
                took = (time.perf_counter() - began) / len(inputs) * 1e6
                wanted = float(sum(rank + turn for rank in range(dist.get_world_size())))
                assert all(bool((each == wanted).all()) for each in done)
                if turn >= 2:
                    found[who].setdefault(nbytes, []).append(took)
    return found


def run_rank(rounds: int, output: str) -> None:
    dist.init_process_group("gloo")
    core = pc.core_group(dist.group.WORLD)
    assert core is not None and core.hosts == HOSTS
    found = measure(rounds)
    rows = []
    for nbytes in SIZES:
        ours, gloos = median(found["phalanx"][nbytes]), median(found["gloo"][nbytes])
        rows.append({"bytes": nbytes, "phalanx_us": ours, "gloo_us": gloos, "gloo_over_phalanx": gloos / ours})
    if dist.get_rank() == 0:
        print(f"{'bytes':>10}{'phalanx us':>14}{'gloo us':>14}{'ratio':>8}")
        for row in rows:
            print("{bytes:>10}{phalanx_us:>14.1f}{gloo_us:>14.1f}{gloo_over_phalanx:>8.2f}".format(**row))
        if output:
            about = {"hosts": HOSTS, "ranks_of_a_host": RANKS_OF_HOST, "cores": os.cpu_count(), "rounds": rounds}
            Path(output).write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def launch(rounds: int, output: str) -> int:
    names = [f"phx-bench-{i}" for i in range(HOSTS)]
    started = []
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "phx0", "netns", names[0], "type", "veth", "peer", "name", "phx0", "netns", names[1])
        for i, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.213.8.{i + 1}/24", "dev", "phx0")
            ip("-n", name, "link", "set", "phx0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        for rank in range(HOSTS * RANKS_OF_HOST):
            told = {"RANK": str(rank), "WORLD_SIZE": str(HOSTS * RANKS_OF_HOST), "OMP_NUM_THREADS": "1"}
            told |= {"MASTER_ADDR": "10.213.8.1", "MASTER_PORT": "29518", "GLOO_SOCKET_IFNAME": "phx0"}
            command = [sys.executable, __file__, "--rounds", str(rounds), "--json", output, "--rank"]
            inside = ["ip", "netns", "exec", names[rank // RANKS_OF_HOST], *command]
            started.append(subprocess.Popen(inside, env={**os.environ, **told}))
        return max(abs(each.wait(600)) for each in started)
    finally:
        for each in started:
            each.kill()
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", default="")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(options.rounds, options.json)
        return 0
    return launch(options.rounds, options.json)


if __name__ == "__main__":
    sys.exit(main())
