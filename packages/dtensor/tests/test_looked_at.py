"""Modules and objects of the packages above the core survive what tools do with objects that they do not know."""

import gc
import importlib
import pkgutil

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from looked_at import look_at, public_objects  # noqa: E402

from c10d_groups import run_groups  # noqa: E402
from ranks import scratch  # noqa: E402

PACKAGES = ("collectives", "symm_mem", "dtensor", "inductor_plugin")


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_and_what_they_offer_can_be_looked_at(package):
    root = pytest.importorskip(f"phalanx.{package}")
    for found in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
        if found.name.rpartition(".")[2] in ("__main__", "_native") or ".triton" in found.name:
            continue
        try:
            module = importlib.import_module(found.name)
        except ImportError:
            continue  # of something that is not installed, such as Triton
        look_at(module)
        for _, thing in public_objects(module):
            look_at(thing)


def look_at_everything(rank, world_size):
    import phalanx.collectives as pc
    from phalanx import symm_mem
    from phalanx.dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    dist.init_process_group("phalanx", init_method=f"file://{scratch()}/store", rank=rank, world_size=world_size)
    world = dist.group.WORLD
    mesh = dist.init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    shared = symm_mem.empty(64)
    handle = symm_mem.rendezvous(shared, world)
    pending = pc.all_reduce(torch.ones(4), "sum", world)
    sharded = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    work = dist.all_reduce(torch.ones(4), async_op=True)
    message = dist.isend(torch.ones(1), 1 - rank)
    placements = [Shard(0), Replicate(), Partial()]
    things = [shared, handle, pending, sharded, work, message, sharded._spec, mesh, *placements, pc.core_group(world)]
    for thing in things:
        # To compare or copy a DTensor is a computation, which all ranks do alike.
        look_at(thing)
        look_at(type(thing))
    del things, thing
    gc.collect()
    work.wait()
    dist.recv(torch.ones(1), 1 - rank)
    message.wait()
    assert pending.tolist() == [2.0] * 4
    assert isinstance(sharded, DTensor) and sharded.full_tensor().sum() == 16
    handle.barrier()
    dist.barrier()
    dist.destroy_process_group()


def test_live_objects_can_be_looked_at_and_work_on():
    run_groups(look_at_everything, 2)
