"""How the model is sharded over the ranks. Everything that knows about ranks in the model is in this file.

Two linear layers make a pair (Megatron-LM, https://arxiv.org/abs/1909.08053): the first is cut by its output features,
the second by its input features, so each rank works on its own features in between and nothing is sent there. What is
left is to bring the input of the pair to every rank, and to add up the partial outputs of all ranks. Between pairs the
activations, the *stream*, are kept in one of two ways:

    whole   every rank has the whole stream:        before a pair: nothing      after it: all_reduce
    split   every rank has its own characters of    before a pair: all_gather   after it: reduce_scatter
            each piece (sequence parallelism,
            https://arxiv.org/abs/2205.05198)

The model itself is an ordinary one, and there is no code for the backward pass: its tensors are DTensors, which know
how they are spread, and so do their gradients.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from phalanx.dtensor import DTensor, Replicate, Shard, distribute_module
from phalanx.dtensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from phalanx.tools.demo.model import Transformer

SEQUENCE = 0  # the dim of the sequence


def _whole_stream() -> dict[str, ParallelStyle]:
    pair: dict[str, ParallelStyle] = {}
    for first, second in (("attention.qkv", "attention.out"), ("mlp.fc1", "mlp.fc2")):
        pair[first] = ColwiseParallel(use_local_output=False)
        pair[second] = RowwiseParallel(use_local_output=False)
    return pair


def _split_stream() -> dict[str, ParallelStyle]:
    pair: dict[str, ParallelStyle] = {"*_norm": SequenceParallel(sequence_dim=SEQUENCE)}
    for first, second in (("attention.qkv", "attention.out"), ("mlp.fc1", "mlp.fc2")):
        pair[first] = ColwiseParallel(input_layouts=Shard(SEQUENCE), use_local_output=False)
        pair[second] = RowwiseParallel(output_layouts=Shard(SEQUENCE), use_local_output=False)
    return pair


def shard_parameters(model: Transformer, mesh: DeviceMesh) -> None:
    """Shard the linear layers over the ranks; norms and embeddings are replicated. Collective.

    To show both ways, the first half of the blocks has the whole stream on every rank, the second half splits it.

    Args:
        model: With rank 0's weights; changed in place.
        mesh: The ranks.
    """
    split_from = len(model.blocks) // 2
    for index, block in enumerate(model.blocks):
        parallelize_module(block, mesh, _split_stream() if index >= split_from else _whole_stream())
    parallelize_module(
        model,
        mesh,
        {
            f"blocks.{split_from}": PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=Shard(SEQUENCE), use_local_output=False
            ),
            "norm": SequenceParallel(sequence_dim=SEQUENCE),
            # Each rank has its part of the vocabulary, and so has the loss.
            "head": ColwiseParallel(input_layouts=Shard(SEQUENCE), use_local_output=False),
        },
    )
    distribute_module(model, mesh)  # what is left: replicated


def settle_gradients(model: nn.Module) -> None:
    """Bring each gradient where its weight is: those of copies are sums over the ranks until then. Collective."""
    for parameter in model.parameters():
        if isinstance(parameter.grad, DTensor) and parameter.grad.placements != parameter.placements:  # type: ignore[attr-defined]
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]


def full_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each tensor in full, on every rank. Collective."""
    return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in tensors.items()}
