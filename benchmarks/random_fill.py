"""Random elements on one thread: ours, that do not depend on the mesh, beside torch's uniform_ and normal_.

    python benchmarks/random_fill.py [--numel N] [--repeats R]

Prints G elements/s, the median of R runs that alternate.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from phalanx.core.dtypes import DType
from phalanx.core.random import Box, Kind, fill


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=1 << 22)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    box = Box(0, (arguments.numel,), (1,), (1,))
    print(f"{'dtype':10} {'what':8} {'phalanx':>8} {'torch':>8}  G elements/s, {arguments.numel} elements")
    for dtype, number in (
        (torch.float32, DType.FLOAT32),
        (torch.float64, DType.FLOAT64),
        (torch.bfloat16, DType.BFLOAT16),
    ):
        x = torch.empty(arguments.numel, dtype=dtype)
        for kind, theirs in ((Kind.UNIFORM, x.uniform_), (Kind.NORMAL, x.normal_)):
            runs: list[Callable[[], object]] = [
                lambda x=x, number=number, kind=kind: fill(x.data_ptr(), number, kind, 0.0, 1.0, 1, box),  # type: ignore[misc]
                theirs,
            ]
            times: list[list[float]] = [[], []]
            for _ in range(arguments.repeats + 1):
                for run, taken in zip(runs, times, strict=True):
                    start = time.perf_counter()
                    run()
                    taken.append(time.perf_counter() - start)
            rates = [arguments.numel / statistics.median(taken[1:]) / 1e9 for taken in times]
            print(f"{str(dtype).removeprefix('torch.'):10} {kind.name.lower():8} {rates[0]:8.2f} {rates[1]:8.2f}")


if __name__ == "__main__":
    main()
