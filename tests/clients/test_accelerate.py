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
    assert accelerator.num_processes == rank.size and dist.get_backend() == rank.backend
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
    return train(rank, accelerator)


def fsdp(rank: Rank) -> dict[str, Any]:
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

    dist.init_process_group(rank.backend)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    # accelerate turns FSDP on for accelerators only; with these two lines it does the same on CPU.
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    return train(rank, accelerator)


def gathers(rank: Rank) -> dict[str, Any]:
    """What programs do between steps: gather uneven batches, reduce, broadcast, and gather objects."""
    from accelerate import Accelerator
    from accelerate.utils import broadcast, gather_object, reduce

    dist.init_process_group(rank.backend)
    accelerator = Accelerator(cpu=True)
    own = torch.arange(3.0 + rank.rank) + 10 * rank.rank
    even = {"a": torch.full((2, 3), float(rank.rank)), "b": [torch.tensor([rank.rank, -1])]}
    for _ in rank.steps(1):
        gathered = accelerator.gather(even)
    return {
        "gathered": gathered,
        "padded": accelerator.gather(accelerator.pad_across_processes(own, pad_index=-1)),
        "mean": reduce(torch.full((4,), 1.0 + rank.rank), "mean"),
        "broadcast": broadcast(own[:3].clone(), from_process=1),
        "objects": gather_object([f"rank {rank.rank}"]),
    }


def test_ddp_trains_to_the_weights_of_gloo() -> None:
    results = accelerate.run(ddp, what="DDP")
    assert results["phalanx"][0]["wrapper"] == "DistributedDataParallel"
    assert_equal(results["phalanx"], results["gloo"])
    assert_equal(results["phalanx"][0]["weights"], results["phalanx"][1]["weights"])


def test_fsdp2_trains_to_the_weights_of_gloo() -> None:
    results = accelerate.run(fsdp, what="FSDP2")
    assert results["phalanx"][0]["wrapper"].startswith("FSDP")
    assert_equal(results["phalanx"], results["gloo"])


def test_gather_and_the_like_give_what_every_rank_gave() -> None:
    results = accelerate.run(gathers, what="gather of two small tensors")
    assert_equal(results["phalanx"], results["gloo"])
    for result in results["phalanx"]:
        assert_equal(result["gathered"]["a"], torch.tensor([0.0, 0.0, 1.0, 1.0])[:, None].expand(4, 3))
        assert result["gathered"]["b"][0].tolist() == [0, -1, 1, -1]
        assert result["padded"].tolist() == [0, 1, 2, -1, 10, 11, 12, 13]
        assert result["mean"].tolist() == [1.5] * 4
        assert result["broadcast"].tolist() == [10, 11, 12]
        assert result["objects"] == ["rank 0", "rank 1"]
