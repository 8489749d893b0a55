"""Shapes, strides and dtypes of what an op returns for whole tensors, from torch's own kernels for meta tensors."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from phalanx.dtensor._dtensor_spec import DTensorSpec, TensorMeta
from phalanx.dtensor._layout import contiguous_stride
from phalanx.dtensor._op_plan import call_bound, flat, is_list
from phalanx.dtensor._rules.local_adjustments import results_of
from phalanx.dtensor._torch_compat import fake_mode, in_graph_sizes, tracing_fake_mode, untraced

Form = tuple[Any, tuple[int | None, ...]] | None
"""(type of the container or None, for each entry the number of the tensor or None); None if nothing comes out."""


def results(op: Any, values: Sequence[Any], specs: Sequence[DTensorSpec]) -> tuple[list[TensorMeta], Form] | None:
    """The results of a call for whole tensors, from every argument and the specs of the tensors among them.

    Results that its output_mask leaves out are left out; the form is how they come. None if torch cannot say (sizes
    that depend on values).
    """
    kind = _kind(op, values, specs)
    dtype = None if kind is None else _dtypes.get(kind)
    if dtype is not None:
        return [TensorMeta(specs[0].shape, specs[0].stride, dtype)], (None, (0,))
    found = _asked(op, values, specs)
    if kind is not None and found is not None and found[1] == (None, (0,)):
        shown = found[0][0]
        if shown[:2] == specs[0].tensor_meta[:2]:
            _dtypes[kind] = shown.dtype
    return found


# The result of a pointwise op whose tensors have the same strides has these strides, too; its dtype does not depend on
# the sizes. Asking torch takes longer than the rest of planning: many of its kernels for meta tensors are in Python.
_dtypes: dict[tuple[Any, ...], torch.dtype] = {}
_NUMBERS = (int, float, bool, complex)


def _kind(op: Any, values: Sequence[Any], specs: Sequence[DTensorSpec]) -> tuple[Any, ...] | None:
    """The key on which the dtype of the result depends, or None for other calls."""
    if not _is_pointwise(op) or type(specs[0]) is not DTensorSpec or not specs[0].ndim:
        return None
    shape, stride, _ = specs[0].tensor_meta
    if stride != contiguous_stride(shape):
        return None
    kind: list[Any] = [op, torch.get_default_dtype()]
    for spec in specs:
        if spec.shape != shape or spec.stride != stride:
            return None
        kind.append(spec.dtype)
    for value in values:
        if type(value) in _NUMBERS:
            kind.append(type(value))
        elif value is None or isinstance(value, (str, torch.dtype)):
            kind.append(value)
        elif not isinstance(value, torch.Tensor):
            return None
    return tuple(kind)


@cache
def _is_pointwise(op: Any) -> bool:
    return torch.Tag.pointwise in op.tags


# Their results depend on the device, and "meta" is not a CPU.
_BY_DEVICE = frozenset(("aten.native_batch_norm.default",))


def _asked(op: Any, values: Sequence[Any], specs: Sequence[DTensorSpec]) -> tuple[list[TensorMeta], Form] | None:
    symbols = _symbols(values, specs)
    if symbols:
        # Only the mode that made them can work with them.
        with untraced(), tracing_fake_mode() or fake_mode():
            result = call_bound(op, on_meta(op, values, specs, "cpu"))
        return formed(op, values, result, lambda size: in_graph_sizes(size, symbols))
    with untraced():
        if str(op) not in _BY_DEVICE:
            try:
                result = call_bound(op, on_meta(op, values, specs, "meta"))
            except (NotImplementedError, RuntimeError, TypeError, ValueError):
                pass  # it may have a kernel for fake tensors
            else:
                return formed(op, values, result)
        try:
            with fake_mode():
                result = call_bound(op, on_meta(op, values, specs, "cpu"))
        except Exception:  # torch has many kinds for what it cannot say
            return None
        return formed(op, values, result)


def _symbols(values: Sequence[Any], specs: Sequence[DTensorSpec]) -> list[torch.SymInt]:
    """The sizes that the graph knows: of the whole tensors, of the arguments, and of the local tensors."""
    sizes = [size for spec in specs if type(spec) is not DTensorSpec for size in (*spec.shape, *spec.stride)]
    sizes += flat(values)
    if any(isinstance(size, torch.SymInt) for size in sizes):
        for one in flat(values):
            local = getattr(one, "_local_tensor", None)
            sizes += () if local is None else (*local.shape, *local.stride())
    return [size for size in sizes if isinstance(size, torch.SymInt)]


def refuse(op: Any, values: Sequence[Any], specs: Sequence[DTensorSpec]) -> None:
    """Raise what torch says of shapes that do not go together, before anything is sent: as the op itself.

    For an op without a rule for this call; the arguments are those of `results`.
    """
    if any(type(spec) is not DTensorSpec for spec in specs):
        return
    with untraced():
        try:
            call_bound(op, on_meta(op, values, specs, "meta"))
        except NotImplementedError:
            return
        except (RuntimeError, ValueError, IndexError) as error:
            # Not that it cannot be said for tensors without values.
            if "meta" not in str(error).lower() and "fake" not in str(error).lower():
                raise


def on_meta(op: Any, values: Sequence[Any], specs: Sequence[DTensorSpec], device: str) -> list[Any]:
    """The arguments with tensors of no values in the place of their tensors."""
    left = iter(specs)

    def made(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            spec = next(left)
            return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
        return [made(one) for one in value] if is_list(value) else value

    found = [made(value) for value in values]
    for index, argument in enumerate(op._schema.arguments):
        if argument.name == "device" and found[index] is not None:
            found[index] = torch.device(device)
        elif argument.name == "pin_memory":
            found[index] = None
    return found


def formed(
    op: Any, values: Sequence[Any], result: Any, known: Callable[[Any], Any] = lambda size: size
) -> tuple[list[TensorMeta], Form] | None:
    """The tensors of a result and its form, each size as `known` gives it."""
    if result is None:
        return [], None
    kind = type(result) if isinstance(result, (list, tuple)) else None
    kept = results_of(op, values, result)
    if not all(isinstance(one, torch.Tensor) for one in kept):
        return None
    numbers = {id(one): number for number, one in enumerate(kept)}
    entries = tuple(
        numbers.get(id(one)) if isinstance(one, torch.Tensor) else None for one in (result if kind else [result])
    )
    tensors = [
        TensorMeta(torch.Size(map(known, one.shape)), tuple(map(known, one.stride())), one.dtype) for one in kept
    ]
    return tensors, (kind and (list if issubclass(kind, list) else tuple), entries)
