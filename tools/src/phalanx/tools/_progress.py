"""How far a command is: a bar with the time left on standard error, if that is a terminal."""

import sys
import threading
from types import TracebackType

from tqdm import tqdm

tqdm.monitor_interval = 0  # no thread that refreshes bars: some commands fork


class Progress:
    """A bar, or nothing where standard error is not a terminal. Leaving the context takes the bar away.

    Args:
        title: What is done.
        total: How much of it there is, in any unit.
        wished: Whether there may be a bar: of many ranks, one shows it.

    Attributes:
        shown: Whether there is a bar.
    """

    def __init__(self, title: str, total: float, wished: bool = True) -> None:
        tqdm.set_lock(threading.RLock())  # its own would be shared between processes
        self.shown = wished and sys.stderr is not None and sys.stderr.isatty()
        self._total = total
        self._bar = tqdm(
            total=total,
            desc=title,
            disable=not self.shown,
            leave=False,
            file=sys.stderr,
            dynamic_ncols=True,
            bar_format="{desc}: {percentage:3.0f}% |{bar}| {elapsed}, {remaining} left",
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()

    def advance(self, amount: float = 1) -> None:
        """Note that so much more is done."""
        self._bar.update(max(0.0, min(amount, self._total - self._bar.n)))

    def reach(self, amount: float, total: float | None = None) -> None:
        """Note that so much is done altogether; `total` replaces the one that was given before."""
        if total is not None:
            self._bar.total = self._total = total
        self.advance(amount - self._bar.n)

    def title(self, text: str) -> None:
        """Say what is being done now."""
        self._bar.set_description_str(text)

    def say(self, line: str) -> None:
        """Print a line on standard output, above the bar."""
        if self.shown:
            self._bar.clear()
        print(line, flush=True)
        if self.shown:
            self._bar.refresh()
