"""A policy as text: one line for a run of equal layers, and for a run of equal heads in them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import groupby

from .by_head import ByHead
from .patterns import Pattern

__all__ = ["table"]

Row = tuple[Pattern, Pattern]  # of several queries, of decode


def table(row_of: Callable[[int], Row], named: Iterable[int], count: int | None) -> list[str]:
    """Return the lines of a policy.

    Parameters
    ----------
    row_of : callable
        The two patterns of a layer.
    named : iterable of int
        Layers that the policy names; all beyond the last are alike.
    count : int, optional
        Number of layers; None where it is not known.
    """
    known = count if count is not None else max(named, default=-1) + 1
    lines: list[tuple[str, Row]] = []
    for row, run in groupby(range(known), row_of):
        lines.append((_range(list(run)), row))
    if count is None:
        lines.append((f"from {known}" if known else "all", row_of(known)))
    if any(isinstance(pattern, ByHead) for _, row in lines for pattern in row):
        cells = [["layers", "heads", "pattern", "decode"]]
        for layers, row in lines:
            cells += [[layers, heads, *map(repr, own)] for heads, own in _by_heads(row)]
    else:
        cells = [["layers", "pattern", "decode"]]
        cells += [[layers, *map(repr, row)] for layers, row in lines]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]


def _range(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _by_heads(row: Row) -> list[tuple[str, Row]]:
    """Return the rows of a layer's heads, those of equal patterns together."""
    named = sorted({h for p in row if isinstance(p, ByHead) for h in p.patterns})
    if not named:
        return [("all", row)]

    def own(head: int) -> Row:
        usual, decode = (p.of(head) if isinstance(p, ByHead) else p for p in row)
        return usual, decode

    heads: dict[Hashable, tuple[list[str], Row]] = {}
    for head in named:
        heads.setdefault(repr(own(head)), ([], own(head)))[0].append(str(head))
    found = [(", ".join(numbers), alike) for numbers, alike in heads.values()]
    return [*found, ("others", own(named[-1] + 1))]
