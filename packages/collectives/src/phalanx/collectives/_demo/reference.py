"""The same model as an ordinary one in one process, and the comparison with it."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from phalanx.collectives._demo.model import Size

# Greatest differences that the order of sums in float32 explains, with room; the right order of magnitude is 1e-7.
LOSS_TOLERANCE = 5e-6  # relative
GRADIENT_TOLERANCE = 2e-5  # relative to the greatest element of the gradient


class CheckFailedError(RuntimeError):
    """The ranks computed something else than one process."""


class ReferenceBlock(nn.Module):
    """Attention and MLP, nothing dealt to anyone."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.hidden)
        self.attention = nn.ModuleDict(
            {
                "qkv": nn.Linear(size.hidden, 3 * size.hidden, bias=False),
                "out": nn.Linear(size.hidden, size.hidden, bias=False),
            }
        )
        self.mlp_norm = nn.LayerNorm(size.hidden)
        self.mlp = nn.ModuleDict(
            {
                "fc1": nn.Linear(size.hidden, 4 * size.hidden, bias=False),
                "fc2": nn.Linear(4 * size.hidden, size.hidden, bias=False),
            }
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length, batch, hidden = x.shape
        qkv = self.attention["qkv"](self.attention_norm(x)).view(length, batch, self.heads, 3, hidden // self.heads)
        query, key, value = (part.permute(1, 2, 0, 3) for part in qkv.unbind(3))
        scores = query @ key.transpose(-1, -2) / (hidden // self.heads) ** 0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ value
        x = x + self.attention["out"](mixed.permute(2, 0, 1, 3).reshape(length, batch, hidden))
        inner: torch.Tensor = self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.mlp_norm(x))))
        return x + inner


class Reference(nn.Module):
    """The transformer of model.py for one process, from ordinary parts. Its parameters have the same names."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.characters = nn.Embedding(size.vocabulary, size.hidden)
        self.positions = nn.Embedding(size.sequence, size.hidden)
        self.blocks = nn.ModuleList(ReferenceBlock(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.hidden)
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)

    def loss(self, characters: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of predicting characters[1:] from characters[:-1]; [sequence + 1, batch]."""
        x = self.characters(characters[:-1]) + self.positions.weight[: len(characters) - 1, None]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), characters[1:].flatten())


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
    model = Reference(size)
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
