"""The parts of a model that know about ranks. All communication of the model is in this file.

Two linear layers make a pair (Megatron-LM, https://arxiv.org/abs/1909.08053): the first is cut by its output features,
the second by its input features, so each rank works on its own features in between and nothing is sent there. What is
left is to bring the input of the pair to every rank, and to add up the partial outputs of all ranks. Between pairs the
activations, the *stream*, are kept in one of two ways:

    Whole   every rank has the whole stream:        enter: nothing        leave: all_reduce
    Split   every rank has its own characters of    enter: all_gather     leave: reduce_scatter
            each piece (sequence parallelism,
            https://arxiv.org/abs/2205.05198)

There is no code for the backward pass here, because the collectives are differentiable. One rule makes that right:
**the loss is the sum over the ranks of what each of them returns.** Then the backward of all_reduce is all_reduce, that
of all_gather is reduce_scatter, and the reverse. Where ranks hold copies of one weight, each copy's gradient is what
that copy contributed, and the gradient of the weight is their sum: `sum_copies`.
"""

from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from phalanx.collectives import (
    all_gather_tensor,
    all_reduce,
    all_to_all_single,
    broadcast,
    reduce_scatter_tensor,
    wait_tensor,
)

# ---- collectives, each waited for at once ----------------------------------------------------------------------------
# Without wait_tensor the result would be waited for where it is used first, which here is the next line.


def sum_over_ranks(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of every rank's `x`."""
    return wait_tensor(all_reduce(x, "sum", group))


def sum_and_split(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of dim 0 of the sum of every rank's `x`."""
    return wait_tensor(reduce_scatter_tensor(x, "sum", 0, group))


def join(part: torch.Tensor, group: dist.ProcessGroup, dim: int = 0) -> torch.Tensor:
    """The parts of all ranks, one after another along `dim`."""
    return wait_tensor(all_gather_tensor(part.contiguous(), dim, group))


def exchange(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Part r of dim 0 goes to rank r; what comes back has the part from rank r at place r."""
    return wait_tensor(all_to_all_single(x.contiguous(), None, None, group))


def from_rank_0(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Rank 0's `x`; that of the other ranks only says the shape."""
    return wait_tensor(broadcast(x, 0, group))


def own_part(x: torch.Tensor, group: dist.ProcessGroup, dim: int = 0) -> torch.Tensor:
    """This rank's part of dim `dim`; nothing is sent."""
    return x.chunk(group.size(), dim)[group.rank()]


# ---- the stream ------------------------------------------------------------------------------------------------------


class Stream(Protocol):
    """How the activations are kept between pairs of linear layers."""

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """From the stream to the input of a pair, whole on every rank."""

    def leave(self, partial: torch.Tensor) -> torch.Tensor:
        """From the partial outputs of a pair to the stream."""


class Whole:
    """Every rank has the whole stream."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def leave(self, partial: torch.Tensor) -> torch.Tensor:
        return sum_over_ranks(partial, self._group)


class Split:
    """Every rank has its own part of dim 0 of the stream: some of the characters of each piece."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return join(x, self._group)

    def leave(self, partial: torch.Tensor) -> torch.Tensor:
        return sum_and_split(partial, self._group)


# ---- linear layers ---------------------------------------------------------------------------------------------------


class ParallelLinear(nn.Module):
    """A linear layer without bias whose weight is dealt to the ranks.

    Args:
        in_features, out_features: Of the whole layer.
        group: The ranks.
    """

    cut_dim: int  # of the weight, [out_features, in_features]

    def __init__(self, in_features: int, out_features: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        shape = [out_features, in_features]
        shape[self.cut_dim] //= group.size()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


class ColumnParallelLinear(ParallelLinear):
    """From whole inputs to this rank's output features."""

    cut_dim = 0


class RowParallelLinear(ParallelLinear):
    """From this rank's input features to partial outputs, which must be summed over the ranks."""

    cut_dim = 1


# ---- weights ---------------------------------------------------------------------------------------------------------


def cut_dims(model: nn.Module) -> dict[str, int]:
    """Names of the parameters that are dealt to the ranks, and along which dim. Of all others each rank has a copy."""
    return {
        f"{name}.weight": module.cut_dim for name, module in model.named_modules() if isinstance(module, ParallelLinear)
    }


def whole_shapes(model: nn.Module, group: dist.ProcessGroup) -> dict[str, torch.Size]:
    """Names of all parameters, and the shapes of the whole weights that they are part of."""
    dims = cut_dims(model)
    shapes = {}
    for name, parameter in model.named_parameters():
        shape = list(parameter.shape)
        if name in dims:
            shape[dims[name]] *= group.size()
        shapes[name] = torch.Size(shape)
    return shapes


def load_weights(model: nn.Module, weights: dict[str, torch.Tensor], group: dist.ProcessGroup) -> None:
    """Give every parameter this rank's part of a whole weight.

    Args:
        model: Built of the layers above.
        weights: Whole weights by the parameters' names, the same on all ranks.
        group: The ranks.
    """
    dims = cut_dims(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = weights[name]
            parameter.copy_(own_part(whole, group, dims[name]) if name in dims else whole)


def sum_copies(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replace the gradient of each parameter by the sum over all ranks, in one all_reduce. Collective.

    Args:
        parameters: Those that every rank has a copy of.
        group: The ranks.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    sums = torch.split(sum_over_ranks(flat, group), [gradient.numel() for gradient in gradients])
    for gradient, total in zip(gradients, sums, strict=True):
        gradient.copy_(total.view_as(gradient))
