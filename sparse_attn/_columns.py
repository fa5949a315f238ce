"""Tables as fixed-width text: the lines of policies, profiles, searches and comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["aligned", "written"]


def aligned(rows: Sequence[Sequence[str]], left: int | None = None) -> str:
    """Return rows of cells as lines; the first `left` columns stand left, None for all of them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = len(widths) if left is None else left
    lines = []
    for row in rows:
        cells = [*map(str.ljust, row[:left], widths), *map(str.rjust, row[left:], widths[left:])]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def written(numbers: Sequence[float | None]) -> list[str]:
    """Write numbers with the same decimals: the smallest above 0 gets three digits; None is blank.

    No exponent, so that the numbers of a column are compared at a glance.
    """
    positive = (number for number in numbers if number is not None and 0 < number < math.inf)
    decimals = max(0, 2 - math.floor(math.log10(min(positive, default=1.0))))
    return ["" if number is None else f"{number:.{decimals}f}" for number in numbers]
