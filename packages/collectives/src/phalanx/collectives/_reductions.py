"""The names of the reductions."""

from phalanx.core import ReduceOp

REDUCTIONS = {op.name.lower(): int(op) for op in ReduceOp}  # the number that the core has for each
_DIFFERENTIABLE = ("sum", "avg")


def check_reduction(name: str) -> str:
    """A reduction's name in lower case.

    Raises:
        ValueError: There is no such reduction.
    """
    lower = name.lower() if isinstance(name, str) else name
    if lower not in REDUCTIONS:
        raise ValueError(f"Invalid reduce operation {name}")
    return lower


def check_differentiable(operation: str, name: str) -> str:
    """A reduction's name in lower case.

    Raises:
        ValueError: There is no such reduction.
        RuntimeError: It has no gradient here.
    """
    lower = check_reduction(name)
    if lower not in _DIFFERENTIABLE:
        raise RuntimeError(
            f"{operation}: the input needs a gradient, but the reduction '{name}' has none; use sum or avg, or call it "
            "with torch.no_grad() or on tensor.detach()"
        )
    return lower
