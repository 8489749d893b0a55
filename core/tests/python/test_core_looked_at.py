"""Objects of the binding survive what tools do with them: looks at attributes, copies, pickles, comparisons."""

import copy
import gc
import importlib
import inspect
import pickle
import pkgutil

import pytest
from looked_at import look_at, public_objects

import phalanx.core
from phalanx.core import (
    FileStore,
    MemoryStore,
    PrefixStore,
    TCPStore,
    UnsupportedError,
    World,
    errors,
    ffi,
    lib,
    set_log,
)
from ranks import run_ranks, scratch


def modules():
    for found in pkgutil.walk_packages(phalanx.core.__path__, "phalanx.core."):
        if not found.name.rpartition(".")[2].startswith(("__main__", "_engine", "_abi")):
            yield found.name


def test_a_library_lists_its_functions_and_no_others():
    assert hasattr(lib, "__dict__") and "phx_all_reduce" in vars(lib)
    assert not [name for name in dir(lib) if name.startswith("phxt_")]
    assert dict(inspect.getmembers(lib))["PHX_ERR_INTERRUPTED"] == -16


@pytest.mark.parametrize("name", sorted(modules()))
def test_modules_and_what_they_offer_can_be_looked_at(name):
    module = importlib.import_module(name)
    look_at(module)
    for _, thing in public_objects(module):
        look_at(thing)


def test_every_error_can_be_copied_and_pickled():
    for name in dir(errors):
        cls = getattr(errors, name)
        if isinstance(cls, type) and issubclass(cls, errors.PhalanxError):
            error = cls("what went wrong", rank=1, peer=2, group="tp", sys_errno=5)
            look_at(error)
            for made in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
                assert (type(made), str(made), made.rank, made.group) == (cls, "what went wrong", 1, "tp")


def look_at_everything(rank, world_size):
    store = FileStore(scratch() / "store")
    served = TCPStore.serve(token="token")
    world = World(rank, world_size, store)
    group = world.create_group("g", range(world_size))
    memory = world.alloc(4096)
    symm = group.rendezvous(memory)
    values = bytearray(64)
    work = group.all_reduce(values, values, dtype="uint8", blocking=False)
    things = [store, served, MemoryStore(), PrefixStore(store, "p"), world, group, memory, symm, work]
    things += [
        group.get_tuning(),
        world.mem_count(),
        world.find(memory),
        group.agree(1),
        store._handle,
        ffi,
        lib,
        store.pointer,
    ]
    for thing in things:
        look_at(thing)
        look_at(type(thing))
    work.wait()
    # The original of each still has what it had.
    store.set(f"alive.{rank}", "yes")
    assert store.get(f"alive.{rank}") == b"yes"
    served.set("key", "value")
    assert served.get("key") == b"value"
    symm.barrier()
    bytes(symm.buffer(1 - rank)[:8])
    group.all_reduce(values, values, dtype="uint8")
    del things, thing
    gc.collect()
    group.barrier()
    world.finalize()
    look_at(world)
    look_at(group)


def test_live_objects_can_be_looked_at_and_work_on():
    run_ranks(look_at_everything, 2, check_leaks=False)


def test_what_owns_something_of_the_core_refuses_to_be_copied():
    store = MemoryStore()
    for refuse in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a MemoryStore cannot be copied or pickled"):
            refuse(store)


def test_the_log_function_can_be_set_after_all_of_this():
    set_log(None)
    assert UnsupportedError("text").status == -2
