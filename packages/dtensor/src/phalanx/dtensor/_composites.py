"""Functions of torch that make plain tensors by themselves, from sizes alone, and put them to the tensors given.

`one_hot` compares with a range, a recurrent layer begins with zeros: torch makes these before any op of a DTensor is
seen, so the op would get a plain tensor together with a DTensor and refuse. Every rank makes the same tensors, so
within these functions plain tensors count as replicated.
"""

from typing import Any

import torch

from phalanx.dtensor import _compile, _mode
from phalanx.dtensor._mesh import coordinate_of
from phalanx.dtensor._op_plan import flat
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor._torch_compat import before_autograd

_NAMES = (
    "combinations",
    "embedding_bag",
    "embedding_bag.padding_idx",
    "gru.input",
    "gru_cell",
    "istft",
    "linalg_matrix_power",
    "lstm.input",
    "lstm_cell",
    "nanquantile",
    "nanquantile.scalar",
    "one_hot",
    "quantile",
    "quantile.scalar",
    "rnn_relu.input",
    "rnn_relu_cell",
    "rnn_tanh.input",
    "rnn_tanh_cell",
)


def _replicating(run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not any(isinstance(one, DTensor) for one in flat((*args, *kwargs.values()))):
        return run(*args, **kwargs)
    if run.func.__self__._schema.name == "aten::one_hot":
        _check_classes(*args, **kwargs)
    with _mode.implicit_replication():
        return run(*args, **kwargs)


def _check_classes(index: Any, num_classes: int = -1) -> None:
    """The checks of one_hot that torch leaves out for tensors with a __torch_dispatch__: the result would be zeros."""
    if not isinstance(index, DTensor) or not index.numel() or _compile.is_traced():
        return
    spec = index._spec
    if spec.is_replicated:
        if coordinate_of(spec.mesh) is None:
            return
        low, high = (int(one) for one in torch.aminmax(index._local_tensor))
    elif _mode.is_strict():  # nothing may be sent
        return
    else:
        with torch.no_grad():
            low, high = int(index.min().item()), int(index.max().item())
    if low < 0:
        raise RuntimeError("Class values must be non-negative.")
    if num_classes > 0 and high >= num_classes:
        raise RuntimeError("Class values must be smaller than num_classes.")


_library = before_autograd(_NAMES, _replicating)  # from now on these functions take DTensors
