"""The ready layouts of BlockLayout: local, BigBird, strided.

Blocks touch the diagonal where a row of the query block stands at a key of the key block
(lower-right alignment); windows and strides count key blocks. Causal masking is left to the op.
"""

from __future__ import annotations

import torch

from ._checks import (
    Integer,
    as_device,
    check_block,
    check_integer,
    check_kind,
    check_length,
    check_window,
    clamped,
    refuse,
)
from ._part_of import part_of
from .layout_entries import OWNER, Device, Layout
from .windows import Window

__all__ = ["ReadyLayouts"]


#: Key blocks of a query block's first and last row ``(NQ, 1)``; all key blocks ``(1, NKV)``.
Diagonal = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _diagonal(Sq: int, Skv: int, block_q: int, block_kv: int, device: Device) -> Diagonal:
    """Return where the diagonal lies in blocks of a call."""
    check_length(OWNER, "Sq", Sq)
    check_length(OWNER, "Skv", Skv)
    check_block(OWNER, "block_q", block_q)
    check_block(OWNER, "block_kv", block_kv)
    device = None if device is None else as_device(OWNER, device)
    start = torch.arange(0, Sq, block_q, device=device)[:, None]
    end = torch.clamp(start + block_q, max=Sq) - 1
    offset = Skv - Sq
    key_block = torch.arange(-(-Skv // block_kv), device=device)[None, :]
    return (start + offset) // block_kv, (end + offset) // block_kv, key_block


def _local_mask(diagonal: Diagonal, window: Window) -> torch.Tensor:
    """Key blocks ``(NQ, NKV)`` in a window around each query block's diagonal."""
    left, right = map(clamped, check_window(OWNER, window))
    first, last, key_block = diagonal
    mask = torch.ones(first.shape[0], key_block.shape[1], dtype=torch.bool, device=key_block.device)
    if left is not None:
        mask &= key_block >= first - left
    if right is not None:
        mask &= key_block <= last + right
    return mask


@part_of("BlockLayout")
class ReadyLayouts:
    """Class methods of `BlockLayout` that make a layout from lengths and a few numbers."""

    @classmethod
    def local(
        cls: type[Layout],
        Sq: int,
        Skv: int,
        block_q: int,
        block_kv: int,
        window: Window,
        device: Device = None,
    ) -> Layout:
        """Make a band of blocks around the diagonal.

        Parameters
        ----------
        Sq, Skv : int
            Lengths; the last blocks may be partial.
        block_q, block_kv : int
            Block sizes, multiples of 16.
        window : int or (int or None, int or None)
            Key blocks left and right of the diagonal; an int is both, None has no limit.
        device : torch.device, optional
            Where the lists are made.

        Returns
        -------
        BlockLayout

        Raises
        ------
        TypeError, ValueError
            An argument of a wrong kind; a negative length; a block size that 16 does not divide.

        Examples
        --------
        >>> from sparse_attn import BlockLayout
        >>> BlockLayout.local(48, 48, 16, 16, (1, 0)).counts.tolist()
        [[[1, 2, 2]]]
        """
        diagonal = _diagonal(Sq, Skv, block_q, block_kv, device)
        return cls.from_mask(_local_mask(diagonal, window), block_q, block_kv)

    @classmethod
    def bigbird(
        cls: type[Layout],
        Sq: int,
        Skv: int,
        block_q: int,
        block_kv: int,
        window: Window = 1,
        num_global: int = 1,
        num_random: int = 2,
        seed: int = 0,
        device: Device = None,
    ) -> Layout:
        """Make window, global and random blocks (BigBird, Zaheer et al. 2020, section 2).

        Parameters
        ----------
        Sq, Skv, block_q, block_kv, window, device
            As in `local`.
        num_global : int
            The first key blocks are seen by all; query blocks whose diagonal touches them see all.
        num_random : int
            Further key blocks of each query block, drawn without replacement from all.
        seed : int
            Of the draw, which is made on the CPU and so alike on every device.

        Returns
        -------
        BlockLayout

        Raises
        ------
        TypeError, ValueError
            As `local`; a negative number of blocks.

        Examples
        --------
        >>> from sparse_attn import BlockLayout
        >>> BlockLayout.bigbird(64, 64, 16, 16, window=0, num_random=0).to_mask()[0, 0].int()
        tensor([[1, 1, 1, 1],
                [1, 1, 0, 0],
                [1, 0, 1, 0],
                [1, 0, 0, 1]], dtype=torch.int32)
        """
        num_global = clamped(check_integer(OWNER, "num_global", num_global, 0))
        num_random = clamped(check_integer(OWNER, "num_random", num_random, 0))
        check_kind(OWNER, "seed", seed, Integer, "an int")
        if not -(2**63) <= seed < 2**64:
            raise refuse(OWNER, "seed of 64 bits", seed)
        diagonal = _diagonal(Sq, Skv, block_q, block_kv, device)
        mask = _local_mask(diagonal, window)
        first, last, key_block = diagonal
        mask |= (key_block < num_global) | ((last >= 0) & (first < num_global))
        generator = torch.Generator().manual_seed(int(seed))
        draw = torch.rand(mask.shape, generator=generator, dtype=torch.float32, device="cpu")
        chosen = draw.argsort(-1)[:, :num_random].to(mask.device)
        return cls.from_mask(mask.scatter(-1, chosen, True), block_q, block_kv)

    @classmethod
    def strided(
        cls: type[Layout],
        Sq: int,
        Skv: int,
        block_q: int,
        block_kv: int,
        local: int,
        stride: int,
        device: Device = None,
    ) -> Layout:
        """Make local and every stride-th key blocks (Child et al. 2019, section 4.3), none ahead.

        Parameters
        ----------
        Sq, Skv, block_q, block_kv, device
            As in `local`, the method.
        local : int
            Key blocks that end at the diagonal, at least 1.
        stride : int
            Of the key blocks up to the diagonal, every stride-th: ``j mod stride == stride - 1``.

        Returns
        -------
        BlockLayout

        Raises
        ------
        TypeError, ValueError
            As `local`; a `local` or `stride` below 1.

        Examples
        --------
        >>> from sparse_attn import BlockLayout
        >>> BlockLayout.strided(64, 64, 16, 16, local=1, stride=2).to_mask()[0, 0].int().tolist()
        [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 0, 1]]
        """
        local = clamped(check_integer(OWNER, "local", local, 1))
        stride = clamped(check_integer(OWNER, "stride", stride, 1))
        diagonal = _diagonal(Sq, Skv, block_q, block_kv, device)
        _, last, key_block = diagonal
        column = (key_block % stride == stride - 1) & (key_block <= last)
        mask = column | _local_mask(diagonal, (local - 1, 0))
        return cls.from_mask(mask, block_q, block_kv)
