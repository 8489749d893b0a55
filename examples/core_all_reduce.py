"""Two processes add their vectors with phalanx.core: no torch, no launcher."""

import multiprocessing
import os
import sys
import tempfile
from array import array

# [rank]
from phalanx import core


def run(rank: int, world_size: int, path: str) -> None:
    # The file is where the ranks find each other. The vectors move through shared memory.
    with core.World(rank, world_size, core.FileStore(path), timeout_ms=30_000) as world:
        group = world.create_group("everyone", range(world_size))
        values = array("f", [rank + 1.0, 10.0, 100.0 * rank])
        group.all_reduce(values, values)
        print(f"rank {rank}: {values.tolist()}")
        assert values.tolist() == [3.0, 20.0, 100.0]
        # [rank end]


def main() -> int:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "store")
        ranks = [context.Process(target=run, args=(rank, 2, path)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    return int(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    sys.exit(main())
