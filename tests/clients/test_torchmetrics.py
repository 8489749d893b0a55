"""torchmetrics: states that are summed, and lists of states of which ranks have parts of different sizes, or none."""

from typing import Any

import torch
import torch.distributed as dist

from clients import Client, Rank, assert_equal

torchmetrics = Client("torchmetrics==1.9.*")


def metrics(rank: Rank) -> dict[str, Any]:
    from torchmetrics import CatMetric, MeanMetric
    from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

    dist.init_process_group(rank.backend)
    mean, values, empty = MeanMetric(), CatMetric(), CatMetric()
    accuracy, curve = MulticlassAccuracy(num_classes=4, average="micro"), BinaryAUROC()
    own = torch.arange(2.0 + 3 * rank.rank) + 10 * rank.rank
    mean.update(own)
    values.update(own)
    if rank.rank == 1:
        empty.update(own)
    accuracy.update(torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 0, 3 * rank.rank]))
    score = torch.rand(50 + 20 * rank.rank, generator=torch.Generator().manual_seed(rank.rank))
    curve.update(score, (score + score.flip(0) > 1).long())
    for _ in rank.steps(1):
        values._computed = None  # or the next call returns what the first one gathered
        gathered = values.compute()
    return {
        "mean": mean.compute(),
        "values": gathered,
        "of one rank": empty.compute(),
        "accuracy": accuracy.compute(),
        "curve": curve.compute(),
    }


def test_metrics_are_those_of_the_values_of_all_ranks() -> None:
    results = torchmetrics.run(metrics, what="compute of uneven values")
    assert_equal(results["phalanx"], results["gloo"])
    for result in results["phalanx"]:
        assert result["values"].tolist() == [0, 1, 10, 11, 12, 13, 14]
        assert result["mean"] == sum([0, 1, 10, 11, 12, 13, 14]) / 7
        assert result["of one rank"].tolist() == [10, 11, 12, 13, 14]
        assert result["accuracy"] == 5 / 8
