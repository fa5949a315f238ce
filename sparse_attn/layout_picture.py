"""The picture of a BlockLayout: its blocks, whole or in part, and its HTML for notebooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ._checks import check_integer, refuse
from ._drawing import as_html, draw_blocks
from .layout_entries import OWNER

__all__ = ["DrawnLayouts"]


class DrawnLayouts:
    """The part of `BlockLayout` that draws."""

    counts: torch.Tensor
    partial: torch.Tensor | None

    if TYPE_CHECKING:
        to_mask: Callable[[], torch.Tensor]
        _spread: Callable[[torch.Tensor, Any], torch.Tensor]

    def plot(self, batch: int = 0, head: int = 0, ax: Any = None) -> Any:
        """Draw the blocks of a batch entry and head: query blocks down, key blocks across.

        Parameters
        ----------
        batch, head : int
            Which lists; those that all share are drawn for any.
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default a new figure.

        Returns
        -------
        matplotlib.axes.Axes

        Raises
        ------
        TypeError, ValueError
            A batch entry or head that the layout does not have.

        Examples
        --------
        >>> from sparse_attn import BlockLayout
        >>> layout = BlockLayout.bigbird(512, 512, 16, 16, window=1, num_global=1, num_random=1)
        >>> layout.plot().figure.savefig("layout.png")  # doctest: +SKIP
        """
        entries, heads = self.counts.shape[:2]
        index = self._place("batch", batch, entries), self._place("head", head, heads)
        picture = 2 * self.to_mask()[index].to(torch.uint8)
        if self.partial is not None:
            picture -= (self._spread(self.partial, -1)[index] >= 0).to(torch.uint8)
        share = (picture > 0).double().mean().item() if picture.numel() else 0.0
        return draw_blocks(picture.cpu(), repr(self), f"{share:.1%} of the blocks", ax)

    @staticmethod
    def _place(name: str, number: Any, size: int) -> int:
        """Return a number of a batch entry or head that has a list."""
        number = check_integer(f"{OWNER}.plot", name, number, 0)
        if size != 1 and number >= size:
            raise refuse(f"{OWNER}.plot", f"{name} below {size}", number)
        return min(number, size - 1)

    def _repr_html_(self) -> str:
        """Return the layout for notebooks: its sizes and a picture of its blocks."""
        return as_html(repr(self), lambda ax: self.plot(ax=ax))
