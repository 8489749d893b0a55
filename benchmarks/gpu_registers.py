"""Registers, stack and spills of each kernel for GPUs, as ptxas reports them: no GPU is needed, but nvcc.

    python benchmarks/gpu_registers.py [--arch 80,90,100] [--csv FILE]

The table has one line for each architecture and family of kernels (what is done, without dtype and op): how many there
are, the fewest and the most registers, and the bytes that are spilled. The file has every kernel. A block has 512
threads, of which a processor of 65,536 registers holds one at 128 registers for each, and two at 64.
"""

import argparse
import csv
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "core/cuda/collectives.cu"  # which takes in the others
FLAGS = ["-std=c++17", "-O3", "--fmad=false", "-Xptxas", "-v", f"-I{ROOT}/core/include", f"-I{ROOT}/core/src"]
ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\d+)a?'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
# phx_gpu_, what is done, and for reductions dtype and op: the family is what comes before the dtype.
DTYPE = re.compile(r"_(?:u?int\d+|b?float\d+\w*?|complex\d+|bool)(?:_|$)")


class Kernel(NamedTuple):
    arch: int
    name: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int

    @property
    def family(self) -> str:
        return DTYPE.split(self.name, maxsplit=1)[0]


def parse(log: str) -> Iterator[Kernel]:
    """The kernels that a log of `nvcc -Xptxas -v` tells of."""
    entry: tuple[str, str] | None = None
    stack = (0, 0, 0)
    for line in log.splitlines():
        if found := ENTRY.search(line):
            entry = (found[1], found[2])
        elif found := STACK.search(line):
            stack = (int(found[1]), int(found[2]), int(found[3]))
        elif (found := USED.search(line)) and entry is not None:
            yield Kernel(int(entry[1]), entry[0], int(found[1]), *stack)
            entry = None


def compiled(archs: list[int]) -> list[Kernel]:
    code = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    with tempfile.TemporaryDirectory() as folder:
        command = ["nvcc", *FLAGS, *code, "-fatbin", str(SOURCE), "-o", f"{folder}/kernels.fatbin"]
        done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        sys.exit(done.stdout)
    return sorted(parse(done.stdout))


def table(kernels: list[Kernel]) -> Iterator[str]:
    yield f"{'arch':>6} {'kernels':>7} {'registers':>10} {'stack B':>8} {'spilled B':>9}  family"
    for arch, family in sorted({(kernel.arch, kernel.family) for kernel in kernels}):
        rows = [kernel for kernel in kernels if (kernel.arch, kernel.family) == (arch, family)]
        fewest, most = min(row.registers for row in rows), max(row.registers for row in rows)
        spilled = sum(row.spill_store_bytes + row.spill_load_bytes for row in rows)
        stack = max(row.stack_bytes for row in rows)
        yield f"sm_{arch:<3} {len(rows):>7} {f'{fewest} to {most}':>10} {stack:>8} {spilled:>9}  {family}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="80,90,100", help="compute capabilities without the dot, with commas between")
    parser.add_argument("--csv", type=Path, help="a file for every kernel")
    arguments = parser.parse_args()
    kernels = compiled([int(arch) for arch in arguments.arch.split(",")])
    if not kernels:
        sys.exit("ptxas told of no kernel")
    print(*table(kernels), sep="\n")
    if arguments.csv is not None:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(Kernel._fields)
            writer.writerows(kernels)


if __name__ == "__main__":
    main()
