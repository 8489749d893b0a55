"""The whole of it, tried: two ranks, as threads of this process, do what ranks do."""

from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from phalanx.core.doctor._finding import FAIL, OK, Finding
from phalanx.core.doctor._host import Host

_TIMEOUT_MS = 20_000
_COUNT = 1024


def check_trial(host: Host) -> Iterator[Finding]:
    """Silent where the library cannot be loaded: see `library`."""
    try:
        from phalanx.core import MemoryStore, PhalanxError
    except ImportError:
        return
    try:
        store = MemoryStore()
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(lambda rank: _run(rank, store), range(2))
    except (PhalanxError, RuntimeError) as error:  # the latter: no thread could be started
        advice = "mend what fails above; if nothing does, please report this"
        yield Finding(FAIL, "trial", f"two ranks cannot work together: {error}", advice)
        return
    if (first[:2], second[:2]) != ((3.0 * _COUNT, 2), (3.0 * _COUNT, 1)):
        advice = "please report this, with the whole output"
        yield Finding(FAIL, "trial", f"two ranks get wrong results: {first[:2]} and {second[:2]}", advice)
    else:
        text = f"two ranks share memory, and their all_reduce is right; this host is {first[2]:#x} to them"
        yield Finding(OK, "trial", text)


def _run(rank: int, store: Any) -> tuple[float, int, int]:
    """One rank: the sum of what it got, the byte that the other one wrote, and what it takes the host for."""
    from phalanx.core import World

    with World(rank, 2, store, timeout_ms=_TIMEOUT_MS, job="phalanx-doctor") as world:
        group = world.create_group("doctor", range(2))
        values = array("f", [rank + 1.0] * _COUNT)
        group.all_reduce(values, values)
        block = world.alloc(4096)
        block.buffer()[0] = rank + 1
        seen = int(group.rendezvous(block).buffer(1 - rank)[0])
        group.barrier()
        return sum(values), seen, world.host_id
