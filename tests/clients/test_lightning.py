"""Lightning: strategies that are given the name of the back end."""

from typing import Any

import torch
import torch.distributed as dist

from clients import Client, Rank, assert_equal

lightning = Client("lightning==2.6.*")


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(1)
    layers = [part for _ in range(4) for part in (torch.nn.Linear(512, 512), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers, torch.nn.Linear(512, 8))


def train(rank: Rank, strategy: Any, parallelize: Any = None) -> dict[str, Any]:
    """Trains on the batches that Lightning gives to each rank. Every rank returns its losses and the whole weights."""
    import lightning as lit

    class Module(lit.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = make_model(), []

        def configure_model(self) -> None:
            if parallelize is not None:
                parallelize(self)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            x, label = batch
            loss = torch.nn.functional.cross_entropy(self.model(x), label)
            self.log("loss", loss, sync_dist=True)
            self.losses.append(self.all_gather(loss.detach()))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.model.parameters(), lr=0.1)

        def on_train_batch_start(self, batch: Any, number: int) -> None:
            rank.begin_step()

        def on_train_batch_end(self, outputs: Any, batch: Any, number: int) -> None:
            rank.end_step()

    steps, batch = rank.count(5), 8
    data = torch.Generator().manual_seed(2)
    rows = 2 * batch * steps
    inputs, labels = torch.randn(rows, 512, generator=data), torch.randint(8, (rows,), generator=data)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=batch)
    module = Module()
    trainer = lit.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=True,
        default_root_dir=rank.folder,
    )
    trainer.fit(module, loader)
    weights = {}
    for name, value in module.model.state_dict().items():
        weights[name] = value.full_tensor() if hasattr(value, "full_tensor") else value
    backend, mean = dist.get_backend(), trainer.callback_metrics["loss"]
    return {"backend": backend, "mean of the last loss": mean, "losses": module.losses, "weights": weights}


def ddp(rank: Rank) -> dict[str, Any]:
    from lightning.pytorch.strategies import DDPStrategy

    return train(rank, DDPStrategy(process_group_backend=rank.backend))


def fully_sharded(rank: Rank) -> dict[str, Any]:
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    def parallelize(module: Any) -> None:
        for layer in module.model:
            fully_shard(layer, mesh=module.device_mesh["data_parallel"])
        fully_shard(module.model, mesh=module.device_mesh["data_parallel"])

    strategy = ModelParallelStrategy(
        data_parallel_size=2,
        tensor_parallel_size=1,
        process_group_backend=rank.backend,
        save_distributed_checkpoint=False,
    )
    return train(rank, strategy, parallelize)


def tensor_parallel(rank: Rank) -> dict[str, Any]:
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def parallelize(module: Any) -> None:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(), "6": RowwiseParallel()}
        parallelize_module(module.model, module.device_mesh["tensor_parallel"], plan)

    strategy = ModelParallelStrategy(
        data_parallel_size=1,
        tensor_parallel_size=2,
        process_group_backend=rank.backend,
        save_distributed_checkpoint=False,
    )
    return train(rank, strategy, parallelize)


def check(function: Any, what: str) -> list[dict[str, Any]]:
    results = lightning.run(function, what=what)
    assert [result.pop("backend") for result in results["phalanx"]] == ["phalanx"] * 2
    assert [result.pop("backend") for result in results["gloo"]] == ["gloo"] * 2
    assert_equal(results["phalanx"], results["gloo"])
    first, second = results["phalanx"]
    assert_equal(first["weights"], second["weights"])
    return results["phalanx"]


def test_ddp_trains_to_the_weights_of_gloo() -> None:
    results = check(ddp, "DDPStrategy")
    losses = results[0]["losses"][-1]
    assert (
        losses.shape == (2,) and losses[0] != losses[1]
    )  # each rank has batches of its own, and all_gather both losses


def test_fully_shard_in_a_model_parallel_strategy_trains_to_the_weights_of_gloo() -> None:
    results = check(fully_sharded, "ModelParallelStrategy, fully_shard")
    losses = results[0]["losses"][-1]
    assert losses.shape == (2,) and losses[0] != losses[1]


def test_tensor_parallelism_in_a_model_parallel_strategy_trains_to_the_weights_of_gloo() -> None:
    results = check(tensor_parallel, "ModelParallelStrategy, tensor parallel")
    losses = results[0]["losses"][-1]
    assert losses.shape == (2,) and losses[0] == losses[1]  # both have the same batch
