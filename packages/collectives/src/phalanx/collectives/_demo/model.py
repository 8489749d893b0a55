"""The model: a decoder-only transformer over characters, dealt to the ranks of a group.

Tensors are [sequence, batch, features]: the sequence is dim 0, the dim that collectives cut and join without a copy.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812

from phalanx.collectives._demo.parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    Split,
    Stream,
    Whole,
    exchange,
    own_part,
)


@dataclass(frozen=True)
class Size:
    """Numbers that say how large a model is."""

    vocabulary: int
    sequence: int
    layers: int
    hidden: int
    heads: int


class Attention(nn.Module):
    """Causal self-attention. Each rank has some of the heads; the outputs are partial."""

    def __init__(self, size: Size, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.head_features = size.hidden // size.heads
        # The rows of the weight are ordered by head, so that to cut them is to deal the heads.
        self.qkv = ColumnParallelLinear(size.hidden, 3 * size.hidden, group)
        self.out = RowParallelLinear(size.hidden, size.hidden, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length, batch, _ = x.shape
        per_head = self.qkv(x).view(length, batch, -1, 3, self.head_features)
        query, key, value = per_head.permute(3, 1, 2, 0, 4)  # each [batch, heads of this rank, sequence, features]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        partial: torch.Tensor = self.out(mixed.permute(2, 0, 1, 3).reshape(length, batch, -1))
        return partial


class MLP(nn.Module):
    """Each rank has some of the inner features; the outputs are partial."""

    def __init__(self, size: Size, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.fc1 = ColumnParallelLinear(size.hidden, 4 * size.hidden, group)
        self.fc2 = RowParallelLinear(4 * size.hidden, size.hidden, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial: torch.Tensor = self.fc2(F.gelu(self.fc1(x)))
        return partial


class Block(nn.Module):
    """Attention and MLP, each with a norm before it and a sum with the stream after it."""

    def __init__(self, size: Size, group: dist.ProcessGroup, stream: Stream) -> None:
        super().__init__()
        self.stream = stream
        self.attention_norm = nn.LayerNorm(size.hidden)
        self.attention = Attention(size, group)
        self.mlp_norm = nn.LayerNorm(size.hidden)
        self.mlp = MLP(size, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        enter, leave = self.stream.enter, self.stream.leave
        x = x + leave(self.attention(enter(self.attention_norm(x))))
        return x + leave(self.mlp(enter(self.mlp_norm(x))))


class Transformer(nn.Module):
    """A transformer whose linear layers are dealt to the ranks; norms and embeddings are copies.

    To show both ways, the first half of the blocks has the whole stream on every rank, the second half splits it.
    """

    def __init__(self, size: Size, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.split_from = size.layers // 2
        streams: list[Stream] = [Whole(group) if i < self.split_from else Split(group) for i in range(size.layers)]
        self.characters = nn.Embedding(size.vocabulary, size.hidden)
        self.positions = nn.Embedding(size.sequence, size.hidden)
        self.blocks = nn.ModuleList(Block(size, group, stream) for stream in streams)
        self.norm = nn.LayerNorm(size.hidden)
        self.head = ColumnParallelLinear(size.hidden, size.vocabulary, group)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Predict the next character at every place of the sequence.

        Args:
            characters: int64, [sequence, batch], the same on all ranks.

        Returns:
            Logits for this rank's part of the sequence, [sequence / ranks, batch, vocabulary].
        """
        x = self.characters(characters) + self.positions.weight[: len(characters), None]
        for index, block in enumerate(self.blocks):
            if index == self.split_from:
                x = own_part(x, self.group)
            x = block(x)
        return self._whole_vocabulary(self.head(Split(self.group).enter(self.norm(x))))

    def loss(self, characters: torch.Tensor) -> torch.Tensor:
        """This rank's share of the mean cross entropy: the loss is the sum over the ranks.

        Args:
            characters: int64, [sequence + 1, batch], the same on all ranks.
        """
        logits = self(characters[:-1])
        targets = own_part(characters[1:], self.group)
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return total / characters[1:].numel()

    def _whole_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        # From all of the sequence and a part of the vocabulary to a part of the sequence and all of the vocabulary.
        length, batch, part = logits.shape
        ranks = self.group.size()
        received = exchange(logits, self.group).view(ranks, length // ranks, batch, part)
        return received.permute(1, 2, 0, 3).reshape(length // ranks, batch, ranks * part)


def first_weights(shapes: dict[str, torch.Size], layers: int, seed: int) -> dict[str, torch.Tensor]:
    """Whole weights to start from.

    Args:
        shapes: Names and whole shapes of all weights.
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
