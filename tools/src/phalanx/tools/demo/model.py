"""The model: a decoder-only transformer over characters, of ordinary modules. Nothing here knows about ranks.

Tensors are [sequence, batch, features]: the sequence is dim 0, the dim that collectives cut and join without a copy.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812


@dataclass(frozen=True)
class Size:
    """Numbers that say how large a model is."""

    vocabulary: int
    sequence: int
    layers: int
    hidden: int
    heads: int


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        # The rows of the weight are ordered by head, so that each rank gets whole heads when they are sharded.
        self.qkv = nn.Linear(size.hidden, 3 * size.hidden, bias=False)
        self.out = nn.Linear(size.hidden, size.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length, batch, hidden = x.shape
        per_head = self.qkv(x).view(length, batch, self.heads, 3, hidden // self.heads)
        query, key, value = per_head.permute(3, 1, 2, 0, 4).unbind()  # each [batch, heads, sequence, features]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        done: torch.Tensor = self.out(mixed.permute(2, 0, 1, 3).reshape(length, batch, hidden))
        return done


class MLP(nn.Module):
    """Two linear layers."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.fc1 = nn.Linear(size.hidden, 4 * size.hidden, bias=False)
        self.fc2 = nn.Linear(4 * size.hidden, size.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        done: torch.Tensor = self.fc2(F.gelu(self.fc1(x)))
        return done


class Block(nn.Module):
    """Attention and MLP, each with a norm before it and a sum with the stream after it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size.hidden)
        self.attention = Attention(size)
        self.mlp_norm = nn.LayerNorm(size.hidden)
        self.mlp = MLP(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        done: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return done


class Transformer(nn.Module):
    """A transformer that predicts the next character at every place of the sequence."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.characters = nn.Embedding(size.vocabulary, size.hidden)
        self.positions = nn.Embedding(size.sequence, size.hidden)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.hidden)
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Logits, [sequence, batch, vocabulary], of characters, int64 [sequence, batch]."""
        x = self.characters(characters) + self.positions.weight[: len(characters), None]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    def loss(self, characters: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of predicting characters[1:] from characters[:-1]; [sequence + 1, batch]."""
        logits = self(characters[:-1])
        return F.cross_entropy(logits.flatten(0, 1), characters[1:].flatten())


def first_weights(shapes: dict[str, torch.Size], layers: int, seed: int) -> dict[str, torch.Tensor]:
    """Weights to start from.

    Args:
        shapes: Names and shapes of all weights.
        layers: Of the model.
        seed: The same seed gives the same weights.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        if "norm" in name:
            weights[name] = torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)
        else:
            adds_to_stream = name.endswith(("out.weight", "fc2.weight"))
            spread = 0.02 / (2 * layers) ** 0.5 if adds_to_stream else 0.02
            weights[name] = torch.randn(shape, generator=generator) * spread
    return weights
