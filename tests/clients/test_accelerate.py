"""accelerate: a process group that exists when the first Accelerator is made is the one that it uses."""

from typing import Any

import torch
import torch.distributed as dist

from clients import Client, Rank, assert_equal

accelerate = Client("accelerate==1.15.*")


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(*(Block() for _ in range(4)), torch.nn.Linear(256, 8))


def train(rank: Rank, accelerator: Any) -> dict[str, Any]:
    """Five steps, with batches that accelerate's loader gives to the ranks in turn."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(2)
    batch, steps = 8, rank.count(5)
    inputs, labels = (
        torch.randn(2 * batch * steps, 256, generator=data),
        torch.randint(8, (2 * batch * steps,), generator=data),
    )
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches, losses = iter(loader), []
    for _ in rank.steps(5):
        x, label = next(batches)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), label)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(accelerator.gather(loss.detach()))
    return {"wrapper": type(model).__name__, "losses": losses, "weights": accelerator.get_state_dict(model)}


def ddp(rank: Rank) -> dict[str, Any]:
    from accelerate import Accelerator

    dist.init_process_group(rank.backend)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == rank.size and dist.get_backend() == rank.backend
    return train(rank, accelerator)


def test_ddp_trains_to_the_weights_of_gloo() -> None:
    results = accelerate.run(ddp)
    assert results["phalanx"][0]["wrapper"] == "DistributedDataParallel"
    assert_equal(results["phalanx"], results["gloo"])
    assert_equal(results["phalanx"][0]["weights"], results["phalanx"][1]["weights"])
