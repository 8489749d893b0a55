"""What `phalanx tune` makes of the times that it has measured.

A value takes the place of the built-in one only if it wins by more than `MARGIN`: what is measured on a busy host is
noisy, and a table that changes nothing does no harm.
"""

import math
import statistics
from collections.abc import Sequence

MARGIN = 1.03
ITEM = 4  # bytes of a float32, of which all that is measured consists


def crossover_below(ratios: dict[int, float], built_in: int) -> tuple[int, list[int]]:
    """The largest size for which an alternative is used.

    Args:
        ratios: By size, its time divided by that of the other one.
        built_in: Where the crossover is without measurement.

    Returns:
        The crossover, and the sizes on which it changes the choice.
    """
    value, changed = built_in, []
    for size in sorted(size for size in ratios if size > built_in):
        if ratios[size] * MARGIN >= 1:
            break
        value = size
        changed.append(size)
    if changed:
        return value, changed
    for size in sorted((size for size in ratios if size <= built_in), reverse=True):
        if ratios[size] <= MARGIN:
            break
        value = max((smaller for smaller in ratios if smaller < size), default=1)
        changed.append(size)
    return value, changed


def crossover_above(ratios: dict[int, float], built_in: int) -> tuple[int, list[int]]:
    """The smallest size for which an alternative is used. As `crossover_below`."""
    value, changed = built_in, []
    for size in sorted((size for size in ratios if size < built_in), reverse=True):
        if ratios[size] * MARGIN >= 1:
            break
        value = size
        changed.append(size)
    if changed:
        return value, changed
    for size in sorted(size for size in ratios if size >= built_in):
        if ratios[size] <= MARGIN:
            break
        value = min((larger for larger in ratios if larger > size), default=2 * size)
        changed.append(size)
    return value, changed


def best_value(ratios: dict[int, list[float]], built_in: int) -> int:
    """The value that is fastest on average and nowhere clearly slower; the built-in one unless it wins clearly.

    Args:
        ratios: By value, for each size its time divided by that of the built-in value.
        built_in: A key of `ratios`.
    """
    fit = [value for value in ratios if max(ratios[value]) < MARGIN and mean(ratios[value]) * MARGIN < 1]
    return min(fit, key=lambda value: mean(ratios[value]), default=built_in)


def settled_ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """How the time of one candidate is to that of another, by pairs of one round: what slows a round down is in both.

    Returns:
        The median of the ratios; 1 when less than three quarters of the rounds agree on which is faster.
    """
    ratios = [a / b for a, b in zip(one, other, strict=True)]
    lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return 1.0 if lower <= 1 <= upper else median


def mean(ratios: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


def powers(first: int, last: int, also: int) -> list[int]:
    """Powers of two times `first` up to `last`, and `also` if it is between them; whole elements."""
    sizes = {first << i for i in range((last // first).bit_length())}
    return sorted(sizes | ({also // ITEM * ITEM} if first <= also <= last else set()))
