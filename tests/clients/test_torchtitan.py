"""torchtitan: its trainer takes torch's default back end of the device.

`torch.distributed.Backend.default_device_backend_map["cpu"] = "phalanx"`, before the trainer is made.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from clients import Client, Rank, assert_equal

torchtitan = Client("torchtitan==0.3.*", "triton")  # which it imports
VOCABULARY, LENGTH, BATCH = 2048, 64, 4


def train(rank: Rank, parallelism: dict[str, Any], data_parallel: int) -> dict[str, Any]:
    """torchtitan's trainer, with a small llama and a data loader that draws one batch."""
    torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan wants an accelerator where none is found
    dist.Backend.default_device_backend_map["cpu"] = rank.backend
    from torchtitan.components import metrics
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

    # It asks the device for its name and for counters of its memory, which torch does not have for the CPU.
    memory = SimpleNamespace(device_name="cpu", reset_peak_stats=lambda: None)
    memory.get_peak_stats = lambda: metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)
    metrics.build_device_memory_monitor = lambda: memory
    logged: list[tuple[float, float, float]] = []

    class Metrics(metrics.MetricsProcessor):
        @dataclass(kw_only=True, slots=True)
        class Config(metrics.MetricsProcessor.Config):
            pass

        def log(
            self, step: int, average: float, largest: float, norm: float, extra_metrics: dict[str, Any] | None = None
        ) -> None:
            logged.append((average, largest, norm))

    class Tokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            super().__init__()

        def encode(self, *_: Any, **__: Any) -> list[int]:
            raise NotImplementedError

        decode = encode

        def get_vocab_size(self) -> int:
            return VOCABULARY

    class Tokens(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Any, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> None:
            draws = torch.Generator().manual_seed(0)
            tokens = torch.randint(VOCABULARY, (BATCH, seq_len + 1), generator=draws)
            self.tokens = tokens.narrow(0, dp_rank * local_batch_size, local_batch_size)

        def __iter__(self) -> Any:
            while True:  # the same each time, which the model learns by heart
                yield {"input": self.tokens[:, :-1]}, self.tokens[:, 1:].contiguous()

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    model = model_registry("debugmodel")
    for layer in model.model.layers:  # in place of the flexible attention, which torch trains on GPUs only
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    trainer = Trainer.Config(
        model_spec=model,
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=BATCH // data_parallel,
            seq_len=LENGTH,
            steps=rank.count(4),
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", **parallelism),  # the others want a newer torch
        metrics=Metrics.Config(log_freq=1),
        tokenizer=Tokenizer.Config(),
        dataloader=Tokens.Config(),
        checkpoint=CheckpointManager.Config(),
        activation_checkpoint=None,
        dump_folder=str(rank.folder / f"dump{rank.rank}"),
    ).build()
    assert dist.get_backend() == rank.backend
    # The same weights for every kind of parallelism, which torch does not draw on CPUs.
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for each in trainer.model_parts[0].parameters():
            whole = torch.randn(each.shape, generator=draws) * (0.02 if each.dim() > 1 else 0.1) + (each.dim() == 1)
            part = distribute_tensor(whole, each.device_mesh, each.placements) if isinstance(each, DTensor) else whole
            each.copy_(part)
    batches = trainer.batch_generator(trainer.dataloader)
    for step in rank.steps(4):
        trainer.step = step + 1
        trainer.train_step(batches)
    weights = {
        name: each.full_tensor() if isinstance(each, DTensor) else each.detach()
        for name, each in trainer.model_parts[0].named_parameters()
    }
    trainer.close()
    return {"logged": logged, "weights": weights}


KINDS = {
    "dp": ({"data_parallel_shard_degree": 2}, 2),
    "dp, replicated": ({"data_parallel_shard_degree": 1, "data_parallel_replicate_degree": 2}, 2),
    "tp": ({"data_parallel_shard_degree": 1, "tensor_parallel_degree": 2}, 1),
}


@pytest.fixture(scope="module")
def alone() -> Any:
    return torchtitan.run(train, {}, 1, backends=["phalanx"], ranks=1)["phalanx"][0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_trainer_comes_to_the_losses_of_one_process(kind: str, alone: Any) -> None:
    # Its FSDP scales while it sums, which gloo refuses: "Cannot use ReduceOp.PREMUL_SUM with Gloo".
    backends = ["phalanx"] if kind.startswith("dp") else ["phalanx", "gloo"]
    results = torchtitan.run(train, *KINDS[kind], backends=backends, what=kind)
    first, second = results["phalanx"]
    assert_equal(first, second)
    if "gloo" in results:
        assert_equal(first, results["gloo"][0])
    # The ranks add in another order than one process does; and the largest loss of a rank is not the average.
    averages, norms = ([step[which] for step in first["logged"]] for which in (0, 2))
    count = len(alone["logged"])
    assert_equal(averages[:count], [average for average, _, _ in alone["logged"]], rtol=1e-3)
    assert_equal(norms[:count], [norm for _, _, norm in alone["logged"]], rtol=1e-2)
    assert len(averages) >= 4 and averages[-1] < averages[0]
