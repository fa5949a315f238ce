"""The picture of a BlockLayout: its blocks, whole or in part, and its HTML for notebooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ._checks import check_integer, refuse
from ._drawing import as_html, draw_blocks, draw_shares
from ._part_of import part_of
from ._reduced import EXACT, reduced_lists
from .layout_entries import OWNER

__all__ = ["DrawnLayouts"]


@part_of("BlockLayout")
class DrawnLayouts:
    """The part of `BlockLayout` that draws."""

    counts: torch.Tensor
    indices: torch.Tensor
    partial: torch.Tensor | None

    num_kv_blocks: int

    if TYPE_CHECKING:
        _listed: Callable[[], torch.Tensor]
        _part: Callable[[int, int, slice], DrawnLayouts]
        _spread: Callable[[torch.Tensor, int], torch.Tensor]
        to_mask: Callable[[], torch.Tensor]

    def plot(self, batch: int = 0, head: int = 0, ax: Any = None) -> Any:
        """Draw the blocks of a batch entry and head: query blocks down, key blocks across.

        Past 1024 blocks of a side the picture is of points, each for neighbouring blocks, the
        darker the larger the share of them that is listed.

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
        entries, heads, num_q = self.counts.shape
        if self.counts.is_meta:
            raise refuse(f"{OWNER}.plot", "tensors with contents", "meta tensors")
        lists = self._part(
            self._place("batch", batch, entries), self._place("head", head, heads), slice(None)
        )
        num_kv = self.num_kv_blocks
        if max(num_q, num_kv) > EXACT and min(num_q, num_kv) > 0:
            listed = lists._listed()[0, 0].cpu()
            row, column = listed.nonzero()[:, 0], lists.indices[0, 0].cpu()[listed].long()
            shares = reduced_lists(row, column, num_q, num_kv)
            return draw_shares(shares, (num_q, num_kv), repr(self), "blocks", ax)
        picture = 2 * lists.to_mask()[0, 0].to(torch.uint8)
        if lists.partial is not None:
            picture -= (lists._spread(lists.partial, -1)[0, 0] >= 0).to(torch.uint8)
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
