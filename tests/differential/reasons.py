"""Where gloo and phalanx differ, each with its reason. A difference that no row here explains is an error.

`gloo` and `ours` are what the two did: "right", "wrong" (what they left in memory is not what one process computes),
"undefined" (they returned, though the call has no one meaning), or the type of an error. Fields are patterns as of a
shell; the first row that fits counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

# Calls that end the process in gloo.
GLOO_CRASHES: tuple[Callable[[Any], bool], ...] = (
    # It reads and writes past the ends of its memory.
    lambda case: case.entry in ("all_to_all_single: negative split", "all_to_all_single: no multiple"),
    lambda case: case.entry == "pg.send: negative rank",
    lambda case: case.kind.startswith("reduce_scatter_tensor") and case.layout == "scalar",
)


@dataclass(frozen=True)
class Reason:
    """One difference."""

    gloo: str
    ours: str
    why: str
    kind: str = "*"
    entry: str = "*"
    layout: str = "*"
    dtype: str = "*"
    op: str = "*"

    def fits(self, case: object, gloo: str, ours: str) -> bool:
        fields = {name: str(getattr(case, name)) for name in ("kind", "entry", "layout", "dtype", "op")}
        fields |= {"gloo": gloo, "ours": ours}
        return all(
            any(fnmatchcase(value, pattern) for pattern in getattr(self, name).split("|"))
            for name, value in fields.items()
        )


REASONS: tuple[Reason, ...] = (
    # ---- ours is right, and gloo is wrong ----
    Reason("wrong", "right", "reduce: gloo overwrites the inputs of ranks that are not the root", kind="reduce"),
    Reason(
        "wrong", "right", "strides: gloo takes a view as if it were contiguous", layout="strided|transposed|expanded"
    ),
    Reason("wrong", "right", "strides: scatter of columns takes the input as if it were contiguous", layout="columns"),
    Reason("wrong", "right", "gloo does not read the conjugate bit", layout="conj"),
    Reason(
        "wrong",
        "right",
        "inputs and outputs that overlap: gloo reads what it has written",
        layout="aliased|shifted|same",
    ),
    Reason("wrong", "right", "dtypes and reductions that gloo computes in another way", op="PRODUCT|SUM", dtype="bool"),
    # ---- accepted beyond gloo ----
    Reason("crash", "right", "a reduce_scatter of scalars ends the process in gloo"),
    Reason("RuntimeError|ValueError", "right", "gloo takes no tensors with the conjugate bit", layout="conj"),
    Reason(
        "RuntimeError",
        "right",
        "gloo writes no leaf that requires gradients in a coalesced call",
        layout="requires_grad",
    ),
    Reason("RuntimeError", "right", "gloo has no PREMUL_SUM", op="PREMUL_SUM"),
    Reason("RuntimeError", "right", "gloo has no AVG", op="AVG"),
    Reason(
        "RuntimeError", "right", "gloo takes fewer dtypes than torch has", dtype="*int*|bool|complex*|float8*|bfloat16"
    ),
    Reason(
        "RuntimeError|ValueError",
        "right",
        "gloo takes no views with strides here",
        layout="strided|transposed|expanded",
    ),
    Reason("RuntimeError", "right", "gloo gathers tensors of one shape only", kind="all_gather_uneven"),
    Reason("RuntimeError", "right", "gloo does not take blocks of another shape in a whole", layout="stacked|scalar"),
    Reason("Timeout", "right", "gloo raises on some ranks only, and the others wait", layout="conj"),
    Reason("RuntimeError", "right", "gloo exchanges tensors of one shape only", kind="all_to_all", layout="uneven"),
    Reason("RuntimeError|Timeout", "right", "gloo receives no empty tensor from any rank", kind="messages"),
    # ---- different on purpose ----
    Reason("*", "NotImplementedError", "dtypes that the core does not reduce", dtype="complex32|float8_*fnuz"),
    Reason("RuntimeError|Timeout|crash", "ValueError", "a wrong argument raises ValueError", kind="refusals"),
    Reason(
        "undefined", "ValueError", "one tensor for each rank: gloo takes several", entry="pg.allreduce: two tensors"
    ),
    Reason("right", "ValueError", "torch has monitored_barrier for gloo only", entry="dist.monitored_barrier"),
    Reason("ValueError", "RuntimeError", "expanded outputs are refused in torch's words", layout="expanded"),
    Reason(
        "undefined|wrong",
        "RuntimeError",
        "outputs that share memory are refused, where gloo leaves what was written last",
        layout="expanded|same|overlapping",
    ),
    Reason(
        "*",
        "Timeout",
        "outputs that share memory are refused on the ranks that write them, and the others wait until their limit",
        kind="broadcast|reduce|gather",
        layout="expanded|same|overlapping",
    ),
)
