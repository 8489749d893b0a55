"""The private or unlisted parts of torch that this folder relies on. Read in 2.11 to 2.13."""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves as tree_leaves


def is_fake(tensor: Any) -> bool:
    """Whether a tensor has no values: what is done with it is done while tracing."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def is_higher_order(op: Any) -> bool:
    """Whether an op is one that takes functions."""
    return isinstance(op, torch._ops.HigherOrderOperator)


def in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1
