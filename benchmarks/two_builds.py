"""Compares two builds of libphalanx in the same ranks, every collective on ordinary and on symmetric memory.

    python benchmarks/two_builds.py BEFORE/libphalanx.so AFTER/libphalanx.so
    python benchmarks/two_builds.py SAME.so COPY_OF_SAME.so      # what chance makes of a ratio of 1

Rounds of a millisecond alternate between the two, because a machine may change its speed for seconds at a time. They
run in several processes, in every second of which the other build is loaded first: where memory lies changes some cells
by a twentieth. A ratio is time after / time before, the median over the processes of the medians of consecutive rounds.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
UNITS = {"k": 10, "m": 20}


def size_of(text: str) -> int:
    text = text.lower()
    return int(text[:-1]) << UNITS[text[-1]] if text[-1] in UNITS else int(text)


def measure(options: argparse.Namespace, folder: Path) -> dict[tuple[str, str, int], list[tuple[float, float, float]]]:
    program = folder / "two_builds"
    source, include = HERE / "two_builds.c", HERE.parent / "core" / "include"
    subprocess.run(["cc", "-O2", "-std=gnu11", f"-I{include}", source, "-o", program, "-ldl"], check=True)
    found: dict[tuple[str, str, int], list[tuple[float, float, float]]] = {}
    for k in range(options.processes):
        builds = [options.before, options.after][:: -1 if k % 2 else 1]
        numbers = [options.ranks, options.rounds, options.microseconds]
        command = [program, *builds, *numbers, folder / f"store{k}", *(size_of(s) for s in options.sizes.split(","))]
        text = subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout
        for line in text.splitlines():
            name, memory, size, *values = line.split()
            first, second, ratio = map(float, values)
            row = (second, first, 1 / ratio) if k % 2 else (first, second, ratio)
            found.setdefault((name, memory, int(size)), []).append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default="256,1k,4k,16k,64k,256k,1m,4m,16m,64m")
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--microseconds", type=float, default=1000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
    rows = []
    for (name, memory, size), runs in found.items():
        before, after, ratio = (statistics.median(column) for column in zip(*runs, strict=True))
        ratios = sorted(run[2] for run in runs)
        rows.append({"collective": name, "memory": memory, "bytes": size, "before_us": before, "after_us": after})
        rows[-1] |= {"ratio": ratio, "lowest": ratios[0], "highest": ratios[-1]}
        spread = f"{ratio:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        print(f"{name:15} {memory:9} {size:>9} {before:10.2f} {after:10.2f}  {spread}", flush=True)
    ratios = sorted(row["ratio"] for row in rows)
    print(f"{len(rows)} cells: median {statistics.median(ratios):.3f}, {ratios[0]:.3f} to {ratios[-1]:.3f}, ", end="")
    print(f"{sum(ratio > 1.02 for ratio in ratios)} above 1.02, {sum(ratio < 0.98 for ratio in ratios)} below 0.98")
    if options.json:
        options.json.write_text(json.dumps({"ranks": options.ranks, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
