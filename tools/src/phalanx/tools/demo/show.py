"""What rank 0 prints: lines, how far the training is, tables."""

from collections.abc import Sequence

from phalanx.tools._progress import Progress

_PLAIN_LINES = 10  # of progress, where there is no bar


def say(text: str = "") -> None:
    """Print a line at once, also into a pipe."""
    print(text, flush=True)


class Training:
    """How far the training is: a bar on a terminal, else a line now and then.

    Args:
        total: Steps that there will be.
        shown: Whether anything is shown: by one rank.
    """

    def __init__(self, total: int, shown: bool) -> None:
        self._total = total
        self._shown = shown
        self._bar = Progress("training", total, shown)
        self._every = max(1, total // _PLAIN_LINES)

    def show(self, step: int, loss: float) -> None:
        """Report that `step` steps are done, with the loss of the last one."""
        if self._bar.shown:
            self._bar.title(f"training, loss {loss:.4f}")
            self._bar.reach(step)
        if self._shown and (step == self._total or (step % self._every == 0 and not self._bar.shown)):
            self._bar.say(f"  step {step:>{len(str(self._total))}}  loss {loss:.4f}")

    def end(self) -> None:
        """Take the bar away."""
        self._bar.close()


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
