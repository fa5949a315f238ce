"""A policy as text and as a picture: runs of equal layers, and of equal heads in them.

Inherited by `Policy`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ._columns import aligned
from ._drawing import as_html, draw_cells
from ._part_of import part_of
from .by_head import ByHead
from .patterns import Full, Pattern

__all__ = ["ShownPolicy"]

Row = tuple[Pattern, Pattern]  # of several queries, of decode


@part_of("Policy")
class ShownPolicy:
    """Table and map of a policy."""

    num_layers: int | None
    num_key_heads: int | None
    dense_layers: Iterable[int]
    dense_below: int | None
    _dense: Pattern

    if TYPE_CHECKING:
        check_layers: Callable[[int], None]
        _of_layer: Callable[[int], tuple[Pattern, Pattern, Pattern]]
        _named: Callable[[], list[int]]

    def table(self, num_layers: int | None = None) -> str:
        """Return the policy as a table, one line for a run of equal layers.

        Parameters
        ----------
        num_layers : int, optional
            Number of layers, by default the policy's own. Where neither is known the last line
            is for all other layers.

        Raises
        ------
        ValueError
            When the policy is made for another number of layers.

        Examples
        --------
        >>> from sparse_attn import Policy, TopK
        >>> print(Policy.dense_on_top(TopK(64), num_layers=10))
        layers  pattern     decode
        0-7     TopK(k=64)  TopK(k=64)
        8-9     Full()      Full()
        """
        lines = _table(self._row_of, self._own_layers(), self._count(num_layers))
        if self.dense_below:
            lines.append(f"below {self.dense_below} keys: {self._dense}")
        return "\n".join(lines)

    def plot(self, num_layers: int | None = None, ax: Any = None) -> Any:
        """Draw a map of layers by key heads, coloured by pattern; decode where it differs.

        Parameters
        ----------
        num_layers : int, optional
            As in `table`.
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default a new figure.

        Returns
        -------
        matplotlib.axes.Axes

        Raises
        ------
        ValueError
            As `table`.

        Examples
        --------
        >>> from sparse_attn import Policy, TopK
        >>> policy = Policy.dense_on_top(TopK(64), num_layers=10)
        >>> policy.plot().figure.savefig("policy.png")  # doctest: +SKIP
        """
        rows = self._own_layers()
        return _draw(self._row_of, rows, self._count(num_layers), self.num_key_heads, ax)

    def _row_of(self, layer: int) -> tuple[Pattern, Pattern]:
        usual, _, decode = self._of_layer(layer)
        return usual, decode

    def _own_layers(self) -> tuple[int, ...]:
        return (*self.dense_layers, *self._named())

    def _count(self, num_layers: int | None) -> int | None:
        if num_layers is None:
            return self.num_layers
        self.check_layers(num_layers)
        return num_layers

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        """Return the policy for notebooks: its table and its map."""
        return as_html(self.table(), lambda ax: self.plot(ax=ax), width=7)


def _table(row_of: Callable[[int], Row], named: Iterable[int], count: int | None) -> list[str]:
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
    known = _known(named, count)
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
    return aligned(cells).split("\n")


def _draw(
    row_of: Callable[[int], Row],
    named: Iterable[int],
    count: int | None,
    heads: int | None,
    ax: Any,
) -> Any:
    """Draw a map of layers by key heads, coloured by pattern; decode beside it where it differs.

    Parameters
    ----------
    row_of, named, count
        As in `_table`; where the number of layers is not known, the last row is all others.
    heads : int, optional
        Number of key heads; by default as many as the policy names.
    ax : Axes, optional
    """
    known = _known(named, count)
    rows = [row_of(layer) for layer in range(known if count is not None else known + 1)]
    inside = [p for row in rows for p in row if isinstance(p, ByHead)]
    if heads is None and inside:
        heads = 1 + max(head for pattern in inside for head in pattern.patterns)
    parts = (0, 1) if any(usual != decode for usual, decode in rows) else (0,)
    cells: list[list[str | None]] = [
        [_cell(row[part], head) for part in parts for head in range(heads or 1)] for row in rows
    ]
    numbers = [str(head) for head in range(heads or 0)]
    columns = numbers * len(parts) or ["prefill", "decode"][: len(parts)]
    ax = draw_cells(ax, cells, columns)
    if heads:
        ax.set_xlabel("key head" if len(parts) == 1 else "key head in prefill, then in decode")
    if count is None:
        some = range(0, known, 1 + known // 16)
        ax.set_yticks([*some, known], [*map(str, some), f"from {known}" if known else "all"])
    return ax


def _cell(pattern: Pattern, head: int) -> str:
    own = pattern.of(head) if isinstance(pattern, ByHead) else pattern
    return "dense" if own == Full() else repr(own)


def _known(named: Iterable[int], count: int | None) -> int:
    """Return how many layers have rows of their own."""
    return count if count is not None else max(named, default=-1) + 1


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
