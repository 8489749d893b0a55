"""Two processes add their vectors with phalanx.core, without torch. Any launcher may start them, or none."""

import os
import subprocess
import sys
import tempfile

# [rank]
from array import array

from phalanx import core


def run(rank: int, world_size: int, path: str) -> None:
    # The file is where the ranks find each other. The vectors move through shared memory.
    with core.World(rank, world_size, core.FileStore(path), timeout_ms=30_000) as world:
        group = world.create_group("everyone", range(world_size))
        values = array("f", [rank + 1.0, 10.0, 100.0 * rank])
        group.all_reduce(values, values)
        print(f"rank {rank}: {values.tolist()}")
        # [rank end]
        assert values[0] == world_size * (world_size + 1) / 2


if __name__ == "__main__":
    if "RANK" in os.environ:
        # A path that the ranks share and that no other run has: all of them have one parent.
        path = os.path.join(tempfile.gettempdir(), f"core_all_reduce.{os.getppid()}")
        run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), path)
        if os.environ["RANK"] == "0":
            os.unlink(path)
    else:
        environments = [{**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
        ranks = [subprocess.Popen([sys.executable, __file__], env=each) for each in environments]
        sys.exit(max(process.wait() for process in ranks))
