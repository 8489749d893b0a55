"""What mismatch detection and the flight recorder cost: a small all_reduce with and without them, in turns.

    python benchmarks/detection_cost.py [--json FILE]

Builds the core three times: as it is, without the comparison of the calls, without the recorder. Then two pinned ranks
(detection_cost.cpp) load all three and call them in turns of some hundred calls each, in an order drawn anew for each
turn, so that what disturbs the machine disturbs all alike. What is compared are builds within one turn.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VARIANTS = {"without detection": "-DPHX_UNCHECKED", "as it is": "", "without recorder": "-DPHX_UNRECORDED"}


def build(folder: Path, flags: str) -> Path:
    """The library, built with these flags."""
    configure = ["cmake", "-S", str(ROOT / "core"), "-B", str(folder), f"-DCMAKE_CXX_FLAGS={flags}"]
    subprocess.run([*configure, "-DPHX_BUILD_TORCH=OFF"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(folder), "-j2"], check=True, stdout=subprocess.DEVNULL)
    return folder / "libphalanx.so.0"


def compile_program(folder: Path) -> Path:
    """The program that calls them."""
    program = folder / "detection_cost"
    source = ROOT / "benchmarks" / "detection_cost.cpp"
    command = ["c++", "-std=c++17", "-O2", "-I", str(ROOT / "core/include"), str(source), "-o", str(program), "-ldl"]
    subprocess.run(command, check=True)
    return program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3000)
    parser.add_argument("--calls", type=int, default=200, help="in one turn, of each build")
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024, 8192], help="bytes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        libraries = [build(folder / str(i), flags) for i, flags in enumerate(VARIANTS.values())]
        program = compile_program(folder)
        print(f"{'all_reduce':>10}" + "".join(f"{name:>28}" for name in VARIANTS))
        for size in options.sizes:
            command = [program, options.turns, options.calls, size, *libraries]
            printed = subprocess.run([str(each) for each in command], check=True, capture_output=True, text=True).stdout
            found = [[float(each) for each in line.split()] for line in printed.splitlines()]
            cells = [f"{ns:.1f} ns ({ratio - 1:+.2%})" for ns, ratio in found]
            print(f"{size:>10}" + "".join(f"{cell:>28}" for cell in cells), flush=True)
            for variant, (ns, ratio) in zip(VARIANTS, found, strict=True):
                rows.append({"bytes": size, "build": variant, "median_ns": ns, "median_ratio_to_undetected": ratio})
    if options.json:
        report = {"turns": options.turns, "calls_in_a_turn": options.calls, "rows": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
