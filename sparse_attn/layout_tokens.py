"""Layouts from masks of tokens, exact by bits: a mask, FlexAttention's mask_mod or BlockMask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ._checks import (
    as_device,
    check_blocks,
    check_dense,
    check_kind,
    check_length,
    refuse,
)
from ._part_of import part_of
from .layout_bits import (
    PAIRS,
    Blocks,
    blocks_of_mask,
    checked_mod,
    existing_pairs,
    judged,
    pairs_of_mod,
)
from .layout_entries import OWNER, Device, Layout, checked_mask

__all__ = ["TokenLayouts"]


@part_of("BlockLayout")
class TokenLayouts:
    """Class methods of `BlockLayout` that make a layout from a mask of tokens."""

    @classmethod
    def from_token_mask(
        cls: type[Layout], mask: torch.Tensor, block_q: int, block_kv: int, whole: bool = False
    ) -> Layout:
        """Make the layout that is exactly a mask of tokens.

        Blocks without an allowed pair are left out, blocks of which every pair is allowed are seen
        whole, the others carry a bit for each pair. The mask is read, which waits for the device.

        Parameters
        ----------
        mask : Tensor
            bool ``(Sq, Skv)``, ``(H|1, Sq, Skv)`` or ``(B|1, H|1, Sq, Skv)``, true where query i
            sees key j.
        block_q, block_kv : int
            Block sizes, multiples of 16.
        whole : bool
            See partial blocks whole instead.

        Returns
        -------
        BlockLayout

        Raises
        ------
        TypeError, ValueError
            A wrong kind; a wrong rank, dtype or block size.

        Examples
        --------
        >>> import torch
        >>> from sparse_attn import BlockLayout
        >>> layout = BlockLayout.from_token_mask(torch.ones(40, 40).tril().bool(), 16, 16)
        >>> layout.to_mask()[0, 0].int().tolist(), layout.bits.shape[0]
        ([[1, 0, 0], [1, 1, 0], [1, 1, 1]], 2)
        """
        check_dense(OWNER, "mask", mask)
        check_blocks(OWNER, block_q, block_kv)
        check_kind(OWNER, "whole", whole, bool, "a bool")
        mask = checked_mask(mask, "(Sq, Skv), (H, Sq, Skv) or (B, H, Sq, Skv)")
        if mask.is_meta:
            raise refuse(OWNER, "mask with contents", "a meta tensor")
        batch, heads, Sq, Skv = mask.shape

        def strip(begin: int, end: int) -> torch.Tensor:
            return mask[:, :, begin:end]

        sizes = (batch, heads, Sq, Skv)
        blocks = blocks_of_mask(strip, sizes, block_q, block_kv, whole, mask.device)
        return cls._of_blocks(blocks, block_q, block_kv)

    @classmethod
    def from_mask_mod(
        cls: type[Layout],
        mask_mod: Callable[..., Any],
        B: int | None,
        H: int | None,
        Sq: int,
        Skv: int,
        block_q: int,
        block_kv: int,
        device: Device = None,
        whole: bool = False,
    ) -> Layout:
        """Make the layout that is exactly FlexAttention's ``mask_mod``.

        Every pair is asked about, some rows at a time; no dense mask is made.

        Parameters
        ----------
        mask_mod : callable
            ``mask_mod(b, h, q_idx, kv_idx)`` of index tensors, as `create_block_mask` takes it.
        B, H : int or None
            Batch entries and heads that differ; None, as 1, means all alike.
        Sq, Skv : int
            Lengths; the last blocks may be short.
        block_q, block_kv : int
            Block sizes, multiples of 16.
        device : torch.device, optional
            Where the mask is asked about and the lists are made.
        whole : bool
            See partial blocks whole instead.

        Returns
        -------
        BlockLayout

        Raises
        ------
        TypeError, ValueError
            An argument of a wrong kind; a number out of range.

        Examples
        --------
        >>> from sparse_attn import BlockLayout, BlockSparse
        >>> layout = BlockLayout.from_mask_mod(
        ...     lambda b, h, q, k: q - k == 3, None, None, 64, 64, 16, 16
        ... )
        >>> int(BlockSparse(layout).mask(64, 64).sum())
        61
        """
        from torch.nn.attention.flex_attention import create_mask

        mod = checked_mod(OWNER, mask_mod)
        batch = 1 if B is None else check_length(OWNER, "B", B, 1)
        heads = 1 if H is None else check_length(OWNER, "H", H, 1)
        check_length(OWNER, "Sq", Sq)
        check_length(OWNER, "Skv", Skv)
        check_blocks(OWNER, block_q, block_kv)
        check_kind(OWNER, "whole", whole, bool, "a bool")
        device = torch.get_default_device() if device is None else as_device(OWNER, device)
        if device.type == "meta":
            raise refuse(OWNER, "a device on which mask_mod can be asked", device)

        def strip(begin: int, end: int) -> torch.Tensor:
            def shifted(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
                return mod(b, h, q_idx + begin, kv_idx)

            if begin == end or Skv == 0:
                return torch.zeros(1, 1, end - begin, Skv, dtype=torch.bool, device=device)
            return create_mask(shifted, batch, heads, end - begin, Skv, device=device)

        sizes = (batch, heads, Sq, Skv)
        blocks = blocks_of_mask(strip, sizes, block_q, block_kv, whole, device)
        return cls._of_blocks(blocks, block_q, block_kv)

    @classmethod
    def from_flex(cls: type[Layout], block_mask: Any, whole: bool = False) -> Layout:
        """Make the layout that is exactly FlexAttention's `BlockMask`.

        Its full blocks are seen whole. Its partial ones are asked about pair by pair.

        Parameters
        ----------
        block_mask : torch.nn.attention.flex_attention.BlockMask
            With block sizes that are multiples of 16.
        whole : bool
            See partial blocks whole instead; nothing is asked then.

        Returns
        -------
        BlockLayout

        Raises
        ------
        TypeError
            No `BlockMask`.
        ValueError
            Block sizes that are no multiples of 16; a slice of a `BlockMask`, without its mask_mod.

        Examples
        --------
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> from sparse_attn import BlockLayout
        >>> mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 256, 256, device="cpu")
        >>> layout = BlockLayout.from_flex(mask)
        >>> layout.counts.tolist(), layout.partial.tolist()
        ([[[1, 2]]], [[[[0, -1], [-1, 0]]]])
        """
        from torch.nn.attention.flex_attention import BlockMask, noop_mask

        check_kind(OWNER, "block_mask", block_mask, BlockMask, "a BlockMask")
        check_kind(OWNER, "whole", whole, bool, "a bool")
        block_q, block_kv = block_mask.BLOCK_SIZE
        Sq, Skv = block_mask.seq_lengths
        num_kv = -(-Skv // block_kv)

        def listed(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
            return cls(counts, indices, block_q, block_kv, num_kv).to_mask()

        partial = listed(block_mask.kv_num_blocks, block_mask.kv_indices)
        full = torch.zeros_like(partial)
        if block_mask.full_kv_num_blocks is not None:
            full = listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
        if whole or block_mask.mask_mod is noop_mask:
            return cls.from_mask(full | partial, block_q, block_kv)
        if getattr(block_mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
            got = "a slice, which has lost it; set its mask_mod, or see its blocks by whole=True"
            raise refuse(OWNER, "block_mask with a mask_mod", got)
        places = (partial & ~full).nonzero(as_tuple=True)
        existing = existing_pairs(Sq, Skv, block_q, block_kv, partial.device)[places[2:]]

        def groups() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            step = max(1, PAIRS // (block_q * block_kv))
            for start in range(0, max(len(existing), 1), step):
                some = [index[start : start + step] for index in places]
                first = [some[0], some[1], some[2] * block_q, some[3] * block_kv]
                allowed = pairs_of_mod(block_mask.mask_mod, first, [Sq, Skv], block_q, block_kv)
                yield allowed, existing[start : start + step]

        if not len(existing):
            return cls.from_mask(full, block_q, block_kv)
        found = judged(groups(), whole=False)
        visited, rows = full.clone(), torch.full_like(full, -1, dtype=torch.int32)
        visited[places], rows[places] = found.visited, found.rows
        return cls._of_blocks(Blocks(visited, rows, found.bits), block_q, block_kv)
