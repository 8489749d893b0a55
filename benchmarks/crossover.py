"""Measures where two-shot takes over from one-shot in all_reduce, and draws it for docs/explanation/algorithms.md.

python benchmarks/crossover.py [--ranks 2,4] [--turns 3] [--json FILE] [--plot FILE.svg]

`phalanx bench` runs in turns under two tuning tables, one that never leaves one-shot and one that never uses it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from phalanx import core

SIZES = "256,512,1k,2k,4k,8k,16k,32k,64k,128k"
ALWAYS = {"one-shot": 1 << 30, "two-shot": 1}  # one_shot_bytes


def tables(folder: Path, ranks: int) -> dict[str, Path]:
    """Write one tuning table for each algorithm.

    Args:
        folder: Where to.
        ranks: Group size that the rows are for.

    Returns:
        Name of the algorithm -> file.
    """
    made = {}
    for name, one_shot_bytes in ALWAYS.items():
        made[name] = folder / f"{name}-{ranks}"
        with core.World(0, 1, core.MemoryStore()) as world:
            group = world.create_group("one", [0])
            group.set_tuning(core.Tuning(one_shot_bytes=one_shot_bytes))
            group.save_tuning(made[name])  # a row for a group of one: only its host is wanted
        made[name].write_text(made[name].read_text().replace("ranks=1 ", f"ranks={ranks} "))
    return made


def medians(ranks: int, table: Path, folder: Path) -> dict[int, float]:
    """Run the benchmark once.

    Args:
        ranks: Group size.
        table: The tuning table.
        folder: For its result.

    Returns:
        Bytes -> microseconds.
    """
    result = folder / "result.json"
    words = ["--collectives", "all_reduce", "--buffers", "user", "--peers", "none", "--rounds", "10", "--sizes", SIZES]
    subprocess.run(
        [str(Path(sys.executable).with_name("phalanx")), "bench", *words, "--ranks", str(ranks), "--json", str(result)],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PHALANX_TUNING": str(table)},
    )
    rows = json.loads(result.read_text())["rows"]
    return {row["bytes"]: row["median_us"] for row in rows if row["who"] == "phalanx"}


def measure(all_ranks: list[int], turns: int) -> dict[str, dict[str, dict[int, float]]]:
    """Measure in turns.

    Args:
        all_ranks: Group sizes.
        turns: How often each table has its turn.

    Returns:
        Group size -> algorithm -> bytes -> median of the turns, in microseconds.
    """
    found: dict[str, dict[str, dict[int, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for ranks in all_ranks:
            made = tables(folder, ranks)
            runs: dict[str, list[dict[int, float]]] = {name: [] for name in made}
            for _ in range(turns):
                for algorithm, table in made.items():
                    runs[algorithm].append(medians(ranks, table, folder))
            found[str(ranks)] = {
                algorithm: {size: statistics.median(run[size] for run in of) for size in of[0]}
                for algorithm, of in runs.items()
            }
    return found


def plot(found: dict[str, dict[str, dict[int, float]]], path: Path) -> None:
    """Draw time over size.

    Args:
        found: What `measure` returns.
        path: File to write; its suffix says which format.
    """
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(found), figsize=(4.5 * len(found), 3.6), squeeze=False)
    for place, (ranks, by_algorithm) in zip(axes[0], found.items(), strict=True):
        for algorithm, by_size in by_algorithm.items():
            place.loglog(list(by_size), list(by_size.values()), marker="o", markersize=3, label=algorithm, base=2)
        place.set_title(f"{ranks} ranks")
        place.set_xlabel("bytes of each rank")
        place.set_ylabel("microseconds")
        place.set_yscale("log", base=10)
        place.grid(True, which="both", linewidth=0.3)
        place.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", type=lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("--turns", default=3, type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    found = measure(given.ranks, given.turns)
    print(json.dumps(found, indent=1))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if given.plot is not None:
        plot(found, given.plot)


if __name__ == "__main__":
    main()
