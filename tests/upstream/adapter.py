"""torch's own tests of process groups, as the torch wheel holds them, on the backend `phalanx` in gloo's place.

Every group that a test makes by the name gloo is one of ours, and torch says "gloo" of it, as the tests expect. Ranks
are forked from a process that has imported everything, which saves seconds for each.
run.py runs them.
"""

import os
import sys
import tempfile
import unittest
from collections.abc import Callable
from typing import Any


def in_gloos_place() -> None:
    """Let torch make one of our groups wherever it is asked for one of gloo."""
    from torch.distributed import distributed_c10d as c10d

    make = c10d._new_process_group_helper

    def helper(size, rank, ranks, backend, *args, **kwargs):
        ours = c10d.Backend(str(backend).replace("gloo", "phalanx"))
        group, store = make(size, rank, ranks, ours, *args, **kwargs)
        if group in c10d._world.pg_map:
            c10d._world.pg_map[group] = (str(backend), c10d._world.pg_map[group][1])
            config = c10d._world.pg_backend_config[group]
            c10d._world.pg_backend_config[group] = config.replace("phalanx", "gloo")
        return group, store

    c10d._new_process_group_helper = helper


def under_gloos_name(find: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """A function that gives events of a profile by name, for events that begin with our name."""

    def found(name: str, *args: Any, **kwargs: Any) -> list[Any]:
        events = find(name.replace("gloo", "phalanx"), *args, **kwargs)
        for event in events:
            event.name = event.name.replace("phalanx", "gloo")
        return events

    return found


def tests(world_size: int, backend: str) -> type:
    """The class of the tests.

    Args:
        world_size: How many ranks each has.
        backend: "phalanx", or "gloo" for torch's own.
    """
    os.environ.update(
        BACKEND="gloo", WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", TEMP_DIR=tempfile.gettempdir()
    )
    import torch
    from torch.testing._internal.distributed import distributed_test

    if world_size > 2:
        os.environ["BACKEND"] = "mpi"  # or tests of subgroups are left out below 8 ranks
    if backend == "phalanx":
        in_gloos_place()
        distributed_test.get_profiling_event = under_gloos_name(distributed_test.get_profiling_event)
        from phalanx.collectives import c10d

        c10d.load()  # compiled before ranks are forked

    class TestDistBackend(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    TestDistBackend.__module__ = __name__
    return TestDistBackend


def run_one(case: type, name: str) -> int:
    """Run one test: 0 if it passed, 77 if it was skipped, 1 otherwise; says why on stderr."""
    result = unittest.TestResult()
    case(name).run(result)
    for _, text in [*result.errors, *result.failures]:
        print(text, file=sys.stderr, flush=True)
    return 77 if result.skipped else 0 if result.wasSuccessful() else 1
