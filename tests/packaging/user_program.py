"""What a user writes against every package, in few lines. It passes `mypy --strict`, and runs as two ranks."""

import multiprocessing
import os
import sys
import tempfile
from array import array

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import phalanx.collectives as pc
from phalanx import core, inductor_plugin, symm_mem
from phalanx.dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor


def without_torch(rank: int, world_size: int, path: str) -> None:
    with core.World(rank, world_size, core.FileStore(path), timeout_ms=60_000) as world:
        group = world.create_group("everyone", range(world_size))
        options: core.CallOptions = {"channel": 1, "timeout_ms": 30_000}
        values, total = array("f", [rank + 1.0, 2.0]), array("f", [0.0, 0.0])
        work: core.Work = group.all_reduce(values, total, op="sum", blocking=False, **options)
        work.wait()
        assert total.tolist() == [3.0, 4.0]
        group.coalesced([core.Call.all_reduce(total, op="max"), core.Call.broadcast(values)], algo="one_shot")
        received = group.recv(values, 1 - rank, blocking=False)
        group.send(total, 1 - rank, tag=0)
        received.wait()
        sender: int = received.source()
        symm = group.rendezvous(group.world.alloc(64))
        symm.all_reduce(0, values, dtype="float32", blocking=False).wait()
        assert (sender, symm.group.group_rank, values.tolist()) == (1 - rank, rank, [0.0, 0.0])


def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return pc.all_reduce(torch.relu(x @ weight), "sum", dist.group.WORLD)


def with_torch(rank: int, world_size: int, path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    gathered: torch.Tensor = pc.all_gather_tensor(torch.full((2,), float(rank)), 0, dist.group.WORLD)
    assert gathered.tolist() == [0.0, 0.0, 1.0, 1.0]

    block = symm_mem.empty(4)
    handle: symm_mem.SymmetricMemory = symm_mem.rendezvous(block, dist.group.WORLD)
    block.fill_(rank)
    handle.barrier()
    assert handle.get_buffer(1 - rank, (4,), torch.float32).sum().item() == 4.0 * (1 - rank)
    handle.barrier()

    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    sharded: DTensor = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    partial = DTensor.from_local(sharded.to_local().sum(), mesh, [Partial("sum")])
    assert partial.redistribute(placements=[Replicate()]).to_local().item() == 6.0

    if "--compile" in sys.argv:
        compiled = torch.compile(layer, backend="phalanx")
        x = torch.ones(2, 2)
        assert torch.equal(compiled(x, x), layer(x, x))
        reports: list[inductor_plugin.Report] = inductor_plugin.reports()
        print(*reports)  # none where the compiled graph comes from torch's cache
    dist.destroy_process_group()


def run(rank: int, world_size: int, folder: str) -> None:
    without_torch(rank, world_size, os.path.join(folder, "core"))
    with_torch(rank, world_size, os.path.join(folder, "torch"))


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")  # each rank would import torch again otherwise
        ranks = [context.Process(target=run, args=(rank, 2, folder)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    sys.exit(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    main()
