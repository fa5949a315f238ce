"""BlockLayout: the key blocks that each query block visits, as counts and ascending indices.

The form that every engine reads. ``from_mask`` builds it on the device without a sync; constructors
that are given indices check them and keep no alias. Ready makers (local, bigbird, strided) stand in
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
    check_block,
    check_integer,
    check_kind,
    check_tensor,
    refuse,
    same_values,
)
from .layout_entries import OWNER as _OWNER
from .layout_entries import check_entries, entries_of_csr, sorted_entries, with_rank
from .layout_flex import block_mask_from, masked_in_part
from .layout_makers import ReadyLayouts

__all__ = ["BlockLayout"]


@dataclass(frozen=True, eq=False, repr=False)
class BlockLayout(ReadyLayouts):
    """Key blocks listed for each query block.

    Parameters
    ----------
    counts : Tensor
        int32 ``(B|1, Hq|1, NQ)``: how many key blocks a query block visits. Heads are query heads;
        size one, or a missing leading dimension, means all.
    indices : Tensor
        int32 ``(B|1, Hq|1, NQ, max)``: which ones; they are sorted, entries past the count are
        ignored.
    block_q, block_kv : int
        Rows and keys of a block, multiples of 16. Rows go by query index i.
    num_kv_blocks : int
        Number of key blocks NKV.

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

    def __post_init__(self) -> None:
        check_entries("counts", self.counts)
        check_entries("indices", self.indices)
        check_block(_OWNER, "block_q", self.block_q)
        check_block(_OWNER, "block_kv", self.block_kv)
        check_integer(_OWNER, "num_kv_blocks", self.num_kv_blocks, 0)
        most = -(-MAX_LENGTH // self.block_kv)
        if self.num_kv_blocks > most:
            raise refuse(_OWNER, f"num_kv_blocks of at most {most}", self.num_kv_blocks)
        counts, indices = sorted_entries(self.counts, self.indices, self.num_kv_blocks)
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "indices", indices)

    @classmethod
    def _trusted(
        cls,
        counts: torch.Tensor,
        indices: torch.Tensor,
        block_q: int,
        block_kv: int,
        num_kv_blocks: int,
    ) -> BlockLayout:
        """Make a layout of tensors that our own kernels wrote: no checks, no sync."""
        layout = object.__new__(cls)
        object.__setattr__(layout, "counts", counts)
        object.__setattr__(layout, "indices", indices)
        object.__setattr__(layout, "block_q", block_q)
        object.__setattr__(layout, "block_kv", block_kv)
        object.__setattr__(layout, "num_kv_blocks", num_kv_blocks)
        return layout

    def __repr__(self) -> str:
        batch, heads, num_q = self.counts.shape
        return (
            f"BlockLayout(batch={batch}, heads={heads}, blocks={num_q}x{self.num_kv_blocks}, "
            f"block_q={self.block_q}, block_kv={self.block_kv}, device={self.counts.device})"
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
        )

    def __hash__(self) -> int:
        return hash(self._sizes())  # sizes alone: no wait for the device

    @classmethod
    def from_mask(cls, mask: torch.Tensor, block_q: int, block_kv: int) -> BlockLayout:
        """Build the lists from a mask of blocks, on its device and without a sync.

        Parameters
        ----------
        mask : Tensor
            bool ``(NQ, NKV)``, ``(Hq|1, NQ, NKV)`` or ``(B|1, Hq|1, NQ, NKV)``.
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
        check_tensor(_OWNER, "mask", mask)
        check_block(_OWNER, "block_q", block_q)
        check_block(_OWNER, "block_kv", block_kv)
        mask = with_rank(mask, 4, "mask", "(..., NQ, NKV)")
        counts, indices = ops.call("list_from_mask", mask)
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

    @classmethod
    def from_flex(cls, block_mask: Any, whole: bool = False) -> BlockLayout:
        """Build a layout from FlexAttention's `BlockMask`.

        Parameters
        ----------
        block_mask : torch.nn.attention.flex_attention.BlockMask
            Its full blocks are listed. Blocks that its ``mask_mod`` masks in part have no place
            here.
        whole : bool
            Visit partial blocks whole instead of refusing them.

        Raises
        ------
        TypeError
            No `BlockMask`.
        ValueError
            Partial blocks without ``whole=True``; block sizes that are no multiples of 16.

        Examples
        --------
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> from sparse_attn import BlockLayout
        >>> mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 256, 256, device="cpu")
        >>> BlockLayout.from_flex(mask, whole=True).counts.tolist()
        [[[1, 2]]]
        """
        from torch.nn.attention.flex_attention import BlockMask, noop_mask

        check_kind(_OWNER, "block_mask", block_mask, BlockMask, "a BlockMask")
        block_q, block_kv = block_mask.BLOCK_SIZE
        num_kv = -(-block_mask.seq_lengths[1] // block_kv)

        def blocks(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
            return cls(counts, indices, block_q, block_kv, num_kv).to_mask()

        mask = blocks(block_mask.kv_num_blocks, block_mask.kv_indices)
        if not whole and block_mask.mask_mod is not noop_mask:
            partial = int(masked_in_part(block_mask, mask).sum())
            if partial:
                got = f"{partial} blocks masked in part"
                raise refuse(_OWNER, "a block_mask of full blocks, or whole=True", got)
        if block_mask.full_kv_num_blocks is not None:
            mask = mask | blocks(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
        return cls.from_mask(mask, block_q, block_kv)

    def to_mask(self) -> torch.Tensor:
        """Return the mask of blocks, on the layout's device and without a sync.

        Returns
        -------
        Tensor
            bool ``(B|1, Hq|1, NQ, NKV)``.

        Examples
        --------
        >>> from sparse_attn import BlockLayout
        >>> BlockLayout.local(48, 48, 16, 16, (1, 0)).to_mask()[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
        """
        entries = torch.arange(self.indices.shape[-1], device=self.indices.device)
        listed = entries < self.counts[..., None]
        column = torch.where(listed, self.indices, self.num_kv_blocks).long()
        mask = column.new_zeros((*self.counts.shape, self.num_kv_blocks + 1), dtype=torch.bool)
        return mask.scatter(-1, column, True)[..., : self.num_kv_blocks]

    def to_flex(self, Sq: int | None = None, Skv: int | None = None) -> Any:
        """Return FlexAttention's `BlockMask`, every listed block full, with a ``mask_mod``.

        Parameters
        ----------
        Sq, Skv : int, optional
            Lengths when they are no multiples of the block sizes.

        Returns
        -------
        torch.nn.attention.flex_attention.BlockMask

        Raises
        ------
        TypeError, ValueError
            Lengths that are no ints; lengths that the layout does not cover exactly.

        Examples
        --------
        >>> from sparse_attn import BlockLayout
        >>> BlockLayout.local(64, 64, 16, 16, 1).to_flex(60, 64).shape
        (1, 1, 60, 64)
        """
        Sq = self.counts.shape[-1] * self.block_q if Sq is None else Sq
        Skv = self.num_kv_blocks * self.block_kv if Skv is None else Skv
        self.check_lengths(Sq, Skv)
        return block_mask_from(self, Sq, Skv)

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
        counts, indices = self.counts.to(device), self.indices.to(device)
        return self._trusted(counts, indices, self.block_q, self.block_kv, self.num_kv_blocks)

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
