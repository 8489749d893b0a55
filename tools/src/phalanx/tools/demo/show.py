"""What rank 0 prints: lines, a progress bar on a terminal, tables."""

import sys
import time
from collections.abc import Sequence

_BAR_WIDTH = 30
_PLAIN_LINES = 10  # of progress, where the output is no terminal
_REDRAW_SECONDS = 0.1


def say(text: str = "") -> None:
    """Print a line at once, also into a pipe."""
    print(text, flush=True)


class Progress:
    """How far the training is: a bar on a terminal, else a line now and then.

    Args:
        total: Steps that there will be.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._terminal = sys.stdout.isatty()
        self._every = max(1, total // _PLAIN_LINES)
        self._started = time.monotonic()
        self._drawn = 0.0

    def show(self, step: int, text: str) -> None:
        """Report that `step` steps are done.

        Args:
            step: Number of steps.
            text: What to say about them.
        """
        now = time.monotonic()
        if not self._terminal:
            if step % self._every == 0 or step == self._total:
                say(f"  step {step:>{len(str(self._total))}}  {text}")
            return
        if now - self._drawn < _REDRAW_SECONDS and step != self._total:
            return
        self._drawn = now
        filled = _BAR_WIDTH * step // self._total
        left = (now - self._started) / step * (self._total - step)
        bar = "█" * filled + "░" * (_BAR_WIDTH - filled)
        print(f"\r\033[K  {bar} {step}/{self._total}  {text}  {left:.0f} s left", end="", flush=True)
        if step == self._total:
            say()


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be; the first is aligned to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, ["-" * width for width in widths], *rows):
        first, *others = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def byte_count(count: int) -> str:
    """1536 -> "1.5 KiB"."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} GiB"
