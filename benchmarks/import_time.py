"""Measures the time of importing each package on top of `import torch, torch.distributed`.

    python benchmarks/import_time.py --rounds 11 --json benchmarks/results/2026-01-31-import-time.json

Each measurement is a fresh interpreter. The packages take turns, because a machine may change its speed for seconds at
a time. A first round, which compiles files and fills caches of the system, does not count.
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


def seconds(module: str) -> float:
    code = (
        "import torch, torch.distributed, importlib, time; began = time.perf_counter(); "
        f"importlib.import_module({module!r}); print(time.perf_counter() - began)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    times: dict[str, list[float]] = {module: [] for module in [*GOALS, *OTHERS]}
    load = os.getloadavg()[0]
    for module in times:
        seconds(module)
    for _ in range(options.rounds):
        for module, measured in times.items():
            measured.append(seconds(module))
    rows = [
        {
            "module": module,
            "goal_s": GOALS.get(module),
            "median_s": round(statistics.median(measured), 4),
            "min_s": round(min(measured), 4),
            "max_s": round(max(measured), 4),
        }
        for module, measured in times.items()
    ]
    for row in rows:
        goal = f"goal {row['goal_s']} s" if row["goal_s"] else ""
        print(f"{row['module']:26} {row['median_s']:7.3f} s  ({row['min_s']:.3f} to {row['max_s']:.3f})  {goal}")
    if options.json:
        import torch

        about = {"torch": torch.__version__, "cores": os.cpu_count(), "load": load, "rounds": options.rounds}
        options.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
