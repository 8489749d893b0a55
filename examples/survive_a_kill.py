"""Three ranks train one model, each on its own part of the data. One is killed; the others shrink and go on.

Nothing is restarted: the survivors have all weights. This example starts its ranks itself, because torchrun ends all
ranks when one has died; so run it without torchrun.
"""

import os
import signal
import sys
import tempfile

import torch
from torch.nn.functional import cross_entropy

from phalanx.collectives import all_gather_tensor, all_reduce_, broadcast_
from phalanx.core import FileStore, Group, PhalanxError, World

STEPS, KILLED, AT_STEP = 100, 1, 35


def batch(step: int, part: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points in the plane, of two spirals: the share of one of `parts` ranks."""
    numbers = torch.Generator().manual_seed(step)
    turn = torch.rand(192, generator=numbers) * 3
    label = torch.randint(0, 2, (192,), generator=numbers)
    angle = turn + label * torch.pi
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], 1) / 3
    return points[part::parts], label[part::parts]


# [train]
def go_on(group: Group, model: torch.nn.Module, step: int) -> tuple[Group, int]:
    """What survivors do: make a group of their own, and go on where the one that came furthest is.

    A rank may have completed the step in which another one saw the failure.
    """
    group = group.shrink()
    steps = all_gather_tensor(torch.tensor([step]), 0, group)
    furthest = int(steps.argmax())
    for parameter in model.parameters():
        broadcast_(parameter.data, furthest, group)
    return group, int(steps[furthest])


def train(group: Group, model: torch.nn.Module) -> Group:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8)  # has no state of its own
    step = 0
    while step < STEPS:
        if step == AT_STEP and group.world.rank == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        points, label = batch(step, group.group_rank, group.group_size)
        loss = cross_entropy(model(points), label)
        optimizer.zero_grad()
        loss.backward()
        try:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    all_reduce_(parameter.grad, "avg", group)
            all_reduce_(loss.detach_(), "avg", group)
        except PhalanxError as error:
            print(f"rank {group.world.rank}: {error}", flush=True)
            group, step = go_on(group, model, step)
            continue
        optimizer.step()
        if step % 20 == 0 and group.group_rank == 0:
            print(f"step {step}: loss {loss.item():.4f}, ranks {list(group.ranks)}", flush=True)
        step += 1
    return group


# [train end]


def run(rank: int, world_size: int, path: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same weights on every rank
    model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))
    with World(rank, world_size, FileStore(path), timeout_ms=60_000) as world:
        group = train(world.create_group("all", range(world_size)), model)
        assert group.ranks == tuple(each for each in range(world_size) if each != KILLED)
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        most, least = all_reduce_(weights.clone(), "max", group), all_reduce_(weights.clone(), "min", group)
        assert torch.equal(most, least), "the survivors' weights differ"
        if group.group_rank == 0:
            print(f"trained to the end by ranks {list(group.ranks)}; their weights are equal, to the bit")


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        context = torch.multiprocessing.get_context("spawn")
        arguments = (3, os.path.join(directory, "store"))
        ranks = [context.Process(target=run, args=(rank, *arguments)) for rank in range(3)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        ended = [process.exitcode for process in ranks]
    if ended != [-signal.SIGKILL if rank == KILLED else 0 for rank in range(3)]:
        sys.exit(f"the ranks ended with {ended}")


if __name__ == "__main__":
    main()
