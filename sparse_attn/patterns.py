"""The patterns, as small frozen dataclasses: windows and columns, block lists, top-k.

Windows and columns are in ``windows``, block top-k is in ``block_topk``; here are the block list
and token top-k. Construction checks kinds and numbers; the ops check tensors that a pattern
carries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ._checks import LARGE, check_integer, check_kind, clamped, kind_of, refuse
from ._pattern import Pattern
from ._tiles import TileRun, tile_runs
from .block_topk import BlockTopK
from .layout import BlockLayout
from .layout_tiles import listed_blocks, listed_runs
from .windows import DENSE, Band, Dilated, Full, Strided

__all__ = ["Band", "BlockSparse", "BlockTopK", "Dilated", "Full", "Pattern", "Strided", "TopK"]


@dataclass(frozen=True)
class BlockSparse(Pattern):
    """Key blocks listed for each query block, one list or one for each batch entry and head.

    Parameters
    ----------
    layout : BlockLayout
        Query i sees key j when ``layout[b, h, i // block_q, j // block_kv]``.

    Raises
    ------
    TypeError
        When `layout` is no BlockLayout.

    References
    ----------
    Block-sparse attention: Child et al. 2019 (Sparse Transformer), section 5.5; Dao et al. 2022
    (FlashAttention), section 3.3.

    Examples
    --------
    >>> import torch
    >>> from sparse_attn import BlockLayout, BlockSparse
    >>> BlockSparse(BlockLayout.from_mask(torch.eye(2).bool(), 16, 16)).density(32, 32)
    0.5
    """

    layout: BlockLayout

    _op: ClassVar[str | None] = "block_sparse"
    _example: ClassVar[str | None] = "BlockSparse(layout)"

    def __post_init__(self) -> None:
        if isinstance(self.layout, BlockLayout):
            return
        got = kind_of(self.layout)
        if isinstance(self.layout, torch.Tensor):
            got += "; BlockLayout.from_mask(mask, block_q, block_kv) makes one of a block mask"
        raise TypeError(f"sparse_attn.BlockSparse: expected layout to be a BlockLayout, got {got}")

    def _arguments(self) -> dict[str, Any]:
        layout = self.layout
        arguments = {
            "counts": layout.counts,
            "indices": layout.indices,
            "block_q": layout.block_q,
            "block_kv": layout.block_kv,
            "num_kv_blocks": layout.num_kv_blocks,
        }
        if layout.partial is None and layout.bits is None:
            return arguments
        return arguments | {"partial": layout.partial, "bits": layout.bits}

    @property
    def _device(self) -> torch.device | None:
        return self.layout.counts.device

    def _check_lengths(self, Sq: int, Skv: int) -> None:
        super()._check_lengths(Sq, Skv)
        self.layout.check_lengths(Sq, Skv)

    def allows(self, row: torch.Tensor, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Allow the keys of listed blocks, of partial ones by bits: ``(B|1, H|1, Sq, Skv)``."""
        self.layout.check_lengths(row.shape[-2], key.shape[-1])
        return self.layout.to(key.device).allows(row.flatten(), key.flatten())

    def _sees(self, row: torch.Tensor, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        if 0 in self.layout.counts.shape[:2]:
            raise refuse("BlockSparse", "a layout to draw", repr(self.layout))
        first = int(row.min()) // self.layout.block_q
        lists = self.layout._part(0, 0, slice(first, int(row.max()) // self.layout.block_q + 1))
        return lists.allows(row - first * lists.block_q, key)[0, 0]

    def mask_mod(self, heads: int | None = None) -> Callable[..., torch.Tensor]:
        """Return FlexAttention's ``mask_mod`` of the layout; see `BlockLayout.to_flex`.

        Parameters
        ----------
        heads : int, optional
            Query heads of the call: lists of key heads need it.

        Returns
        -------
        callable
            ``mask_mod(b, h, q_idx, kv_idx)``.

        Examples
        --------
        >>> import torch
        >>> from sparse_attn import BlockLayout, BlockSparse
        >>> layout = BlockLayout.local(48, 48, 16, 16, 0)
        >>> BlockSparse(layout).mask_mod()(0, 0, torch.tensor(3), torch.tensor(17))
        tensor(False)
        """
        mask_mod: Callable[..., torch.Tensor] = self.layout.to_flex(heads=heads).mask_mod
        return mask_mod

    def _row_counts(self, position: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        return self._head_counts(end).mean((0, 1))

    def _head_counts(self, end: torch.Tensor) -> torch.Tensor:
        """Count the keys that each list gives a row, ``(B|1, heads, Sq)``."""
        layout = self.layout
        if layout.bits is not None:
            return self._pair_counts(end)
        block_q, block_kv = layout.block_q, layout.block_kv
        listed = layout.to_mask().double()
        start = torch.arange(layout.num_kv_blocks, device=end.device) * block_kv
        counts = []
        for index, rows in enumerate(end.split(block_q)):
            seen = (rows[:, None] - start).clamp(0, block_kv).double()
            counts.append(listed[:, :, index] @ seen.T)
        return torch.cat(counts, -1)

    def _runs(self, Sq: int, Skv: int, is_causal: bool, tile: tuple[int, int]) -> list[TileRun]:
        return listed_runs(self.layout, self.mask(Sq, Skv, is_causal)[0, 0], is_causal)

    def _visited(self, Sq: int, Skv: int, is_causal: bool, tile: tuple[int, int]) -> float:
        layout = self.layout
        blocks = listed_blocks(layout, Sq, Skv, is_causal).sum((-2, -1)).double().mean()
        return float(blocks) * layout.block_q * layout.block_kv / (tile[0] * tile[1])

    def _repr_html_(self) -> str:
        return self.layout._repr_html_()

    def _pair_counts(self, end: torch.Tensor) -> torch.Tensor:
        """Count the pairs of a layout with bits, a query block at a time, by the keys it lists."""
        layout = self.layout
        num_kv, block_kv = layout.num_kv_blocks, layout.block_kv
        keys = torch.arange(num_kv * block_kv, device=end.device).unflatten(0, (num_kv, block_kv))
        rows = torch.arange(end.shape[0], device=end.device).split(layout.block_q)
        counts = []
        for row, listed in zip(rows, layout.to_mask().any(0).any(0), strict=True):
            key = keys[listed].flatten()
            seen = layout.allows(row, key) & (key < end[row, None])
            counts.append(seen.sum(-1).double())
        return torch.cat(counts, -1)


@dataclass(frozen=True, repr=False)
class TopK(Pattern):
    """The k keys with the highest ``scale * q.k`` of each row's allowed keys (Gupta et al. 2021).

    Parameters
    ----------
    k : int
        Keys kept for each query, at least 1; ties go to the lower key; a row with fewer takes all.
        Numbers of an additive mask take no part: -inf forbids a key, -10000 does not. In models the
        lowest number of the mask's type forbids too.
    inside : BlockTopK, BlockSparse or BlockLayout, optional
        Rank the keys of these blocks alone: only they are read.

    Raises
    ------
    TypeError, ValueError
        A wrong kind; a number below 1.

    Examples
    --------
    >>> from sparse_attn import BlockLayout, TopK
    >>> TopK(2).density(4, 4)
    0.5
    >>> TopK(2, inside=BlockLayout.local(64, 64, 16, 16, (0, 0))).density(64, 64)
    0.03125
    """

    k: int
    inside: BlockTopK | BlockSparse | BlockLayout | None = None

    _op: ClassVar[str | None] = "topk"
    _example: ClassVar[str | None] = "TopK(64)"

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", check_integer("TopK", "k", self.k, 1))
        if isinstance(self.inside, BlockLayout):
            object.__setattr__(self, "inside", BlockSparse(self.inside))
        kinds = (BlockTopK, BlockSparse, type(None))
        what = "a BlockTopK, a BlockSparse, a BlockLayout or None"
        check_kind("TopK", "inside", self.inside, kinds, what)

    def __repr__(self) -> str:
        inside = "" if self.inside is None else f", inside={self.inside!r}"
        return f"TopK(k={self.k}{inside})"

    def _arguments(self) -> dict[str, Any]:
        """Return k, and the blocks where they are known; those of `BlockTopK` the data chooses."""
        blocks = self._region
        known = blocks._arguments() if isinstance(blocks, BlockSparse) else {}
        return {"k": clamped(self.k), **known}

    @property
    def _region(self) -> Pattern:
        return self.inside if isinstance(self.inside, Pattern) else DENSE

    @property
    def _device(self) -> torch.device | None:
        return self._region._device

    def _check_lengths(self, Sq: int, Skv: int) -> None:
        super()._check_lengths(Sq, Skv)
        self._region._check_lengths(Sq, Skv)

    def allows(self, row: torch.Tensor, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Refuse: the keys depend on the scores."""
        raise NotImplementedError(
            "sparse_attn.TopK: no mask without data, the scores choose the keys"
        )

    def _row_counts(self, position: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        blocks, most = self._region, min(self.k, LARGE)
        if isinstance(blocks, BlockSparse):
            return blocks._head_counts(end).clamp(max=most).mean((0, 1))
        return blocks._row_counts(position, end).clamp(max=most)

    def _runs(self, Sq: int, Skv: int, is_causal: bool, tile: tuple[int, int]) -> list[TileRun]:
        if self.inside is None:
            return tile_runs(Sq, Skv, is_causal, tile)  # every score is computed
        return self._region._runs(Sq, Skv, is_causal, tile)

    def _visited(self, Sq: int, Skv: int, is_causal: bool, tile: tuple[int, int]) -> float:
        if self.inside is None:
            return super()._visited(Sq, Skv, is_causal, tile)
        return self._region._visited(Sq, Skv, is_causal, tile)
