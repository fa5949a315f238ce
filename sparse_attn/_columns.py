"""Tables as fixed-width text: the lines of policies, profiles, searches and comparisons."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["aligned"]


def aligned(rows: Sequence[Sequence[str]], left: int | None = None) -> str:
    """Return rows of cells as lines; the first `left` columns stand left, None for all of them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = len(widths) if left is None else left
    lines = []
    for row in rows:
        cells = [*map(str.ljust, row[:left], widths), *map(str.rjust, row[left:], widths[left:])]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
