"""The patterns, as small frozen dataclasses: windows and columns, block lists, top-k.

Those of windows and columns stand in ``windows``; here are the block list and the two that depend
on the data, which have no mask without it. Construction checks kinds and numbers; tensors that a
pattern carries are checked by the ops.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ._checks import (
    LARGE,
    Integer,
    check_block,
    check_choice,
    check_integer,
    check_kind,
    check_share,
    clamped,
    refuse,
    same_values,
    without,
)
from ._pattern import Pattern
from ._tiles import TileRun, listed_blocks, listed_runs, tile_runs
from .layout import BlockLayout
from .sketch import KeySketch
from .windows import Band, Dilated, Full, Strided

__all__ = ["Band", "BlockSparse", "BlockTopK", "Dilated", "Full", "Pattern", "Strided", "TopK"]

#: What to write in place of block top-k's earlier budget.
BUDGETS = "budget_blocks= for a number of blocks, budget_share= for a share of them"
SELECTORS = ("mixed", "mean", "antidiagonal", "minmax", "vertical_slash", "sketch")
MASS = 0.9  # by default
_BUDGETS = ("budget_blocks", "budget_share", "budget_tokens")
LOCAL_KEYS = 256  # of the forced local blocks
LOCAL_SKETCH_KEYS = 64  # the same with selector sketch, as it was measured
GROUP_ROWS = 8  # of a group of the mixed selector
_ALL = Full()


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
        if isinstance(self.layout, torch.Tensor):
            what = "layout to be a BlockLayout"
            got = "Tensor; BlockLayout.from_mask(mask, block_q, block_kv) makes one of a block mask"
            raise TypeError(f"sparse_attn.BlockSparse: expected {what}, got {got}")
        check_kind("BlockSparse", "layout", self.layout, BlockLayout, "a BlockLayout")

    def _arguments(self) -> dict[str, Any]:
        layout = self.layout
        return {
            "counts": layout.counts,
            "indices": layout.indices,
            "partial": layout.partial,
            "bits": layout.bits,
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

    def mask_mod(self) -> Callable[..., torch.Tensor]:
        """Return FlexAttention's ``mask_mod`` of the layout; see `BlockLayout.to_flex`."""
        mask_mod: Callable[..., torch.Tensor] = self.layout.to_flex().mask_mod
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
        """Count the pairs of a layout with bits, a query block at a time."""
        key = torch.arange(int(end.max()), device=end.device)
        rows = torch.arange(end.shape[0], device=end.device).split(self.layout.block_q)
        counts = [
            (self.layout.allows(row, key) & (key < end[row, None])).sum(-1).double() for row in rows
        ]
        return torch.cat(counts, -1)


@dataclass(frozen=True, repr=False)
class TopK(Pattern):
    """The k keys with the highest ``scale * q.k`` of each row's allowed keys (Gupta et al. 2021).

    Parameters
    ----------
    k : int
        Keys kept for each query, at least 1; ties go to the lower key; a row with fewer takes all.
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
        check_kind("TopK", "inside", self.inside, kinds, "a BlockTopK, a BlockSparse or None")

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
        return self.inside if isinstance(self.inside, Pattern) else _ALL

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


@without(budget=BUDGETS)
@dataclass(frozen=True, eq=False, repr=False)
class BlockTopK(Pattern):
    """The best key blocks of each query block, chosen from the data by a cheap estimate.

    The estimate is the share of a query block's probability that each key block has. Forced blocks
    are always kept and count: the first `sink_blocks`, the diagonal, and the `local_blocks` that
    end at it (without causal, as many after it). Then blocks are kept by falling estimate until
    the kept share reaches `mass`, or as many as the budget allows. See `select_blocks` for the
    list alone.

    ==================  =====================================================================
    selector            the estimate
    ==================  =====================================================================
    ``mixed``           half by means of `groups` parts of a block, half by every `row_step`-th
                        row against every key: sees what is broad and what is narrow
    ``mean``            means of whole blocks: cheapest
    ``antidiagonal``    squares of `stride` rows and keys, by the products on their antidiagonal
    ``minmax``          the most that each row can score in a block, by its least and greatest
                        elements: for few queries on a long cache
    ``vertical_slash``  columns and diagonals of the last 64 rows
    ``sketch``          each row against every key of a `KeySketch`, in 2 or 4 bits: for 1 to 16
                        queries on a cache
    a tensor            scores ``(B|1, Hq|Hkv|1, NQ, NKV)`` of your own; their softmax is the
                        estimate, a NaN or infinite score keeps its block
    ==================  =====================================================================

    Parameters
    ----------
    block_size : int or (int, int)
        Queries and keys of a block, multiples of 16.
    mass : float, optional
        Blocks until this share (0, 1] of the estimated probability.
    selector : {"mixed", "mean", "antidiagonal", "minmax", "vertical_slash", "sketch"} or Tensor
        The estimate.
    budget_blocks : int, optional
        At most this number of key blocks, at least 1; without `mass`, this number.
    budget_share : float, optional
        The same as a share (0, 1] of the key blocks that the query block may see, rounded up.
    group : {"q", "kv"}
        A list for each query head, or one for the heads that share a key head, by the greatest of
        their estimates.
    sink_blocks : int
        Forced first blocks, at least 0.
    local_blocks : int, optional
        Forced blocks up to the diagonal, at least 0; by default those of 256 keys, with selector
        ``sketch`` of 64.
    groups : int, optional
        Parts of a block, of which it is a multiple; by default parts of 8 keys.
    row_step : int
        Rows to a sampled one.
    stride : {8, 16}
        Rows of an antidiagonal's square.
    sketch : KeySketch, optional
        Of the keys at hand, for selector ``sketch``; by default one of 2 bits is made for the call.
        Blocks with keys that it does not hold are always kept.
    budget_tokens : int, optional
        At most as many key blocks as hold this number of keys. It replaces the default of `mass`.

    Raises
    ------
    TypeError, ValueError
        An argument of a wrong kind; a number out of range.

    References
    ----------
    Means: Jiang et al. 2024 (MInference), section 3.2, which has vertical_slash too.
    Antidiagonals: Xu et al. 2025 (XAttention). Bounds: Tang et al. 2024 (Quest). Keys of few bits
    that choose which keys are read: Ribar et al. 2024 (SparQ) and Yang et al. 2024 (Double
    Sparsity) do so with few channels.

    Examples
    --------
    >>> from sparse_attn import BlockTopK
    >>> BlockTopK(mass=0.95)
    BlockTopK(64, mass=0.95, selector='mixed', groups=8, row_step=32, sink_blocks=1, local_blocks=4)
    >>> BlockTopK(128, mass=None, budget_blocks=8, selector="mean", local_blocks=1)
    BlockTopK(128, mass=None, selector='mean', budget_blocks=8, sink_blocks=1, local_blocks=1)
    """

    block_size: int | tuple[int, int] = 64
    mass: float | None = MASS
    selector: str | torch.Tensor = "mixed"
    budget_blocks: int | None = None
    budget_share: float | None = None
    group: str = "q"
    sink_blocks: int = 1
    local_blocks: int | None = None
    groups: int | None = None
    row_step: int = 32
    stride: int = 8
    sketch: KeySketch | None = None
    budget_tokens: int | None = None

    _op: ClassVar[str | None] = "block_topk"
    _example: ClassVar[str | None] = "BlockTopK()"

    def __post_init__(self) -> None:
        owner = "BlockTopK"
        if isinstance(self.block_size, (tuple, list)):
            if len(self.block_size) != 2:
                raise refuse(owner, "block_size or (queries, keys)", tuple(self.block_size))
            object.__setattr__(self, "block_size", tuple(self.block_size))
        for block in self._blocks:
            check_block(owner, "block_size", block)
        if self.mass is not None:
            check_share(owner, "mass", self.mass)
        if self.budget_blocks is not None:
            check_integer(owner, "budget_blocks", self.budget_blocks, 1)
        if self.budget_share is not None:
            check_share(owner, "budget_share", self.budget_share)
        if self.budget_tokens is not None:
            check_integer(owner, "budget_tokens", self.budget_tokens, 1)
            if self.mass == MASS:
                object.__setattr__(self, "mass", None)
        given = [name for name in _BUDGETS if getattr(self, name) is not None]
        if len(given) > 1:
            got = "both" if len(given) == 2 else "all"
            raise refuse(owner, "budget_tokens, budget_blocks or budget_share", got)
        if self.mass is None and not given:
            what = "budget_tokens, mass, budget_blocks or budget_share"
            raise refuse(owner, what, "none of them")
        if self.sketch is not None:
            check_kind(owner, "sketch", self.sketch, KeySketch, "a KeySketch")
            if not self._by_sketch:
                raise refuse(owner, "selector 'sketch' with a sketch", "another selector")
        if not isinstance(self.selector, torch.Tensor):
            check_choice(owner, "selector", self.selector, SELECTORS)
        check_choice(owner, "group", self.group, ("q", "kv"))
        check_integer(owner, "sink_blocks", self.sink_blocks, 0)
        if self.local_blocks is not None:
            check_integer(owner, "local_blocks", self.local_blocks, 0)
        if self.groups is not None:
            check_integer(owner, "groups", self.groups, 1)
            for block in self._blocks:
                if block % self.groups:
                    raise refuse(owner, f"groups that divides blocks of {block}", self.groups)
        check_integer(owner, "row_step", self.row_step, 1)
        check_kind(owner, "stride", self.stride, Integer, "an int")
        if self.stride not in (8, 16):
            raise refuse(owner, "stride of 8 or 16", self.stride)

    @property
    def _blocks(self) -> tuple[int, int]:
        """Queries and keys of a block."""
        size = self.block_size
        return size if isinstance(size, tuple) else (size, size)

    @property
    def _local_blocks(self) -> int:
        if self.local_blocks is not None:
            return self.local_blocks
        return -(-(LOCAL_SKETCH_KEYS if self._by_sketch else LOCAL_KEYS) // self._blocks[1])

    def _most_blocks(self, Sq: int) -> int | None:
        """Return the most blocks of a list by its numbers, None where a mass or share says."""
        if self._budget_count is None:
            return None
        forced = self.sink_blocks + 2 * self._local_blocks + -(-Sq // self._blocks[1]) + 1
        return max(self._budget_count, forced)

    @property
    def _by_sketch(self) -> bool:
        return isinstance(self.selector, str) and self.selector == "sketch"

    @property
    def _budget_count(self) -> int | None:
        if self.budget_tokens is None:
            return self.budget_blocks
        return -(-self.budget_tokens // self._blocks[1])

    @property
    def _groups(self) -> int:
        if self.groups is not None:
            return self.groups
        return math.gcd(*self._blocks) // GROUP_ROWS

    @property
    def _device(self) -> torch.device | None:
        if self.sketch is not None:
            return self.sketch.codes.device
        return self.selector.device if isinstance(self.selector, torch.Tensor) else None

    def _said(self) -> dict[str, Any]:
        """Everything that matters to this pattern, defaults resolved, by argument."""
        said: dict[str, Any] = {"mass": self.mass, "selector": self.selector}
        if not isinstance(self.selector, torch.Tensor):
            if self.selector == "mixed":
                said.update(groups=self._groups, row_step=self.row_step)
            if self.selector == "antidiagonal":
                said["stride"] = self.stride
        for name in (*_BUDGETS, "sketch"):
            if getattr(self, name) is not None:
                said[name] = getattr(self, name)
        if self.group != "q":
            said["group"] = self.group
        return {**said, "sink_blocks": self.sink_blocks, "local_blocks": self._local_blocks}

    def __repr__(self) -> str:
        said = {name: repr(value) for name, value in self._said().items()}
        if isinstance(self.selector, torch.Tensor):
            said["selector"] = f"<scores {tuple(self.selector.shape)}>"
        settings = ", ".join(f"{name}={value}" for name, value in said.items())
        return f"BlockTopK({self.block_size}, {settings})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockTopK):
            return NotImplemented
        said, others = self._said(), other._said()
        mine, theirs = said.pop("selector"), others.pop("selector")
        if (self._blocks, said) != (other._blocks, others):
            return False
        if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
            return same_values(mine, theirs)
        return isinstance(mine, str) and isinstance(theirs, str) and mine == theirs

    def __hash__(self) -> int:
        return hash((self._blocks, self.mass, self.budget_blocks, self.budget_share, self.group))

    def _arguments(self) -> dict[str, Any]:
        by_scores = isinstance(self.selector, torch.Tensor)
        share, mass = self.budget_share, self.mass
        arguments = {
            "block_size": self._blocks[1],
            "block_rows": self._blocks[0],
            "budget_count": clamped(self._budget_count),
            "budget_share": None if share is None else float(share),
            "mass": None if mass is None else float(mass),
            "selector": "mixed" if by_scores else self.selector,
            "groups": self._groups,
            "row_step": clamped(self.row_step),
            "stride": self.stride,
            "scores": self.selector if by_scores else None,
            "group": self.group,
            "sink_blocks": clamped(self.sink_blocks),
            "local_blocks": clamped(self._local_blocks),
        }
        return arguments if self.sketch is None else arguments | self.sketch._arguments()

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

    def _runs(self, Sq: int, Skv: int, is_causal: bool, tile: tuple[int, int]) -> list[TileRun]:
        raise NotImplementedError(
            "sparse_attn.BlockTopK: no tiles without data; "
            "BlockSparse(select_blocks(query, key, pattern)) has some"
        )
