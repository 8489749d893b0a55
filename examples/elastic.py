"""Two processes train with DistributedDataParallel, then four, one of which is killed and replaced, and then two again.

The weights and the loss are those of one process that trains on the same batches. The parent starts the workers, and
tells all of them through a store who belongs to each *generation*: the next one begins when the plan wants another
number of ranks, or when a rank has died. Its members make a process group (with --reconfigure, from PyTorch 2.14 on,
they change the one that they have), the rank that is furthest ahead sends its state to the others, and all train on.
"""

import datetime
import io
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from phalanx.collectives import c10d

STEPS, KILLED_AT, KILLED = 12, 6, 2
SIZES = {0: 2, 3: 4, 9: 2}  # from which step on, how many workers
TIMEOUT = datetime.timedelta(seconds=30)
newest: Any = dist  # names that PyTorch has since 2.14


def size_at(step: int) -> int:
    return SIZES[max(first for first in SIZES if first <= step)]


def batch(step: int, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
    return x[part], x.sum(1, keepdim=True)[part]


class Trainer:
    """The model and its optimizer, and the number of steps that they have seen."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.step = 0

    def train(self, model: torch.nn.Module, part: slice) -> None:
        """One step. If it raises, the weights are as they were."""
        x, y = batch(self.step, part)
        self.optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        self.optimizer.step()
        self.step += 1

    def loss(self) -> torch.Tensor:
        """The loss of the whole next batch."""
        x, y = batch(self.step, slice(None))
        with torch.no_grad():
            return torch.nn.functional.mse_loss(self.model(x), y)

    def synchronize(self, group: dist.ProcessGroup) -> None:
        """Take the state of the rank that has seen most steps. Collective."""
        steps = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
        dist.all_gather(steps, torch.tensor([self.step]), group=group)
        root = max(range(group.size()), key=lambda rank: int(steps[rank]))
        state = io.BytesIO()
        torch.save([self.model.state_dict(), self.optimizer.state_dict(), self.step], state)
        size = torch.tensor([len(state.getvalue())])
        dist.broadcast(size, group_src=root, group=group)
        data = torch.empty(int(size), dtype=torch.uint8)
        if group.rank() == root:
            data = torch.frombuffer(bytearray(state.getvalue()), dtype=torch.uint8)
        dist.broadcast(data, group_src=root, group=group)
        model, optimizer, self.step = torch.load(io.BytesIO(bytes(data.tolist())))
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


def new_group(store: Any, generation: int, members: list[int], worker: int) -> dist.ProcessGroup:
    """A process group that belongs to no default group."""
    own = PrefixStore(f"generation {generation}", store)
    return c10d.process_group(own, members.index(worker), len(members), TIMEOUT)


def changed_group(store: Any, generation: int, members: list[int], worker: int) -> dist.ProcessGroup:
    """The default process group, which gets these members."""
    if not dist.is_initialized():
        own = PrefixStore(f"worker {worker}", store)
        newest.init_process_group("phalanx", store=own, rank=0, world_size=1, timeout=TIMEOUT, enable_reconfigure=True)
        store.set(f"handle/{worker}", newest._get_reconfigure_handle())
    handles = [store.get(f"handle/{each}").decode() for each in members]
    newest._reconfigure(generation, handles).wait()
    group: dist.ProcessGroup = newest.group.WORLD
    return group


def work(worker: int, generation: int, port: int, group_of: Callable[..., dist.ProcessGroup]) -> None:
    store = TCPStore("127.0.0.1", port)
    trainer = Trainer()
    while trainer.step < STEPS:
        members = [int(each) for each in store.get(f"members/{generation}").split()]
        if worker not in members:
            print(f"worker {worker} leaves after {trainer.step} steps", flush=True)
            return
        # [join]
        group = group_of(store, generation, members, worker)
        trainer.synchronize(group)
        model = DistributedDataParallel(trainer.model, process_group=group)
        # [join end]
        rank, size, begun = group.rank(), group.size(), trainer.step
        print(f"worker {worker} is rank {rank} of {size} from step {begun} on", flush=True)
        try:
            while trainer.step < STEPS and size_at(trainer.step) == size:
                if worker == KILLED and trainer.step == KILLED_AT:
                    os.kill(os.getpid(), signal.SIGKILL)
                trainer.train(model, slice(rank, None, size))
                if trainer.step == begun + 1:
                    store.set(f"trained/{generation}/{worker}", str(time.time()))
            if rank == 0:
                store.set(f"ended/{generation}", str(time.time()))
        except dist.DistBackendError as error:
            print(f"worker {worker}: {str(error).splitlines()[0]}", flush=True)
        generation += 1
    alone = Trainer()
    while alone.step < STEPS:
        alone.train(alone.model, slice(None))
    for ours, expected in zip(trainer.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(trainer.loss(), alone.loss())
    print(f"worker {worker}: loss {trainer.loss():.4f} and weights of an unbroken run", flush=True)


def main() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # A new worker starts in milliseconds: it is forked from a process that has imported what it needs. (The first
    # optimizer of a process imports Dynamo, which takes a second.)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "torch.nn.parallel", "phalanx.collectives"])
    c10d.load()
    group_of = changed_group if "--reconfigure" in sys.argv else new_group
    started: list[Any] = []  # processes, by the number of their worker

    def change(generation: int, members: list[int]) -> None:
        for worker in range(len(started), max(members) + 1):
            started.append(context.Process(target=work, args=(worker, generation, store.port, group_of)))
            started[worker].start()
        store.set(f"members/{generation}", " ".join(map(str, members)))

    def show(what: str, generation: int, members: list[int], began: float) -> None:
        last = max(float(store.get(f"trained/{generation}/{worker}")) for worker in members)
        print(f"{what}: the first step of {len(members)} ranks was over after {last - began:.2f} s", flush=True)

    change(0, [0, 1])
    store.wait(["ended/0"])
    change(1, [0, 1, 2, 3])
    show("two joined", 1, [0, 1, 2, 3], float(store.get("ended/0")))
    started[KILLED].join()
    began = time.time()
    change(2, [0, 1, 3, 4])
    show("one was killed and replaced", 2, [0, 1, 3, 4], began)
    store.wait(["ended/2"])
    change(3, [0, 1])
    show("two left", 3, [0, 1], float(store.get("ended/2")))
    for process in started:
        process.join()
    if any(process.exitcode for process in started if process is not started[KILLED]):
        raise SystemExit("a worker failed")


if __name__ == "__main__":
    main()
