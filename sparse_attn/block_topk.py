"""Block top-k: the key blocks of each query block, chosen from the data by a cheap estimate.

``select_blocks`` makes the list; without data the pattern has no mask, density or tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch

from ._checks import (
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
from ._tiles import TileRun
from .sketch import KeySketch

__all__ = ["DEFAULT_MASS", "INSTEAD_OF_BUDGET", "SELECTORS", "BlockTopK"]

#: What to write in place of block top-k's earlier budget.
INSTEAD_OF_BUDGET = "budget_blocks= for a number of blocks, budget_share= for a share of them"
SELECTORS = ("mixed", "mean", "antidiagonal", "minmax", "vertical_slash", "sketch")
SKETCHED = ("sketch", "minmax", "mean")  # that take a `KeySketch`
_OWNER = "BlockTopK"
_BUDGETS = ("budget_blocks", "budget_share", "budget_tokens")
LOCAL_KEYS = 256  # of the forced local blocks
LOCAL_SKETCH_KEYS = 64  # the same with selector sketch, as it was measured
GROUP_ROWS = 8  # of a group of the mixed selector


class _Default(Enum):
    """Defaults that give way to other arguments: enums, which a compiler knows as constants."""

    MASS = 0.9

    def __repr__(self) -> str:
        return repr(self.value)  # in signatures


#: Of `mass`, beside whose numbers a budget in keys is a cap.
DEFAULT_MASS: Any = _Default.MASS


@without(budget=INSTEAD_OF_BUDGET)
@dataclass(frozen=True, eq=False, repr=False)
class BlockTopK(Pattern):
    """The best key blocks of each query block, chosen from the data by a cheap estimate.

    The estimate is the share of a query block's probability that each key block has. Forced blocks
    are always kept and count: the first `sink_blocks`, the diagonal, and the `local_blocks` that
    end at it (without causal, as many after it). Then blocks are kept by falling estimate until
    the kept share reaches `mass`, or as many as the budget allows. Keys that
    `key_bounds` leaves out have no part in the estimate, those that an `attn_mask` hides do. What a
    mask or `alibi_slopes` add to scores has none: beside these `mass` is no share of the softmax.
    See `select_blocks` for the list alone.

    ==================  =====================================================================
    selector            the estimate
    ==================  =====================================================================
    ``mixed``           half by means of `groups` parts of a block, half by every `row_step`-th
                        row against every key: sees what is broad and what is narrow
    ``mean``            means of whole blocks, of keys or of what a `KeySketch` has of them:
                        cheapest
    ``antidiagonal``    squares of `stride` rows and keys, by the products on their antidiagonal
    ``minmax``          the most that each row can score in a block, by its least and greatest
                        elements: those of its keys, or of their groups in a `KeySketch`
    ``vertical_slash``  columns and diagonals of the last 64 rows, whether text or padding
    ``sketch``          each row against every key of a `KeySketch`, in 2 or 4 bits: for 1 to 16
                        queries on a cache
    a tensor            scores ``(B|1, Hq|Hkv|1, NQ, NKV)`` of your own; their softmax is the
                        estimate: NaN and infinity keep their block, -infinity has no share
    ==================  =====================================================================

    Parameters
    ----------
    block_size : int or (int, int)
        Queries and keys of a block, multiples of 16; by default 128 queries and 64 keys.
    mass : float, optional
        Keep blocks until they hold this share (0, 1] of the estimated probability; by default 0.9,
        or None beside `budget_tokens`.
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
        Forced blocks up to the diagonal of a query block's last row, at least 0; by default those
        of 256 keys, with selector ``sketch`` of 64.
    groups : int, optional
        Of selector ``mixed`` alone: parts that a block is cut into. Divides both block sizes; by
        default an eighth of their greatest common divisor.
    row_step : int
        Of selector ``mixed`` alone: one row in so many is sampled, the last of each step. A block
        of fewer rows (of a short call, or the end of a long one) may have none, and is then judged
        by its means alone, which do not see single keys; 1 samples every row.
    stride : {8, 16}
        Of selector ``antidiagonal`` alone: rows and keys of a square.
    sketch : KeySketch, optional
        Of the keys at hand, for selectors ``sketch``, ``minmax`` and ``mean``. Blocks with keys
        that it does not hold are always kept. Without one, ``sketch`` makes one of 2 bits for the
        call, and the others read the keys. With one, ``mean`` takes the means of what its codes
        stand for, and ``minmax`` joins the ranges of a block's groups, each counted whole where a
        key of it that is held may be seen; blocks are then multiples of the groups (64 tokens; 32
        or 16 in pages of no multiple of 64). Ranges are exact in the keys' dtype (`KeySketch`
        rounds keys of 8 bits first), so groups that are seen whole give ``minmax`` the blocks that
        their keys would.
    budget_tokens : int, optional
        `budget_blocks` by number of keys: as many blocks as hold them. `mass` is None beside it
        unless it is given.

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
    >>> BlockTopK(64, mass=0.95)
    BlockTopK(64, mass=0.95, selector='mixed', groups=8, row_step=16, sink_blocks=1, local_blocks=4)
    >>> BlockTopK(128, mass=None, budget_blocks=8, selector="mean", local_blocks=1)
    BlockTopK(128, mass=None, selector='mean', budget_blocks=8, sink_blocks=1, local_blocks=1)
    """

    block_size: int | tuple[int, int] = (128, 64)
    mass: float | None = DEFAULT_MASS
    selector: str | torch.Tensor = "mixed"
    budget_blocks: int | None = None
    budget_share: float | None = None
    group: str = "q"
    sink_blocks: int = 1
    local_blocks: int | None = None
    groups: int | None = None
    row_step: int = 16
    stride: int = 8
    sketch: KeySketch | None = None
    budget_tokens: int | None = None

    _op: ClassVar[str | None] = "block_topk"
    _example: ClassVar[str | None] = "BlockTopK()"

    def __post_init__(self) -> None:
        size = self.block_size
        if isinstance(size, (tuple, list)):
            if len(size) != 2:
                raise refuse(_OWNER, "block_size of (queries, keys)", tuple(size))
            queries, keys = (check_block(_OWNER, "block_size", block) for block in size)
            self._set("block_size", (queries, keys))
        else:
            self._set("block_size", check_block(_OWNER, "block_size", size))
        self._check_budget()
        self._check_selector()
        check_choice(_OWNER, "group", self.group, ("q", "kv"))
        self._check_integer("sink_blocks", 0)
        if self.local_blocks is not None:
            self._check_integer("local_blocks", 0)

    def _set(self, name: str, value: Any) -> None:
        """Write what a check made of a field, where that is something else."""
        if value is not getattr(self, name):
            object.__setattr__(self, name, value)

    def _check_integer(self, name: str, least: int) -> None:
        self._set(name, check_integer(_OWNER, name, getattr(self, name), least))

    def _check_share(self, name: str) -> None:
        self._set(name, check_share(_OWNER, name, getattr(self, name)))

    def _check_budget(self) -> None:
        """Check mass and budgets, and write the mass where none was given."""
        if self.mass is DEFAULT_MASS:
            self._set("mass", _Default.MASS.value if self.budget_tokens is None else None)
        if self.mass is not None:
            self._check_share("mass")
        if self.budget_blocks is not None:
            self._check_integer("budget_blocks", 1)
        if self.budget_share is not None:
            self._check_share("budget_share")
        if self.budget_tokens is not None:
            self._check_integer("budget_tokens", 1)
        given = [name for name in _BUDGETS if getattr(self, name) is not None]
        if len(given) > 1:
            got = "both" if len(given) == 2 else "all"
            raise refuse(_OWNER, "budget_tokens, budget_blocks or budget_share", got)
        if self.mass is None and not given:
            what = "budget_tokens, mass, budget_blocks or budget_share"
            raise refuse(_OWNER, what, "none of them")

    def _check_selector(self) -> None:
        """Check the selector and the settings of selectors, whichever it is."""
        if self.sketch is not None:
            check_kind(_OWNER, "sketch", self.sketch, KeySketch, "a KeySketch")
            if not isinstance(self.selector, str) or self.selector not in SKETCHED:
                what = "selector 'sketch', 'minmax' or 'mean' with a sketch"
                raise refuse(_OWNER, what, "another selector")
        what = "the name of one, or a tensor of scores"
        check_kind(_OWNER, "selector", self.selector, (str, torch.Tensor), what)
        if isinstance(self.selector, str):
            check_choice(_OWNER, "selector", self.selector, SELECTORS)
        if self.groups is not None:
            self._check_integer("groups", 1)
            for block in self._blocks:
                if block % self.groups:
                    raise refuse(_OWNER, f"groups that divides blocks of {block}", self.groups)
        self._check_integer("row_step", 1)
        check_kind(_OWNER, "stride", self.stride, Integer, "an int")
        self._set("stride", int(self.stride))
        if self.stride not in (8, 16):
            raise refuse(_OWNER, "stride of 8 or 16", self.stride)

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
        rows, keys = self._blocks
        while keys:  # math.gcd takes no sizes that a compiler left open
            rows, keys = keys, rows % keys
        return rows // GROUP_ROWS

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
