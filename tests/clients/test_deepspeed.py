"""DeepSpeed: `deepspeed.init_distributed(dist_backend="phalanx")`, and its training with ZeRO in the stages 0 to 3."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from clients import Client, Rank, assert_equal

# It is a source package without anything to compile, whose build looks for torch.
deepspeed = Client(
    "deepspeed==0.19.*", options=["--no-build-isolation"], build=["setuptools", "wheel"], check="import deepspeed"
)
ENV = {"DS_ACCELERATOR": "cpu"}


def start(rank: Rank) -> Any:
    import deepspeed

    # Or every rank would compile DeepSpeed's own kernel for all_reduce in inference, which takes a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=rank.backend, verbose=False)
    assert dist.get_backend() == rank.backend
    return deepspeed


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(1)
    layers = [torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256), torch.nn.GELU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(256, 256, bias=False))


def zero(rank: Rank, stage: int) -> dict[str, Any]:
    ds = start(rank)
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    if stage == 3:
        with ds.zero.Init(config_dict_or_path=settings):
            model = make_model()
    else:
        model = make_model()
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=settings)
    assert engine.zero_optimization_stage() == stage
    data = torch.Generator().manual_seed(rank.rank)
    losses = []
    for _ in rank.steps(5):
        x = torch.randn(4, 256, generator=data)
        loss = (engine(x) - x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights = []
    for each in model.parameters():
        with ds.zero.GatheredParameters(each, enabled=stage == 3):
            weights.append(each.detach().clone())
    return {"losses": losses, "weights": weights}


def alone(rank: Rank, ranks: int) -> list[float]:
    """The losses of the ranks of such a training, step by step, from one process without DeepSpeed."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    data = [torch.Generator().manual_seed(each) for each in range(ranks)]
    losses: list[float] = []
    for _ in range(5):
        optimizer.zero_grad()
        of_ranks = []
        for generator in data:
            x = torch.randn(4, 256, generator=generator)
            of_ranks.append((model(x) - x).square().mean())
        torch.stack(of_ranks).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses += [each.item() for each in of_ranks]
    return losses


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_trains_to_the_weights_of_gloo_and_the_losses_of_one_process(stage: int) -> None:
    results = deepspeed.run(zero, stage, env=ENV, what=f"ZeRO {stage}")
    assert_equal(results["phalanx"], results["gloo"])
    first, second = results["phalanx"]
    assert_equal(first["weights"], second["weights"])
    expected = alone(Rank("", 0, 1, __file__), 2)
    found = [loss for pair in zip(first["losses"], second["losses"], strict=True) for loss in pair]
    assert_equal(found[:10], expected, rtol=1e-4)  # one process adds the gradients in another order


def inference(rank: Rank) -> list[torch.Tensor]:
    """The call of DeepSpeed's tensor-parallel layers, and collectives of deepspeed.comm."""
    start(rank)
    import deepspeed.comm as comm

    results = []
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.arange(4096, dtype=torch.float32).to(dtype) * (rank.rank + 1)
        comm.inference_all_reduce(x)
        gathered = torch.empty(8192, dtype=dtype)
        comm.all_gather_into_tensor(gathered, x)
        part = torch.empty(2048, dtype=dtype)
        comm.reduce_scatter_tensor(part, x)
        swapped = torch.empty_like(x)
        comm.all_to_all_single(swapped, x + rank.rank)
        comm.broadcast(x, 1)
        results += [x, gathered, part, swapped]
    comm.barrier()
    return results


def test_deepspeeds_collectives_give_what_they_give_on_gloo() -> None:
    results = deepspeed.run(inference, env=ENV)
    assert_equal(results["phalanx"], results["gloo"])
