"""Ranks with a GPU, a real one or that of fake_torch_cuda, as processes and as threads of one process.

    from cuda_ranks import WAYS, on_cuda, run_cuda_ranks

    @on_cuda
    def sums(rank, world_size, name):        # a function of the test module; `name` is that of a group of all ranks
        ...
        return value

    @pytest.mark.parametrize("way", WAYS)
    def test_ranks_agree_on_the_sum(way):
        assert run_cuda_ranks(sums, 2, way) == [3.0, 3.0]

Skips where there is neither a GPU nor a way to build one.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import fake_torch_cuda
from ranks import run_ranks, scratch

__all__ = ["TOGETHER", "WAYS", "on_cuda", "run_cuda_ranks"]

WAYS = ("processes", "threads")
_GROUP = "tp"
# The environment of ranks that are threads. A kernel of one rank waits for those of the others, which could stand
# behind it: where a kernel of torch is loaded when it is first used, for which the driver may wait for all that runs in
# the process, or where two streams share a queue.
TOGETHER = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}


def on_cuda(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function of a rank one that run_cuda_ranks can call: fn(rank, world_size, "tp", *args)."""

    @functools.wraps(fn)
    def process(rank: int, _: int, way: str, world_size: int, args: tuple[Any, ...]) -> Any:
        fake_torch_cuda.load()
        return _one(fn, rank, world_size, args) if way == "processes" else _threads(fn, world_size, args)

    return process


def run_cuda_ranks(fn: Callable[..., Any], world_size: int, way: str, *args: Any, **named: Any) -> list[Any]:
    """Calls a function of @on_cuda for each rank, which has phalanx.symm_mem to itself.

    Args:
        fn: A function of a module.
        world_size: How many ranks there are.
        way: "processes", or "threads" of one process.
        args: For fn, as in run_ranks.
        named: For run_ranks.

    Returns:
        What fn returned, by rank.
    """
    fake_torch_cuda.needs_cuda()
    if way == "processes":
        return run_ranks(fn, world_size, way, world_size, args, **named)
    (results,) = run_ranks(fn, 1, way, world_size, args, env=TOGETHER, **named)
    return results


def _one(fn: Callable[..., Any], rank: int, world_size: int, args: tuple[Any, ...]) -> Any:
    from phalanx import symm_mem
    from phalanx.core import FileStore

    symm_mem.set_group_info(_GROUP, rank, world_size, FileStore(scratch() / "store"))
    result = fn(rank, world_size, _GROUP, *args)
    symm_mem.finalize()
    return result


def _threads(fn: Callable[..., Any], world_size: int, args: tuple[Any, ...]) -> list[Any]:
    import torch

    from phalanx import symm_mem
    from phalanx.core import MemoryStore

    store, results, failures = MemoryStore(), [None] * world_size, []
    ready = threading.Barrier(world_size)

    def run(rank: int) -> None:
        try:
            with symm_mem.rank_context(), torch.cuda.stream(torch.cuda.Stream()):  # kernels of ranks run side by side
                one = torch.ones(1, 1, device="cuda")
                one.mm(one).cpu()  # what torch makes once for a thread, before kernels wait for each other
                ready.wait()
                symm_mem.set_group_info(_GROUP, rank, world_size, store)
                results[rank] = fn(rank, world_size, _GROUP, *args)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results
