"""transformers: tensor parallelism by a model's own plan, generation with it, and the Trainer over DDP."""

from typing import Any

import torch
import torch.distributed as dist

from clients import Client, Rank, assert_equal

transformers = Client("transformers==5.24.*", "accelerate==1.15.*")


def make_model() -> Any:
    """A Llama with two million parameters and random weights, the same on all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=3,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=256,
            pad_token_id=0,
        )
    )


def tokens(rows: int, length: int = 32) -> torch.Tensor:
    return torch.randint(1, 512, (rows, length), generator=torch.Generator().manual_seed(2))


def load_in_parts(rank: Rank) -> Any:
    """The model as each rank reads its part of it from a checkpoint, by the plan that its class has."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    make_model().save_pretrained(rank.folder / "checkpoint")  # the first rank does it
    dist.barrier()
    plan = DistributedConfig(tp_plan="auto")
    return AutoModelForCausalLM.from_pretrained(rank.folder / "checkpoint", distributed_config=plan)


def tensor_parallel(rank: Rank) -> dict[str, Any]:
    if rank.size > 1:
        dist.init_process_group(rank.backend)
        model = load_in_parts(rank)
    else:
        model = make_model()
    part = model.model.layers[0].mlp.up_proj.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch, losses = tokens(2), []
    for _ in rank.steps(3):
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"part": list(getattr(part, "to_local", lambda: part)().shape), "losses": losses}


def generation(rank: Rank) -> dict[str, Any]:
    if rank.size > 1:
        dist.init_process_group(rank.backend)
        model = load_in_parts(rank)
    else:
        model = make_model()
    model.eval()
    prompt = tokens(2, 8)
    for _ in rank.steps(1):
        found = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False, eos_token_id=None
        )
    logits = model(input_ids=prompt).logits
    return {"tokens": found, "logits": logits.detach()}


def trainer(rank: Rank) -> dict[str, Any]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Steps(TrainerCallback):
        def on_step_begin(self, *args: Any, **more: Any) -> None:
            rank.begin_step()

        def on_step_end(self, *args: Any, **more: Any) -> None:
            rank.end_step()

    dist.init_process_group(rank.backend)
    steps = rank.count(5)
    rows = tokens(2 * 2 * steps)
    arguments = TrainingArguments(
        output_dir=str(rank.folder / f"trainer-{rank.rank}"),
        use_cpu=True,
        per_device_train_batch_size=2,
        max_steps=steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    run = Trainer(model=make_model(), args=arguments, train_dataset=data, callbacks=[Steps()])
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    return {
        "backend": dist.get_backend(),
        "wrapper": type(run.model_wrapped).__name__,
        "losses": losses,
        "weights": {name: value.detach() for name, value in run.model.named_parameters()},
    }


def test_tensor_parallel_training_has_the_losses_of_gloo_and_of_one_process() -> None:
    results = transformers.run(tensor_parallel, what="tensor parallel, training")
    assert results["phalanx"][0]["part"] == [256, 256]  # half of the rows of 512
    assert_equal(results["phalanx"], results["gloo"])
    alone = transformers.run(tensor_parallel, backends=["gloo"], ranks=1)["gloo"][0]
    # The parts of a sum are added in another order than one process does.
    assert_equal(results["phalanx"][0]["losses"][:3], alone["losses"], rtol=1e-4)


def test_generation_with_tensor_parallelism_gives_the_tokens_of_gloo_and_of_one_process() -> None:
    results = transformers.run(generation, what="tensor parallel, generation")
    alone = transformers.run(generation, backends=["gloo"], ranks=1)["gloo"][0]
    assert_equal(results["phalanx"], results["gloo"])
    assert_equal(results["phalanx"][0]["tokens"], alone["tokens"])
    # The parts of a sum are added in another order than one process does.
    assert_equal(results["phalanx"][0]["logits"], alone["logits"], rtol=1e-4, atol=1e-5)


def test_the_trainer_trains_to_the_weights_of_gloo() -> None:
    results = transformers.run(trainer, what="Trainer, DDP")
    assert [result.pop("backend") for result in results["phalanx"]] == ["phalanx"] * 2
    assert [result.pop("backend") for result in results["gloo"]] == ["gloo"] * 2
    assert results["phalanx"][0]["wrapper"] == "DistributedDataParallel"
    assert_equal(results["phalanx"], results["gloo"])
    assert_equal(results["phalanx"][0]["weights"], results["phalanx"][1]["weights"])
