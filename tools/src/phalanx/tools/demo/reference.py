"""The same model in one process, with plain tensors, and the comparison with it."""

from dataclasses import dataclass

import torch

from phalanx.tools.demo.model import Size, Transformer

# Greatest differences that the order of sums in float32 explains, with room; the right order of magnitude is 1e-7.
LOSS_TOLERANCE = 5e-6  # relative
GRADIENT_TOLERANCE = 2e-5  # relative to the greatest element of the gradient


class CheckFailedError(RuntimeError):
    """The ranks computed something else than one process."""


@dataclass(frozen=True)
class Comparison:
    """How far the ranks are from one process.

    Attributes:
        loss: Of one process.
        gradient_difference: The greatest over all weights, each relative to the gradient's greatest element.
        weight: The one that has it.
    """

    loss: float
    gradient_difference: float
    weight: str


def compare(
    size: Size,
    weights: dict[str, torch.Tensor],
    characters: torch.Tensor,
    loss: float,
    gradients: dict[str, torch.Tensor],
) -> Comparison:
    """Compute loss and gradients in one process, and compare those of the ranks with them.

    Args:
        size: Of the model.
        weights: Whole weights by name.
        characters: The batch.
        loss: What the ranks computed.
        gradients: What the ranks computed: whole gradients by name.

    Raises:
        CheckFailedError: They differ by more than the order of sums explains.
    """
    model = Transformer(size)
    model.load_state_dict(weights)
    expected = model.loss(characters)
    expected.backward()  # type: ignore[no-untyped-call]
    if not abs(loss - expected.item()) <= LOSS_TOLERANCE * abs(expected.item()):
        raise CheckFailedError(
            f"the ranks computed the loss {loss!r}, one process {expected.item()!r}: they differ by more than "
            f"{LOSS_TOLERANCE:.0e} of it"
        )
    differences = {
        name: _relative_difference(gradients[name], parameter.grad) for name, parameter in model.named_parameters()
    }
    worst = max(differences, key=lambda name: differences[name])
    if not differences[worst] <= GRADIENT_TOLERANCE:
        raise CheckFailedError(
            f"the gradient of {worst} differs from that of one process by {differences[worst]:.1e} of its greatest "
            f"element; up to {GRADIENT_TOLERANCE:.0e} is explained by the order of sums"
        )
    return Comparison(expected.item(), differences[worst], worst)


def _relative_difference(seen: torch.Tensor, expected: torch.Tensor | None) -> float:
    if expected is None or seen.shape != expected.shape:
        return float("inf")
    difference = ((seen - expected).abs().max() / expected.abs().max()).item()
    return difference if difference == difference else float("inf")  # NaN is a difference
