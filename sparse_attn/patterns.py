"""The patterns, as small frozen dataclasses: windows and columns, block lists, top-k.

Those of windows and columns stand in ``windows``; here are the block list and the two that depend
on the data, which have no mask without it. Construction checks kinds and numbers; tensors that a
pattern carries are checked by the ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ._checks import (
    LARGE,
    check_block,
    check_choice,
    check_integer,
    check_kind,
    check_share,
    clamped,
    refuse,
    without,
)
from ._pattern import Pattern
from .layout import BlockLayout
from .windows import Band, Dilated, Full, Strided

__all__ = ["Band", "BlockSparse", "BlockTopK", "Dilated", "Full", "Pattern", "Strided", "TopK"]

#: What to write in place of block top-k's earlier budget.
BUDGETS = "budget_blocks= for a number of blocks, budget_share= for a share of them"
SELECTORS = ("mean", "antidiagonal", "minmax", "vertical_slash")


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
        check_kind("BlockSparse", "layout", self.layout, BlockLayout, "a BlockLayout")

    def _unserved(self) -> str | None:
        if self.layout.bits is None:
            return super()._unserved()
        return (
            "a layout with partial blocks; call naive_attention, or make it with whole=True, which "
            "sees them whole"
        )

    def _arguments(self) -> dict[str, Any]:
        layout = self.layout
        return {
            "counts": layout.counts,
            "indices": layout.indices,
            "block_q": layout.block_q,
            "block_kv": layout.block_kv,
            "num_kv_blocks": layout.num_kv_blocks,
        }

    @property
    def _device(self) -> torch.device | None:
        return self.layout.counts.device

    def _check_lengths(self, Sq: int, Skv: int) -> None:
        super()._check_lengths(Sq, Skv)
        self.layout.check_lengths(Sq, Skv)

    def allows(self, row: torch.Tensor, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Allow the keys of listed blocks, of partial ones by bits: ``(B|1, Hq|1, Sq, Skv)``."""
        self.layout.check_lengths(row.shape[-2], key.shape[-1])
        return self.layout.to(key.device).allows(row.flatten(), key.flatten())

    def _row_counts(self, position: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        layout = self.layout
        if layout.bits is not None:
            return self._pair_counts(end)
        num_q, block_q, block_kv = layout.counts.shape[-1], layout.block_q, layout.block_kv
        share = layout.to_mask().double().mean((0, 1))  # of the heads that list the block
        start = torch.arange(layout.num_kv_blocks, device=end.device) * block_kv
        counts = []
        for index in range(num_q):
            rows = end[index * block_q : (index + 1) * block_q, None]
            counts.append((rows - start).clamp(0, block_kv).double() @ share[index])
        return torch.cat(counts)

    def _pair_counts(self, end: torch.Tensor) -> torch.Tensor:
        """Count the pairs of a layout with bits, a query block at a time."""
        key = torch.arange(int(end.max()), device=end.device)
        rows = torch.arange(end.shape[0], device=end.device).split(self.layout.block_q)
        counts = [
            (self.layout.allows(row, key) & (key < end[row, None])).sum(-1).double().mean((0, 1))
            for row in rows
        ]
        return torch.cat(counts)


@dataclass(frozen=True)
class TopK(Pattern):
    """The k keys with the highest ``scale * q.k`` of each row's allowed keys (Gupta et al. 2021).

    Parameters
    ----------
    k : int
        Keys kept for each query, at least 1; ties go to the lower key; a row with fewer takes all.

    Raises
    ------
    TypeError, ValueError
        A wrong kind; a number below 1.

    Examples
    --------
    >>> from sparse_attn import TopK
    >>> TopK(2).density(4, 4)
    0.5
    """

    k: int

    _op: ClassVar[str | None] = "topk"
    _example: ClassVar[str | None] = "TopK(64)"

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", check_integer("TopK", "k", self.k, 1))

    def _arguments(self) -> dict[str, Any]:
        return {"k": clamped(self.k)}

    def allows(self, row: torch.Tensor, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Refuse: the keys depend on the scores."""
        raise NotImplementedError(
            "sparse_attn.TopK: no mask without data, the scores choose the keys"
        )

    def _row_counts(self, position: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        return end.clamp(max=min(self.k, LARGE))


@without(budget=BUDGETS)
@dataclass(frozen=True)
class BlockTopK(Pattern):
    """The best key blocks of each query block, chosen from the data by a cheap estimate.

    With the selector ``mean`` a block scores ``scale * mean(Q_i) . mean(K_j)``. Forced blocks are
    kept and count inside the budget: the first `sink_blocks`, the diagonal, and the `local_blocks`
    that end at it (without causal, as many after it). See `select_blocks` for the list alone.

    Parameters
    ----------
    block_size : int
        Queries and keys of a block, a multiple of 16.
    mass : float, optional
        Blocks until this share (0, 1] of the estimated probability.
    selector : {"mean", "antidiagonal", "minmax", "vertical_slash"}
        The estimate.
    budget_blocks : int, optional
        A number of key blocks, at least 1.
    budget_share : float, optional
        A share (0, 1] of the key blocks that the query block may see, rounded up. 0.1 where
        neither `mass` nor `budget_blocks` is given.
    group : {"q", "kv"}
        A list for each query head, or one for the heads that share a key head.
    sink_blocks, local_blocks : int
        Forced blocks, at least 0.

    Raises
    ------
    TypeError, ValueError
        An argument of a wrong kind; a number out of range.

    References
    ----------
    Blocks ranked by the product of their means: Jiang et al. 2024 (MInference), section 3.2, its
    block-sparse heads.

    Examples
    --------
    >>> from sparse_attn import BlockTopK
    >>> BlockTopK(64, budget_blocks=8).budget_blocks
    8
    """

    block_size: int = 128
    mass: float | None = None
    selector: str = "mean"
    budget_blocks: int | None = None
    budget_share: float | None = None
    group: str = "q"
    sink_blocks: int = 1
    local_blocks: int = 1

    _op: ClassVar[str | None] = "block_topk"
    _example: ClassVar[str | None] = "BlockTopK()"

    def __post_init__(self) -> None:
        owner = "BlockTopK"
        check_block(owner, "block_size", self.block_size)
        if self.mass is not None:
            check_share(owner, "mass", self.mass)
        if self.budget_blocks is not None:
            check_integer(owner, "budget_blocks", self.budget_blocks, 1)
        if self.budget_share is not None:
            check_share(owner, "budget_share", self.budget_share)
        if self.budget_blocks is not None and self.budget_share is not None:
            raise refuse(owner, "budget_blocks or budget_share", "both")
        check_choice(owner, "selector", self.selector, SELECTORS)
        check_choice(owner, "group", self.group, ("q", "kv"))
        check_integer(owner, "sink_blocks", self.sink_blocks, 0)
        check_integer(owner, "local_blocks", self.local_blocks, 0)

    def _arguments(self) -> dict[str, Any]:
        count, share, mass = self.budget_blocks, self.budget_share, self.mass
        if (count, share, mass) == (None, None, None):
            share = 0.1
        return {
            "block_size": self.block_size,
            "budget_count": clamped(count),
            "budget_share": None if share is None else float(share),
            "mass": None if mass is None else float(mass),
            "selector": self.selector,
            "group": self.group,
            "sink_blocks": clamped(self.sink_blocks),
            "local_blocks": clamped(self.local_blocks),
        }

    def allows(self, row: torch.Tensor, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Refuse: the blocks depend on the scores."""
        raise NotImplementedError(
            "sparse_attn.BlockTopK: no mask without data; "
            "BlockSparse(select_blocks(query, key, pattern)) has one"
        )

    def _row_counts(self, position: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError(
            "sparse_attn.BlockTopK: no density without data; "
            "BlockSparse(select_blocks(query, key, pattern)) has one"
        )
