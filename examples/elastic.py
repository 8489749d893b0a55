"""Four processes train with DistributedDataParallel; one is killed, another takes its place, and the weights are right.

The parent starts the workers, notices that one has died, and starts a replacement. It tells all workers who belongs to
the new *generation* through a store. Survivors and replacement make a new process group, the rank that is furthest
ahead sends its state to the others, and training goes on. No default process group is needed.
"""

import datetime
import io
import multiprocessing
import os
import signal
import time

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from phalanx.collectives import c10d

WORKERS, STEPS, KILLED_AT = 4, 8, 4


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


def work(worker: int, port: int) -> None:
    store = TCPStore("127.0.0.1", port)
    trainer, generation = Trainer(), 0
    while trainer.step < STEPS:
        store.wait([f"members/{generation}"])
        members = [int(each) for each in store.get(f"members/{generation}").split()]
        if worker not in members:  # this one starts as a replacement
            generation += 1
            continue
        rank = members.index(worker)
        # [group]
        own = PrefixStore(f"generation {generation}", store)
        group = c10d.process_group(own, rank, len(members), datetime.timedelta(seconds=30))
        trainer.synchronize(group)
        model = DistributedDataParallel(trainer.model, process_group=group)
        # [group end]
        if generation:
            print(f"worker {worker} is rank {rank} of generation {generation}, at step {trainer.step}", flush=True)
            store.set(f"back/{worker}", str(time.time()))
        try:
            while trainer.step < STEPS:
                if worker == 2 and generation == 0 and trainer.step == KILLED_AT:
                    os.kill(os.getpid(), signal.SIGKILL)
                trainer.train(model, slice(rank, None, len(members)))
        except dist.DistBackendError as error:
            print(f"worker {worker}: {str(error).splitlines()[0]}", flush=True)
            generation += 1
    alone = Trainer()
    while alone.step < STEPS:
        alone.train(alone.model, slice(None))
    for ours, expected in zip(trainer.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)
    print(f"worker {worker}: the weights of an unbroken run", flush=True)


def main() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # A replacement starts in milliseconds: it is forked from a process that has imported what it needs. (The first
    # optimizer of a process imports Dynamo, which takes a second.)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "torch.nn.parallel", "phalanx.collectives"])
    c10d.load()
    workers = {each: context.Process(target=work, args=(each, store.port)) for each in range(WORKERS)}
    for process in workers.values():
        process.start()
    store.set("members/0", " ".join(map(str, workers)))
    dead = workers.pop(2)
    dead.join()
    began = time.time()
    workers[WORKERS] = context.Process(target=work, args=(WORKERS, store.port))
    workers[WORKERS].start()
    store.set("members/1", " ".join(map(str, workers)))
    for process in workers.values():
        process.join()
    if any(process.exitcode for process in workers.values()):
        raise SystemExit("a worker failed")
    last = max(float(store.get(f"back/{worker}")) for worker in workers)
    print(f"worker 2 was killed; all trained again after {last - began:.2f} s")


if __name__ == "__main__":
    main()
