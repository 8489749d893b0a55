"""torchft: its manager gets a process group of Phalanx. A replica that is killed is replaced while the others live."""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

import clients
from clients import Client, Rank, assert_equal

torchft = Client("torchft==0.2.*", check="import torchft")
STEPS, KILLED_AT, LIMIT = 12, 4, timedelta(seconds=60)


def make_group(backend: str) -> Any:
    from torchft.process_group import ProcessGroupGloo, ProcessGroupWrapper

    from phalanx.collectives import c10d

    class ProcessGroupPhalanx(ProcessGroupWrapper):
        def _create_pg(self, store: Any, rank: int, world_size: int) -> dist.ProcessGroup:
            return c10d.process_group(store, rank, world_size, self._timeout)

    return {"phalanx": ProcessGroupPhalanx, "gloo": ProcessGroupGloo}[backend](timeout=LIMIT)


# ---- configure ----------------------------------------------------------------------------------------------------


def configured(rank: Rank) -> list[Any]:
    """One process group, which gets other ranks, another store and another size again and again."""
    group = make_group(rank.backend)
    store = dist.TCPStore("localhost", int(os.environ["MASTER_PORT"]), 3, rank.rank == 0, wait_for_workers=False)
    results = []
    for quorum in range(6):
        size = 2 + quorum % 2  # with rank 2 and without it
        if rank.rank < size:
            position = (rank.rank + quorum) % size
            group.configure(f"localhost:{store.port}/quorum/{quorum}", f"replica {position}", position, size, quorum)
            x = torch.full((1000,), float(position + quorum))
            group.allreduce([x], dist.AllreduceOptions()).wait()
            gathered = [torch.empty(3) for _ in range(size)]
            group.allgather([gathered], [torch.full((3,), float(position))], AllgatherOptions()).wait()
            y = torch.full((2,), float(position))
            group.broadcast([y], dist.BroadcastOptions()).wait()
            group.barrier(dist.BarrierOptions()).wait()
            results.append([x, gathered, y, group.size()])
        store.set(f"{quorum}.{rank.rank}", b"")
        store.wait([f"{quorum}.{each}" for each in range(3)], LIMIT)
    group.abort()
    return results


def test_a_group_can_be_configured_again_and_again() -> None:
    results = torchft.run(configured, ranks=3)
    assert_equal(results["phalanx"], results["gloo"])
    assert [len(each) for each in results["phalanx"]] == [6, 6, 3]
    assert results["phalanx"][0][1][0][0].item() == 0 + 1 + 2 + 3 * 1  # three ranks, in the second configuration


# ---- DDP --------------------------------------------------------------------------------------------------------


def make_model(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))


def gradients_of(model: torch.nn.Module, step: int, part: int) -> None:
    torch.manual_seed(1000 * step + part)
    model(torch.randn(8, 64)).square().mean().backward()


def replica(rank: Rank) -> dict[str, Any]:
    """A replica of torchft's example of DDP. A new one has other weights, until it has those of the others."""
    import torchft as ft
    from torchft.process_group import ErrorSwallowingProcessGroupWrapper

    class Group(ErrorSwallowingProcessGroupWrapper):
        """Tells the manager that a replica has died.

        Without it torchft 0.2 ends the survivor too, on gloo as well: it wants the future of a work whose wait() has
        raised. And without `errored` the survivor would commit the step with a gradient of its own.
        """

        def errored(self) -> Exception | None:
            return self.error()

    group = Group(make_group(rank.backend))
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    model = make_model(rank.rank)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["optimizer"])

    manager = ft.Manager(
        pg=group,
        min_replica_size=2,
        use_async_quorum=False,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": sgd.state_dict()},
        replica_id=f"replica {rank.rank}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=LIMIT,
        quorum_timeout=2 * LIMIT,  # the survivor waits for the new one
        hostname="localhost",
    )
    ddp, optimizer = ft.DistributedDataParallel(manager, model), ft.Optimizer(manager, sgd)
    committed = []
    steps = rank.count(STEPS)
    while manager.current_step() < steps:
        rank.begin_step()
        step = manager.current_step()
        optimizer.zero_grad()  # the replicas say who is there
        gradients_of(ddp, manager.current_step(), manager.participating_rank())
        optimizer.step()
        if manager.current_step() > step:
            committed.append(manager.current_step())
            (rank.folder / f"step.{rank.rank}.{committed[-1]}").touch()
        rank.end_step()
    manager.shutdown(wait=False)
    return {"weights": list(model.state_dict().values()), "committed": committed}


def supervise(rank: Rank) -> dict[str, Any]:
    """Starts two replicas, kills one of them, and starts another in its place."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=100, heartbeat_timeout_ms=1000)
    context = {**json.loads(os.environ[clients.CONTEXT]), "turns": ""}  # these steps are not timed
    env = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address(), clients.CONTEXT: json.dumps(context)}

    def start(number: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, *sys.argv[:2], "replica"], env={**env, "RANK": str(number)})

    replicas = {number: start(number) for number in (1, 2)}
    reached = rank.folder / f"step.2.{KILLED_AT}"
    while not reached.exists():
        assert all(each.poll() is None for each in replicas.values())
        time.sleep(0.01)
    replicas[2].send_signal(signal.SIGKILL)
    assert replicas[2].wait() == -signal.SIGKILL
    replicas[3] = start(3)
    assert [replicas[number].wait() for number in (1, 3)] == [0, 0]
    lighthouse.shutdown()
    return {number: torch.load(rank.folder / f"result.{number}") for number in (1, 3)}


def together(rank: Rank) -> dict[str, Any]:
    """Each rank is a replica, and all live to the end."""
    from torchft.coordination import LighthouseServer

    address, done = rank.folder / "lighthouse", rank.folder / "done"
    if rank.rank == 0:
        lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=100, heartbeat_timeout_ms=60_000)
        address.with_suffix(".new").write_text(lighthouse.address())
        address.with_suffix(".new").rename(address)
    while not address.exists():
        time.sleep(0.01)
    os.environ["TORCHFT_LIGHTHOUSE"] = address.read_text()
    result = replica(rank)
    if rank.rank != 0:
        done.touch()
        return result
    while not done.exists():
        time.sleep(0.01)
    lighthouse.shutdown()
    return result


def unbroken(first: int, steps: int) -> list[torch.Tensor]:
    """The weights of a run in one process, from those of the first replica, in which nothing happens."""
    model = make_model(first)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        sgd.zero_grad()
        for part in range(2):
            gradients_of(model, step, part)
        for each in model.parameters():
            assert each.grad is not None
            each.grad /= 2
        sgd.step()
    return list(model.state_dict().values())


def test_ddp_trains_as_over_gloo() -> None:
    results = torchft.run(together, what="DDP")
    first, second = results["phalanx"]
    assert_equal(first["weights"], second["weights"])
    assert_equal(first, results["gloo"][0])
    assert_equal(first["weights"], unbroken(0, len(first["committed"])), rtol=1e-4, atol=1e-6)  # adds in another order


def test_ddp_survives_a_kill_and_a_replacement() -> None:
    results = torchft.run(supervise, ranks=1)
    expected = unbroken(1, STEPS)
    for (of_backend,) in results.values():
        survivor, newcomer = of_backend[1], of_backend[3]
        assert survivor["committed"] == list(range(1, STEPS + 1))  # no step is lost and none is taken twice
        assert KILLED_AT < newcomer["committed"][0] <= newcomer["committed"][-1] == STEPS
        assert_equal(newcomer["weights"], survivor["weights"])
        # To the rounding of sums, as if nothing had happened.
        assert_equal(survivor["weights"], expected, rtol=1e-4, atol=1e-6)
