"""What mismatch detection and the flight recorder cost: small collectives with and without them, in turns.

    .venv/bin/python benchmarks/detection_cost.py [--json FILE]

Builds the core three times: as it is, without the comparison of the calls, without the recorder. Then `phalanx bench`
measures each of them in turns. On a machine that does nothing else; takes ten minutes.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

CORE = Path(__file__).resolve().parents[1] / "core"
VARIANTS = {"as it is": "", "without detection": "-DPHX_UNCHECKED", "without recorder": "-DPHX_UNRECORDED"}


def build(folder: Path, flags: str) -> Path:
    """The library, built with these flags."""
    configure = ["cmake", "-S", str(CORE), "-B", str(folder), f"-DCMAKE_CXX_FLAGS={flags}", "-DPHX_BUILD_TORCH=OFF"]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(folder), "-j2"], check=True, stdout=subprocess.DEVNULL)
    return folder / "libphalanx.so.0"


def measure(library: Path, output: Path) -> dict[str, float]:
    """Median microseconds by collective and size, of one run."""
    command = [sys.executable, "-c", "import sys; from phalanx.core._cli import main; sys.exit(main())", "bench"]
    command += ["--peers", "none", "--collectives", "all_reduce,barrier", "--sizes", "256,1k,8k", "--buffers", "user"]
    environment = {**os.environ, "PHALANX_LIBRARY": str(library)}
    subprocess.run([*command, "--json", str(output)], check=True, env=environment, stdout=subprocess.DEVNULL)
    rows = json.loads(output.read_text())["rows"]
    return {f"{row['collective']} {row['bytes']}": row["median_us"] for row in rows if row["who"] == "phalanx"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        libraries = {name: build(Path(folder, str(i)), flags) for i, (name, flags) in enumerate(VARIANTS.items())}
        found: dict[str, dict[str, list[float]]] = {name: {} for name in VARIANTS}
        for _ in range(options.turns):
            for name in random.sample(list(VARIANTS), len(VARIANTS)):
                for row, value in measure(libraries[name], Path(folder, "result.json")).items():
                    found[name].setdefault(row, []).append(value)
    medians = {name: {row: median(values) for row, values in rows.items()} for name, rows in found.items()}
    whole = medians["as it is"]
    print(f"{'':20}" + "".join(f"{name:>26}" for name in VARIANTS))
    for row, value in whole.items():
        others = (f"{rows[row]:10.3f} us ({value / rows[row] - 1:+7.1%} )" for rows in medians.values())
        print(f"{row:20}" + "".join(f"{each:>26}" for each in others))
    if options.json:
        options.json.write_text(json.dumps({"turns": options.turns, "median_us": medians, "all_us": found}, indent=1))


if __name__ == "__main__":
    main()
