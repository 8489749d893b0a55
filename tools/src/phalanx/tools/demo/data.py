"""The text: source files of the Python standard library, which every machine has."""

import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch

from phalanx.tools.demo.options import VOCABULARY_SIZE


class Text(NamedTuple):
    """Characters as numbers below VOCABULARY_SIZE.

    Attributes:
        characters: uint8, one-dimensional.
        files: How many files they are from.
    """

    characters: torch.Tensor
    files: int


def read_text(limit_bytes: int) -> Text:
    """Read the modules of the standard library in alphabetical order, until there is enough.

    Args:
        limit_bytes: How much is enough; what is beyond is cut off.

    Raises:
        FileNotFoundError: This Python comes without the sources of its library.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    files = 0
    for path in sorted(folder.glob("*.py")):
        if len(text) >= limit_bytes:
            break
        text += path.read_bytes()
        files += 1
    if len(text) < min(limit_bytes, 1 << 16):
        raise FileNotFoundError(
            f"only {len(text)} bytes of Python sources in {folder}, too few to train on; use a Python that comes with "
            "the sources of its standard library"
        )
    characters = torch.frombuffer(text[:limit_bytes], dtype=torch.uint8)
    return Text(characters.clamp(max=VOCABULARY_SIZE - 1), files)  # all that is not ASCII becomes one character


class Batches:
    """Pieces of the text, chosen at random.

    Args:
        text: Where from.
        sequence: Characters that the model reads of each piece.
        batch: Pieces in a batch.
        seed: The same seed gives the same pieces in the same order.
    """

    def __init__(self, text: Text, sequence: int, batch: int, seed: int) -> None:
        self._characters = text.characters
        self._sequence = sequence
        self._batch = batch
        self._generator = torch.Generator().manual_seed(seed)

    def next(self) -> torch.Tensor:
        """The next batch: int64, [sequence + 1, batch]; row t + 1 holds what is to be predicted from row t."""
        last = len(self._characters) - self._sequence
        starts = torch.randint(last, (1, self._batch), generator=self._generator)
        offsets = torch.arange(self._sequence + 1)[:, None]
        return self._characters[starts + offsets].to(torch.int64)
