"""The picture of a pattern: its mask, the tiles that engines visit, and its HTML for notebooks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from ._checks import refuse
from ._drawing import as_html, draw_mask, draw_shares, draw_tiles
from ._part_of import part_of
from ._reduced import EXACT, reduced_mask
from ._tiles import TileRun, checked_tile, tile_picture

__all__ = ["DrawnPattern"]

#: Queries or keys of a picture of tiles, at most.
_TILED = 4096


@part_of("Pattern")
class DrawnPattern:
    """The part of `Pattern` that draws."""

    if TYPE_CHECKING:

        @property
        def _device(self) -> torch.device | None: ...

        _allowed: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
        _check_call: Callable[[int, int, bool], None]
        _with_contents: Callable[[], AbstractContextManager[None]]
        _runs: Callable[[int, int, bool, tuple[int, int]], list[TileRun]]
        mask: Callable[..., torch.Tensor]
        density: Callable[..., float]

    def _sees(self, row: torch.Tensor, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Tell which keys some rows see, bool ``(rows, keys)``; of a layout, in its first list."""
        allowed = self._allowed(row[:, None], position[:, None], key[None])
        return allowed.expand(*allowed.shape[:-2], len(row), len(key))[(0,) * (allowed.dim() - 2)]

    def _seen_in(
        self, Sq: int, Skv: int, is_causal: bool
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return the function that says which of some keys some rows of a call see."""
        last = torch.tensor([Skv - 1], device=self._device)

        def sees(row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            row, key = row.to(last.device), key.to(last.device)
            position = row + (Skv - Sq)
            seen = self._sees(row, position, torch.cat([key, last]))[:, :-1]  # keys end with Skv
            return seen & (key <= position[:, None]) if is_causal else seen

        return sees

    def plot(
        self,
        Sq: int,
        Skv: int | None = None,
        is_causal: bool = False,
        ax: Any = None,
        *,
        tiles: int | tuple[int, int] | None = None,
    ) -> Any:
        """Draw the mask: queries down, keys across, allowed pairs dark.

        Past 1024 queries or keys the picture is of points, each for neighbouring queries and keys,
        the darker the larger the share of its pairs that is allowed (about, by samples).

        Parameters
        ----------
        Sq, Skv, is_causal
            As in `mask`; `Skv` is `Sq` by default. Of a layout, the first batch entry and head are
            drawn.
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default a new figure.
        tiles : int or (int, int), optional
            Also show the tiles of so many queries and keys that engines visit: those seen whole,
            which need no mask, and in others the pairs that the mask leaves out. A layout's are its
            blocks, whatever is asked for. For up to 4096 queries and keys.

        Returns
        -------
        matplotlib.axes.Axes

        Raises
        ------
        TypeError, ValueError
            As `mask`; a layout without batch entries or heads; with `tiles`, longer lengths.
        NotImplementedError
            When the pattern depends on the data; with `tiles`, as `cost`.

        Examples
        --------
        >>> from sparse_attn import Band
        >>> Band(3).plot(16).figure.savefig("band.png")  # doctest: +SKIP
        >>> Band((63, 0)).plot(512, tiles=64).figure.savefig("tiles.png")  # doctest: +SKIP
        """
        Skv = Sq if Skv is None else Skv
        self._check_call(Sq, Skv, is_causal)
        with self._with_contents():
            return self._drawn(Sq, Skv, is_causal, ax, tiles)

    def _drawn(
        self, Sq: int, Skv: int, is_causal: bool, ax: Any, tiles: int | tuple[int, int] | None
    ) -> Any:
        """Draw a mask whose lengths were checked."""
        owner, most = type(self).__name__, EXACT if tiles is None else _TILED
        if max(Sq, Skv) > most and min(Sq, Skv) > 0:
            if tiles is not None:
                raise refuse(owner, f"Sq and Skv of at most {most} beside tiles", (Sq, Skv))
            shares = reduced_mask(self._seen_in(Sq, Skv, is_causal), Sq, Skv)
            return draw_shares(shares, (Sq, Skv), f"{self!r}", "pairs", ax)
        mask = self.mask(Sq, Skv, is_causal)
        if 0 in mask.shape[:-2]:
            raise refuse(owner, "a mask to draw", f"shape {tuple(mask.shape)}")
        mask = mask[(0,) * (mask.dim() - 2)].cpu()
        share = f"{self.density(Sq, Skv, is_causal):.1%} of the pairs"
        if tiles is None:
            return draw_mask(mask, f"{self!r}", share, ax)
        runs = self._runs(Sq, Skv, is_causal, checked_tile(owner, tiles))
        area = sum(run.rows * run.keys for run in runs) / max(1, Sq * Skv)
        share = f"{share}, {area:.1%} in visited tiles"
        return draw_tiles(tile_picture(runs, mask), f"{self!r}", share, ax)

    def _repr_html_(self) -> str:
        """Return the pattern for notebooks: its name, and a picture of 64 queries and keys."""
        return as_html(repr(self), lambda ax: self.plot(64, ax=ax))
