"""Ray Train: its workers, which Ray starts, find the back end by its name."""

import tempfile
from typing import Any

import torch

from clients import Client, Rank, assert_equal

ray = Client("ray[train]==2.60.*")


def train_with_ray(rank: Rank) -> list[dict[str, Any]]:
    """Starts Ray and two workers; returns what the workers have kept."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    def train_on_a_worker(config: dict[str, Any]) -> None:
        import ray.train.torch
        import torch.distributed as dist

        torch.manual_seed(1)
        number = ray.train.get_context().get_world_rank()
        model = ray.train.torch.prepare_model(torch.nn.Linear(64, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.Generator().manual_seed(2 + number)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 64, generator=data)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        kept = {"backend": dist.get_backend(), "wrapper": type(model).__name__, "losses": losses}
        torch.save({**kept, "weights": model.module.state_dict()}, f"{config['folder']}/worker.{number}")

    with tempfile.TemporaryDirectory(prefix="phx-ray-", dir="/tmp") as folder:  # Ray's sockets need short names
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, _temp_dir=folder)
        try:
            TorchTrainer(
                train_on_a_worker,
                train_loop_config={"folder": str(rank.folder)},
                torch_config=TorchConfig(backend=rank.backend),
                scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
                run_config=RunConfig(storage_path=str(rank.folder / "runs")),
            ).fit()
        finally:
            ray.shutdown()
    return [torch.load(rank.folder / f"worker.{number}", weights_only=False) for number in range(2)]


def test_ray_trains_to_the_weights_of_gloo() -> None:
    env = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1"}
    results = {}
    for backend in ("phalanx", "gloo"):  # one after the other: each is a cluster of its own
        results[backend] = ray.run(train_with_ray, backends=[backend], ranks=1, env=env, seconds=400)[backend][0]
        assert [kept.pop("backend") for kept in results[backend]] == [backend] * 2
    assert results["phalanx"][0]["wrapper"] == "DistributedDataParallel"
    assert_equal(results["phalanx"], results["gloo"])
    assert_equal(results["phalanx"][0]["weights"], results["phalanx"][1]["weights"])
