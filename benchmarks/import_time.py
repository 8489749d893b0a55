"""Measures the time of importing each package on top of `import torch, torch.distributed`.

    python benchmarks/import_time.py --rounds 11 --json benchmarks/results/2026-01-31-import-time.json

Each measurement is a fresh interpreter. The packages take turns, because a machine may change its speed for seconds at
a time. A first round, which compiles files and fills caches of the system, does not count. The time of the processor is
shown, too, since it depends less on what else the machine does, and how much of it is garbage collection: torch leaves
so many objects that a single full collection takes some 40 ms, and an import may bring on two.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

GOALS = {"phalanx.collectives": 0.1, "phalanx.symm_mem": 0.2, "phalanx.dtensor": 0.5}  # seconds
OTHERS = ["phalanx.inductor_plugin", "torch.distributed.tensor", "torch._dynamo"]  # to compare with; without a goal
COLUMNS = ("wall_s", "cpu_s", "gc_s")
PROGRAM = """
import gc, importlib, sys, time, torch, torch.distributed
collecting = 0.0
def collects(phase, info):
    global collecting
    collecting += time.process_time() * (1 if phase == "stop" else -1)
gc.callbacks.append(collects)
wall, cpu = time.perf_counter(), time.process_time()
importlib.import_module(sys.argv[1])
print(time.perf_counter() - wall, time.process_time() - cpu, collecting)
"""


def measure(module: str) -> list[float]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", PROGRAM, module]
    return [*map(float, subprocess.run(command, env=environment, check=True, capture_output=True).stdout.split())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    times: dict[str, list[list[float]]] = {module: [] for module in [*GOALS, *OTHERS]}
    load = os.getloadavg()[0]
    for module in times:
        measure(module)
    for _ in range(options.rounds):
        for module, measured in times.items():
            measured.append(measure(module))
    rows = []
    print(f"{'':26}" + "".join(f"{name:>9}" for name in (*COLUMNS, "goal_s")))
    for module, measured in times.items():
        medians = [round(statistics.median(column), 4) for column in zip(*measured, strict=True)]
        rows.append({"module": module, **dict(zip(COLUMNS, medians, strict=True)), "goal_s": GOALS.get(module)})
        print(f"{module:26}" + "".join(f"{value:9.3f}" for value in medians) + f"{GOALS.get(module, ''):>9}")
    if options.json:
        import torch

        about = {"torch": torch.__version__, "cores": os.cpu_count(), "load": load, "rounds": options.rounds}
        options.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
