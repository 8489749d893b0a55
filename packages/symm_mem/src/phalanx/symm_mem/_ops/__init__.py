"""The ops of torch.ops.symm_mem as torch.ops.phalanx: the same names and schemas, on CPU and CUDA.

On CUDA all work is put on torch's current stream: kernels of the core, and copies and sums of torch between barriers of
the streams. The host waits for a stream only in all_to_all_vdev.py, as it must read the splits.

_common.py                 checks, counterparts of a tensor on other ranks, reductions
all_reduce.py              all_reduce, reduce_scatter, tiles
all_to_all_nd.py           all_to_all of rows or columns of a matrix, sums of parts
all_to_all_vdev.py         all_to_all of rows, by rank and by expert
fused_matmul.py            matmul with the collective before or after it
fused_matmul_cuda.py       the same on CUDA, where copies run during the products
memset32.py                32-bit words
p2p.py                     all_gather, reduce_scatter, the tensors of other ranks
reduce_scatter_offset.py   reduce_scatter of blocks of any sizes
scaled_matmul.py           fused_matmul.py for scaled float8 matrices
unfused.py                 all_gather and reduce_scatter for products that are not fused

Ops of torch for one transport (nccl_*, nvshmem_*) are not here, except for reduce_scatter_offset and all_to_all_nd,
whose Python functions have no transport in their names. The multimem forms are here: multicast is a way to reduce, not
another result.
"""

from collections.abc import Callable
from typing import Any

import torch

from phalanx.collectives import bits, profiling
from phalanx.symm_mem._ops import (  # noqa: F401  # they declare their ops
    all_reduce,
    all_to_all_nd,
    all_to_all_vdev,
    fused_matmul,
    memset32,
    p2p,
    reduce_scatter_offset,
    scaled_matmul,
)
from phalanx.symm_mem._ops._common import OPS, arguments_of
from phalanx.symm_mem._process_group import resolve

_PROFILED = {module.__name__ for module in (all_reduce, all_to_all_nd, all_to_all_vdev, reduce_scatter_offset)}
_libraries: list[Any] = []  # ops exist as long as their library


def register() -> None:
    """Register all ops. A later call does nothing."""
    if _libraries:
        return
    make: Any = torch.library.Library  # public, without types
    library = make("phalanx", "FRAGMENT")
    _libraries.append(library)
    for schema, kernel, fake in OPS:
        name = schema.partition("(")[0]
        library.define(schema)
        run = _profiled(schema, kernel) if kernel.__module__ in _PROFILED else kernel
        for key in ("CPU", "CUDA"):
            library.impl(name, run, key)
        torch.library.register_fake(f"phalanx::{name}", fake, lib=library)
        overload = getattr(torch.ops.phalanx, name).default
        bits.register(library, {name: overload})
        if schema.endswith("-> ()"):  # kept in graphs although they have no result
            torch.fx.has_side_effect(overload)


_COLLECTIVES = {"all_reduce": "allreduce", "reduce_scatter": "_reduce_scatter_base", "all_to_all": "all_to_allv"}


def _profiled(schema: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, shown to torch's profilers as a collective once the group is initialized."""
    names = [argument.split()[-1].partition("=")[0] for argument in arguments_of(schema)]
    if "group_name" not in names:
        return kernel
    name = schema.partition("(")[0]
    collective = next((known for part, known in _COLLECTIVES.items() if part in name), name)
    # Sums of whole tensors on the CPU are one collective of the core each; other ops read peers between two barriers.
    is_counted = "reduce" in name and "tile" not in name and "offset" not in name

    def run(*args: Any, **kwargs: Any) -> Any:
        if not profiling.is_shown():
            return kernel(*args, **kwargs)
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        inputs = [argument for argument in arguments.values() if isinstance(argument, torch.Tensor)][:1]
        out = arguments.get("out")
        outputs = [out] if isinstance(out, torch.Tensor) else inputs
        group = resolve(arguments["group_name"], collective)
        numbered = is_counted and inputs[0].is_cpu and not (arguments.get("split_last_dim") and inputs[0].dim() > 1)
        with profiling.shown(collective, inputs, outputs, group.initialized(), name=group.name, numbered=numbered):
            return kernel(*args, **kwargs)

    return run
