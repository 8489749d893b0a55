"""One of the two processes of `_hosts`, which count as ranks of two hosts.

Arguments: rank, path of a file store. Prints JSON objects, one a line: what is found of UCX, and, if it is found, what
came of the trial.
"""

import json
import sys
import time
from array import array
from statistics import median

from phalanx.core import FileStore, PhalanxError, World
from phalanx.core._ucx import describe

_TIMEOUT_MS = 10_000
_COUNT = 1 << 18  # float32: 1 MiB
_ROUNDS = 5


def main(rank: int, path: str) -> None:
    found = describe()
    print(json.dumps(found), flush=True)
    if not found["path"] or found["problem"]:
        return
    try:
        print(json.dumps({"error": "", "us": _exchange(rank, path)}))
    except PhalanxError as error:
        print(json.dumps({"error": str(error)}))


def _exchange(rank: int, path: str) -> float:
    """Microseconds of a sum of 1 MiB, which sends as much in each direction."""
    job, host_id = "phalanx-doctor", rank + 1
    with World(rank, 2, FileStore(path), timeout_ms=_TIMEOUT_MS, host_id=host_id, job=job) as world:
        group = world.create_group("hosts", range(2))
        took = []
        for _ in range(_ROUNDS):
            values = array("f", [rank + 1.0]) * _COUNT
            group.barrier()
            began = time.perf_counter()
            group.all_reduce(values, values)
            took.append((time.perf_counter() - began) * 1e6)
            if values.count(3.0) != _COUNT:
                raise PhalanxError("the sum of the two ranks is wrong")
        return median(took)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
