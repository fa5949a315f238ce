"""BlockLayout: the key blocks that each query block visits, as counts and ascending indices.

The form that every engine reads. ``from_mask`` builds it on the device without a sync; constructors
that are given indices check them and keep no alias. Those from masks of tokens stand in
``layout_tokens``, grids in ``layout_nd``, ready makers (local, bigbird, strided) in
``layout_makers``. Causal masking and tails are not the layout's: the ops add them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import ops
from ._checks import (
    MAX_LENGTH,
    as_device,
    as_int64,
    check_blocks,
    check_dense,
    check_integer,
    refuse,
    same_values,
)
from .layout_bits import Blocks, of_pairs, seen_by_bits
from .layout_entries import OWNER as _OWNER
from .layout_entries import (
    check_bits,
    check_entries,
    checked_mask,
    entries_of_csr,
    is_listed,
    sorted_entries,
)
from .layout_flex import block_mask_from
from .layout_makers import ReadyLayouts
from .layout_nd import GridLayouts
from .layout_picture import DrawnLayouts
from .layout_tokens import TokenLayouts

__all__ = ["BlockLayout"]


@dataclass(frozen=True, eq=False, repr=False)
class BlockLayout(TokenLayouts, GridLayouts, ReadyLayouts, DrawnLayouts):
    """Key blocks listed for each query block.

    Parameters
    ----------
    counts : Tensor
        int32 ``(B|1, H|1, NQ)``: how many key blocks a query block visits. H are query heads, or
        key heads, whose lists their query heads share; size one, or a missing leading dimension,
        means all.
    indices : Tensor
        int32 ``(B|1, H|1, NQ, max)``: which ones; they are sorted, entries past the count are
        ignored.
    block_q, block_kv : int
        Rows and keys of a block, multiples of 16. Rows go by query index i. For up to 16 queries
        `block_q` may be 1: a list for each query, with heads of size one or of key heads.
    num_kv_blocks : int
        Number of key blocks NKV.
    partial : Tensor, optional
        int32, of the shape of `indices`: -1 for a block that is seen whole, else a row of `bits`.
    bits : Tensor, optional
        int32 ``(P, block_q, words)``, a word for 32 keys: bit ``j % 32`` of word ``j // 32`` says
        whether a row of the block sees key j of the block.

    Raises
    ------
    TypeError
        An argument of a wrong kind.
    ValueError
        Shapes that do not fit, block sizes that are no multiples of 16, counts or indices out of
        range, an index twice in a row. The contents are read, which waits for the device.

    Examples
    --------
    >>> import torch
    >>> from sparse_attn import BlockLayout
    >>> layout = BlockLayout(torch.tensor([1, 2]), torch.tensor([[0, 0], [1, 0]]), 64, 64, 2)
    >>> layout
    BlockLayout(batch=1, heads=1, blocks=2x2, block_q=64, block_kv=64, device=cpu)
    >>> layout.to_mask()[0, 0].int().tolist()
    [[1, 0], [1, 1]]
    """

    counts: torch.Tensor
    indices: torch.Tensor
    block_q: int
    block_kv: int
    num_kv_blocks: int
    partial: torch.Tensor | None = None
    bits: torch.Tensor | None = None

    def __post_init__(self) -> None:
        check_entries("counts", self.counts)
        check_entries("indices", self.indices)
        check_blocks(_OWNER, self.block_q, self.block_kv)
        check_integer(_OWNER, "num_kv_blocks", self.num_kv_blocks, 0)
        most = -(-MAX_LENGTH // self.block_kv)
        if self.num_kv_blocks > most:
            raise refuse(_OWNER, f"num_kv_blocks of at most {most}", self.num_kv_blocks)
        partial, bits = check_bits(self.partial, self.bits, self.block_q, self.block_kv)
        counts, indices, partial = sorted_entries(
            self.counts, self.indices, self.num_kv_blocks, partial, 0 if bits is None else len(bits)
        )
        made = {"counts": counts, "indices": indices, "partial": partial, "bits": bits}
        for name, tensor in made.items():
            object.__setattr__(self, name, tensor)

    @classmethod
    def _trusted(
        cls,
        counts: torch.Tensor,
        indices: torch.Tensor,
        block_q: int,
        block_kv: int,
        num_kv_blocks: int,
        partial: torch.Tensor | None = None,
        bits: torch.Tensor | None = None,
    ) -> BlockLayout:
        """Make a layout of tensors that our own kernels wrote: no checks, no sync."""
        layout = object.__new__(cls)
        object.__setattr__(layout, "counts", counts)
        object.__setattr__(layout, "indices", indices)
        object.__setattr__(layout, "block_q", block_q)
        object.__setattr__(layout, "block_kv", block_kv)
        object.__setattr__(layout, "num_kv_blocks", num_kv_blocks)
        object.__setattr__(layout, "partial", partial)
        object.__setattr__(layout, "bits", bits)
        return layout

    @classmethod
    def _of_blocks(cls, blocks: Blocks, block_q: int, block_kv: int) -> BlockLayout:
        """Make a layout of blocks that were looked at pair by pair."""
        layout = cls.from_mask(blocks.visited, block_q, block_kv)
        if not len(blocks.bits):
            return layout
        partial = blocks.rows.gather(-1, layout.indices.long())
        partial = torch.where(layout._listed(), partial, -1)
        sizes = (block_q, block_kv, layout.num_kv_blocks)
        return cls._trusted(layout.counts, layout.indices, *sizes, partial, blocks.bits)

    def _part(self, batch: int, head: int, rows: slice) -> BlockLayout:
        """Return the lists of one batch entry and head, of some query blocks."""
        places = slice(batch, batch + 1), slice(head, head + 1), rows
        partial = None if self.partial is None else self.partial[places]
        sizes = (self.block_q, self.block_kv, self.num_kv_blocks)
        return self._trusted(self.counts[places], self.indices[places], *sizes, partial, self.bits)

    def _listed(self) -> torch.Tensor:
        """Which entries of `indices` count, bool of their shape."""
        return is_listed(self.counts, self.indices.shape[-1])

    def __repr__(self) -> str:
        batch, heads, num_q = self.counts.shape
        return (
            f"BlockLayout(batch={batch}, heads={heads}, blocks={num_q}x{self.num_kv_blocks}, "
            f"block_q={self.block_q}, block_kv={self.block_kv}, "
            + (f"partial={len(self.bits)}, " if self.bits is not None else "")
            + f"device={self.counts.device})"
        )

    def _sizes(self) -> tuple[object, ...]:
        return self.counts.shape, self.block_q, self.block_kv, self.num_kv_blocks

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockLayout):
            return NotImplemented
        return self is other or (
            self._sizes() == other._sizes()
            and same_values(self.counts, other.counts)
            and same_values(self.to_mask(), other.to_mask())
            and self._same_bits(other)
        )

    def _same_bits(self, other: BlockLayout) -> bool:
        """Whether two layouts of the same blocks see the same pairs of them."""
        if self.bits is None or other.bits is None:
            return self.bits is other.bits
        mine, theirs = (layout.partial[layout._listed()] for layout in (self, other))  # type: ignore[index]
        return same_values(mine < 0, theirs < 0) and same_values(
            self.bits[mine[mine >= 0]], other.bits[theirs[theirs >= 0]]
        )

    def __hash__(self) -> int:
        return hash(self._sizes())  # sizes alone: no wait for the device

    @classmethod
    def from_mask(cls, mask: torch.Tensor, block_q: int, block_kv: int) -> BlockLayout:
        """Build the lists from a mask of blocks, on its device and without a sync.

        Parameters
        ----------
        mask : Tensor
            bool ``(NQ, NKV)``, ``(H|1, NQ, NKV)`` or ``(B|1, H|1, NQ, NKV)``.
        block_q, block_kv : int
            Block sizes, multiples of 16.

        Raises
        ------
        TypeError, ValueError
            A wrong kind; a wrong rank, dtype or block size.

        Examples
        --------
        >>> import torch
        >>> from sparse_attn import BlockLayout
        >>> BlockLayout.from_mask(torch.ones(4, 4).tril().bool(), 64, 64).counts.tolist()
        [[[1, 2, 3, 4]]]
        """
        check_dense(_OWNER, "mask", mask)
        check_blocks(_OWNER, block_q, block_kv)
        mask = checked_mask(mask, "(NQ, NKV), (H, NQ, NKV) or (B, H, NQ, NKV)")
        counts, indices = ops.call("list_from_mask", (mask,), {})
        return cls._trusted(counts, indices, block_q, block_kv, mask.shape[-1])

    @classmethod
    def from_csr(
        cls,
        crow: torch.Tensor,
        col: torch.Tensor,
        shape: Sequence[int],
        block_q: int,
        block_kv: int,
    ) -> BlockLayout:
        """Build a layout from the fields of a compressed sparse row matrix of blocks.

        Parameters
        ----------
        crow, col : Tensor
            ``(..., NQ + 1)`` row starts and ``(..., nnz)`` column blocks, as
            `torch.sparse_csr_tensor` has them; up to two batch dimensions (B, Hq).
        shape : sequence of int
            ``(..., NQ, NKV)``, in blocks.
        block_q, block_kv : int
            Block sizes, multiples of 16.

        Raises
        ------
        TypeError, ValueError
            As the class does; row starts that do not rise from 0 to nnz.

        Examples
        --------
        >>> import torch
        >>> from sparse_attn import BlockLayout
        >>> csr = torch.eye(3).to_sparse_csr()
        >>> layout = BlockLayout.from_csr(csr.crow_indices(), csr.col_indices(), csr.shape, 16, 16)
        >>> layout.indices.tolist()
        [[[[0], [1], [2]]]]
        """
        counts, indices, num_kv = entries_of_csr(crow, col, shape)
        return cls(counts, indices, block_q, block_kv, num_kv)

    def to_mask(self) -> torch.Tensor:
        """Return the mask of blocks, on the layout's device and without a sync.

        Partial blocks are visited as others; `BlockSparse.mask` is that of tokens.

        Returns
        -------
        Tensor
            bool ``(B|1, H|1, NQ, NKV)``.

        Examples
        --------
        >>> from sparse_attn import BlockLayout
        >>> BlockLayout.local(48, 48, 16, 16, (1, 0)).to_mask()[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
        """
        return self._spread(torch.ones_like(self.indices, dtype=torch.bool), False)

    def _spread(self, entries: torch.Tensor, missing: Any) -> torch.Tensor:
        """Spread values of the listed entries over all blocks, ``(B|1, H|1, NQ, NKV)``."""
        column = torch.where(self._listed(), self.indices, self.num_kv_blocks).long()
        spread = entries.new_full((*self.counts.shape, self.num_kv_blocks + 1), missing)
        return spread.scatter(-1, column, entries)[..., : self.num_kv_blocks]

    def allows(self, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Tell which keys some rows see, bits included.

        Parameters
        ----------
        row, key : Tensor
            int64 or converted to it, ``(rows,)`` and ``(keys,)``, query and key indices. Below 0
            and past the last block nothing is seen.

        Returns
        -------
        Tensor
            bool ``(B|1, H|1, rows, keys)``.

        Examples
        --------
        >>> import torch
        >>> from sparse_attn import BlockLayout
        >>> layout = BlockLayout.from_token_mask(torch.eye(32).bool(), 16, 16)
        >>> layout.allows(torch.tensor([3]), torch.arange(2, 6)).int().tolist()
        [[[[0, 1, 0, 0]]]]
        """
        check_dense(_OWNER, "row", row)
        check_dense(_OWNER, "key", key)
        row, key = as_int64(_OWNER, "row", row), as_int64(_OWNER, "key", key)
        sizes = (self.block_q, self.block_kv)
        seen = of_pairs(self.to_mask(), row, key, *sizes)
        if self.bits is None or self.partial is None or not len(self.bits):
            return seen
        bits_row = of_pairs(self._spread(self.partial, -1), row, key, *sizes).long()
        place = (row % self.block_q)[:, None], key % self.block_kv
        return seen & seen_by_bits(self.bits, bits_row, *place)

    def to_flex(
        self, Sq: int | None = None, Skv: int | None = None, heads: int | None = None
    ) -> Any:
        """Return FlexAttention's `BlockMask`, with partial blocks and a ``mask_mod``.

        Parameters
        ----------
        Sq, Skv : int, optional
            Lengths when they are no multiples of the block sizes.
        heads : int, optional
            Query heads of the call, for lists of key heads; by default lists are of query heads.

        Returns
        -------
        torch.nn.attention.flex_attention.BlockMask

        Raises
        ------
        TypeError, ValueError
            Numbers that are no ints; lengths that the layout does not cover exactly; heads that are
            no multiple of the layout's.

        Examples
        --------
        >>> from sparse_attn import BlockLayout
        >>> BlockLayout.local(64, 64, 16, 16, 1).to_flex(60, 64).shape
        (1, 1, 60, 64)
        """
        Sq = self.counts.shape[-1] * self.block_q if Sq is None else Sq
        Skv = self.num_kv_blocks * self.block_kv if Skv is None else Skv
        self.check_lengths(Sq, Skv)
        return block_mask_from(self, Sq, Skv, heads)

    def to(self, device: torch.device | str) -> BlockLayout:
        """Return the layout on another device.

        Parameters
        ----------
        device : torch.device or str
            Where its tensors go.

        Returns
        -------
        BlockLayout

        Examples
        --------
        >>> from sparse_attn import BlockLayout
        >>> BlockLayout.local(64, 64, 16, 16, 1).to("meta").counts.device
        device(type='meta')
        """
        device = as_device(_OWNER, device)
        counts, indices = self.counts.to(device), self.indices.to(device)
        partial = None if self.partial is None else self.partial.to(device)
        bits = None if self.bits is None else self.bits.to(device)
        sizes = (self.block_q, self.block_kv, self.num_kv_blocks)
        return self._trusted(counts, indices, *sizes, partial, bits)

    def check_lengths(self, Sq: int, Skv: int) -> None:
        """Raise ``ValueError`` unless the layout covers `Sq` queries and `Skv` keys exactly.

        Parameters
        ----------
        Sq, Skv : int
            Numbers of queries and keys; the last blocks may be partial.

        Raises
        ------
        TypeError, ValueError
            Lengths that are no ints; lengths of other numbers of blocks.

        Examples
        --------
        >>> from sparse_attn import BlockLayout
        >>> BlockLayout.local(48, 48, 16, 16, 1).check_lengths(40, 33)
        """
        check_integer(_OWNER, "Sq", Sq, 0)
        check_integer(_OWNER, "Skv", Skv, 0)
        want = (-(-Sq // self.block_q), -(-Skv // self.block_kv))
        got = (self.counts.shape[-1], self.num_kv_blocks)
        if got != want:
            what = f"a layout of {want[0]}x{want[1]} blocks for {Sq} queries and {Skv} keys"
            raise refuse(_OWNER, what, f"{got[0]}x{got[1]}")
