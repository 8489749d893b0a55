"""ignite over a group that exists: its engine, collectives and metrics. The model is wrapped without `auto_model`."""

from typing import Any

import torch
import torch.distributed as dist

from clients import Client, Rank, assert_equal

ignite = Client("pytorch-ignite==0.5.*")


def train(rank: Rank) -> dict[str, Any]:
    import ignite.distributed as idist
    from ignite.engine import Engine, Events
    from ignite.metrics import Accuracy

    dist.init_process_group(rank.backend)
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Tanh(), torch.nn.Linear(512, 4))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data, losses = torch.Generator().manual_seed(2 + rank.rank), []

    def update(engine: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        x, label = batch
        found = model(x)
        loss = torch.nn.functional.cross_entropy(found, label)
        loss.backward()
        optimizer.step()
        losses.append(idist.all_gather(loss.detach()))
        return found, label

    engine = Engine(update)
    Accuracy().attach(engine, "accuracy")
    engine.add_event_handler(Events.ITERATION_STARTED, lambda: rank.begin_step())
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: rank.end_step())
    batches = [
        (torch.randn(8, 256, generator=data), torch.randint(4, (8,), generator=data)) for _ in range(rank.count(5))
    ]
    engine.run(batches, max_epochs=1)
    return {
        "size": idist.get_world_size(),
        "losses": losses,
        "accuracy": engine.state.metrics["accuracy"],  # of the batches of both ranks
        "sum": idist.all_reduce(torch.tensor([1.0 + rank.rank]), "SUM"),
        "words": idist.all_gather(f"rank {rank.rank}"),
        "weights": model.module.state_dict(),
    }


def test_ignite_over_a_group_that_exists_trains_to_the_weights_of_gloo() -> None:
    results = ignite.run(train, what="engine, DDP")
    assert_equal(results["phalanx"], results["gloo"])
    first, second = results["phalanx"]
    assert first["size"] == 2 and first["sum"].tolist() == [3.0] and first["words"] == ["rank 0", "rank 1"]
    assert first["losses"][0][0] != first["losses"][0][1] and first["accuracy"] == second["accuracy"]
    assert_equal(first["weights"], second["weights"])
