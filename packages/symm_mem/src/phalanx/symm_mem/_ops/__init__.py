"""The ops of torch.ops.symm_mem as torch.ops.phalanx: the same names and schemas, on CPU and CUDA.

On CUDA everything is put on torch's current stream: kernels of the core, and copies and sums of torch's between
barriers of the streams. Nothing waits for a stream but experts.py, whose splits the host must read.

peers.py        a tensor's counterparts on the other ranks
staging.py      memory in which the fused ops leave their parts for the others
whole.py        a tensor gathered whole, a product scattered whole
experts.py      all_to_all of rows, by rank and by expert
fused.py        matmul with the collective before or after it
fused_cuda.py   the same on CUDA, where the copies go beside the products
offsets.py      reduce_scatter of blocks that the caller cuts
reductions.py   all_reduce, reduce_scatter, tiles
scaled.py       the same of scaled float8 matrices
transfers.py    all_gather, reduce_scatter, the tensors of other ranks
words.py        32-bit words

What torch has for one transport only is not here (nccl_*, nvshmem_*), but for reduce_scatter_offset, which its Python
function has without the name of the transport. The multimem forms are here, as multicast is something that a device
does for a reduction, not another result.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch

from phalanx.collectives import bits, profiling
from phalanx.symm_mem._groups import resolve
from phalanx.symm_mem._ops import experts, fused, offsets, reductions, scaled, transfers, words

_libraries: list[Any] = []
_unregistered: list[ImportError] = []  # why, at most one


def register() -> None:
    """Register all ops. A later call does nothing. Warns where that is impossible: the rest works without them."""
    if _libraries or _unregistered:
        return
    try:
        _register()
    except Exception as error:  # such as under torch::deploy, whose interpreters cannot register ops
        _libraries.clear()
        found = ImportError(f"ops cannot be registered with torch: {type(error).__name__}: {error}")
        _unregistered.append(found)
        warnings.warn(f"phalanx.symm_mem has no ops in torch.ops.phalanx: {found}", stacklevel=3)


def _register() -> None:
    make: Any = torch.library.Library  # public, without types
    library = make("phalanx", "FRAGMENT")
    _libraries.append(library)
    for module in (experts, fused, offsets, reductions, scaled, transfers, words):
        for schema, kernel, fake in module.OPS:
            name = schema.partition("(")[0]
            library.define(schema)
            run = _shown(schema, kernel) if module in (experts, offsets, reductions) else kernel
            for key in ("CPU", "CUDA"):
                library.impl(name, run, key)
            torch.library.register_fake(f"phalanx::{name}", fake, lib=library)
            bits.register(library, {name: getattr(torch.ops.phalanx, name).default})
            if schema.endswith("-> ()"):  # kept in graphs though nothing comes of them
                torch.fx.node.has_side_effect(getattr(torch.ops.phalanx, name).default)


_COLLECTIVES = {"all_reduce": "allreduce", "reduce_scatter": "_reduce_scatter_base", "all_to_all": "all_to_allv"}


def _shown(schema: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, which torch's profilers see as a collective once the ranks of the group have met."""
    listed = schema[schema.index("(") + 1 : schema.rindex(") ->")].split(", ")
    names = [each.split()[-1].partition("=")[0] for each in listed if each != "*"]
    if "group_name" not in names:
        return kernel
    name = schema.partition("(")[0]
    collective = next((known for part, known in _COLLECTIVES.items() if part in name), name)
    # Sums of whole tensors on the CPU are one collective of the core each. Other ops read peers between two barriers.
    is_counted = "reduce" in name and "tile" not in name and "offset" not in name

    def run(*args: Any, **kwargs: Any) -> Any:
        if not profiling.is_shown():
            return kernel(*args, **kwargs)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        inputs = [each for each in given.values() if isinstance(each, torch.Tensor)][:1]
        out = given.get("out")
        outputs = [out] if isinstance(out, torch.Tensor) else inputs
        group = resolve(given["group_name"])
        numbered = is_counted and inputs[0].is_cpu and not (given.get("split_last_dim") and inputs[0].dim() > 1)
        with profiling.shown(collective, inputs, outputs, group.met(), name=group.name, numbered=numbered):
            return kernel(*args, **kwargs)

    return run


def op(name: str) -> Any:
    """An op of torch.ops.phalanx that `register` registers.

    Raises:
        ImportError: The ops could not be registered; the text says why.
    """
    if _unregistered:
        raise ImportError(f"{name}: {_unregistered[0]}")
    return getattr(torch.ops.phalanx, name)
