"""Times and ranks in words, for everything that is read by people."""

from collections.abc import Iterable

_UNITS = (("us", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000))
_LONG = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def duration(nanoseconds: int) -> str:
    """Three digits of a time: "850 ns", "12.3 us", "4.2 s"; from two minutes on "3 min 20 s"."""
    if nanoseconds < 1_000:
        return f"{nanoseconds} ns"
    for unit, size in _UNITS:
        if nanoseconds < 999.5 * size and nanoseconds < 120_000_000_000:
            return f"{nanoseconds / size:.3g} {unit}"
    seconds = (nanoseconds + 500_000_000) // 1_000_000_000
    parts: list[str] = []
    for unit, size in _LONG:
        if seconds >= size and len(parts) < 2:
            parts.append(f"{seconds // size} {unit}")
            seconds %= size
        elif parts:
            break
    return " ".join(parts)


def ranks(numbers: Iterable[int]) -> str:
    """Ranks in ascending order: "rank 2", "ranks 0, 1, 3", "ranks 0-7, 9"."""
    ordered = sorted(numbers)
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    return ("rank " if len(ordered) == 1 else "ranks ") + ", ".join(parts)


def have(numbers: Iterable[int]) -> str:
    """ "has" for one rank, "have" for more."""
    return "has" if len(list(numbers)) == 1 else "have"
