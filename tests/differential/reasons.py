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
    lambda case: case.kind == "reduce_scatter_tensor" and case.layout == "scalar",
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
            any(fnmatchcase(value, pattern) for pattern in getattr(self, name).split("|")) for name, value in fields.items()
        )


REASONS: tuple[Reason, ...] = ()
