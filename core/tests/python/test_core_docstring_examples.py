"""The examples in docstrings, on two ranks without torch.

They have the names of phalanx.core and of a few modules, rank, world, group (of both ranks), and memory, symm and own
as the example of Symm makes them.
"""

import array
import inspect
import json
import logging
import mmap
import os
from datetime import timedelta

import phalanx.core
from docstring_examples import public_objects, run_examples
from phalanx.core import FileStore, Group, Memory, PhalanxError, Symm, World
from ranks import run_ranks, scratch

WITHOUT = (
    "Agreement",  # results of calls
    "Coalesced",
    "Group",
    "Memory",
    "MemoryCount",
    "MemoryInfo",
    "Algo",  # names of numbers
    "Kind",
    "DType",
    "ReduceOp",
    "CallOptions",  # types of keywords
    "MessageOptions",
    "CallbackStore",  # `as_store` makes one
    "load_torch_ops",  # needs torch
    "Group.save_gpu_tuning",  # these need memory of GPUs
    "World.export_fabric",
    "World.import_fabric",
)


def objects():
    """What is public, without the errors, and the methods of the classes whose methods are all there is to them."""
    found = {
        name: value
        for name, value in public_objects("phalanx.core").items()
        if not (inspect.isclass(value) and issubclass(value, PhalanxError))
    }
    for module in ("phalanx.core.random", "phalanx.core.timeouts"):
        found |= {name: value for name, value in public_objects(module).items() if value.__module__ == module}
    for kind in (World, Group, Memory, Symm):
        methods = inspect.getmembers(kind, inspect.isfunction)
        found |= {f"{kind.__name__}.{name}": method for name, method in methods if not name.startswith("_")}
    return found


def examples(rank, size):
    os.chdir(scratch())
    names = {name: getattr(phalanx.core, name) for name in phalanx.core.__all__}
    names |= {**objects(), "array": array.array, "timedelta": timedelta, "rank": rank}
    names |= {"json": json, "logging": logging, "mmap": mmap}
    with World(rank, size, FileStore("store"), timeout_ms=30_000) as world:
        group, memory = world.create_group("all", range(size)), world.alloc(4096)
        names |= {"world": world, "group": group, "memory": memory, "symm": group.rendezvous(memory)}
        failed = run_examples(rank, objects(), names | {"own": memory.buffer().cast("i")})
        group.barrier()
        return failed


def test_every_public_function_has_an_example_that_gives_what_it_says():
    missing = [name for name, value in objects().items() if ">>> " not in (value.__doc__ or "") and name not in WITHOUT]
    assert missing == [], "no example in the docstrings of these"
    for failed in run_ranks(examples, 2):
        assert not failed, "\n".join(failed.values())
