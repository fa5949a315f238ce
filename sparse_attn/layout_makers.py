"""Masks of blocks for the ready layouts: local, BigBird, strided.

Blocks touch the diagonal where a row of the query block stands at a key of the key block
(lower-right alignment); windows and strides count key blocks. Called by BlockLayout's makers.
Causal masking is left to the op.
"""

from __future__ import annotations

import torch

from ._checks import check_block, check_integer, check_window

__all__ = ["bigbird_mask", "local_mask", "strided_mask"]

Window = int | tuple[int | None, int | None]
Device = torch.device | str | None


def _diagonal(
    Sq: int, Skv: int, block_q: int, block_kv: int, device: Device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Key blocks of a query block's first and last row ``(NQ, 1)``; all blocks ``(1, NKV)``."""
    owner = "BlockLayout"
    check_integer(owner, "Sq", Sq, 0)
    check_integer(owner, "Skv", Skv, 0)
    check_block(owner, "block_q", block_q)
    check_block(owner, "block_kv", block_kv)
    start = torch.arange(0, Sq, block_q, device=device)[:, None]
    end = torch.clamp(start + block_q, max=Sq) - 1
    offset = Skv - Sq
    key_block = torch.arange(-(-Skv // block_kv), device=device)[None, :]
    return (start + offset) // block_kv, (end + offset) // block_kv, key_block


def local_mask(
    Sq: int, Skv: int, block_q: int, block_kv: int, window: Window, device: Device = None
) -> torch.Tensor:
    """Key blocks from `left` blocks before a query block's diagonal to `right` blocks after it.

    Parameters
    ----------
    Sq, Skv : int
        Lengths; the last blocks may be partial.
    block_q, block_kv : int
        Block sizes, multiples of 16.
    window : int or (int or None, int or None)
        Key blocks left and right; an int is both, None has no limit.
    device : torch.device, optional
        Where the mask is made.

    Returns
    -------
    Tensor
        bool ``(NQ, NKV)``.

    Examples
    --------
    >>> from sparse_attn.layout_makers import local_mask
    >>> local_mask(48, 48, 16, 16, (1, 0)).int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    left, right = check_window("BlockLayout", window)
    first, last, key_block = _diagonal(Sq, Skv, block_q, block_kv, device)
    mask = torch.ones(first.shape[0], key_block.shape[1], dtype=torch.bool, device=device)
    if left is not None:
        mask &= key_block >= first - left
    if right is not None:
        mask &= key_block <= last + right
    return mask


def bigbird_mask(
    Sq: int,
    Skv: int,
    block_q: int,
    block_kv: int,
    window: Window = 1,
    num_global: int = 1,
    num_random: int = 2,
    seed: int = 0,
    device: Device = None,
) -> torch.Tensor:
    """BigBird (Zaheer et al. 2020): a local window, global blocks, random blocks.

    Parameters
    ----------
    Sq, Skv, block_q, block_kv, window, device
        As in `local_mask`.
    num_global : int
        The first key blocks are seen by all; query blocks whose diagonal touches them see all.
    num_random : int
        Further key blocks of each query block, drawn without replacement from all.
    seed : int
        Of the draw, which is made on the CPU and so alike on every device.

    Returns
    -------
    Tensor
        bool ``(NQ, NKV)``.
    """
    check_integer("BlockLayout", "num_global", num_global, 0)
    check_integer("BlockLayout", "num_random", num_random, 0)
    mask = local_mask(Sq, Skv, block_q, block_kv, window, device)
    first, last, key_block = _diagonal(Sq, Skv, block_q, block_kv, device)
    mask |= (key_block < num_global) | ((last >= 0) & (first < num_global))
    generator = torch.Generator().manual_seed(seed)
    draw = torch.rand(mask.shape, generator=generator).argsort(-1)[:, :num_random]
    return mask.scatter(-1, draw.to(mask.device), True)


def strided_mask(
    Sq: int,
    Skv: int,
    block_q: int,
    block_kv: int,
    local: int,
    stride: int,
    device: Device = None,
) -> torch.Tensor:
    """Local and every stride-th key block (Sparse Transformer, Child et al. 2019), none ahead.

    Parameters
    ----------
    Sq, Skv, block_q, block_kv, device
        As in `local_mask`.
    local : int
        Key blocks that end at the diagonal, at least 1.
    stride : int
        Of the key blocks up to the diagonal, every stride-th: ``j mod stride == stride - 1``.

    Returns
    -------
    Tensor
        bool ``(NQ, NKV)``.
    """
    check_integer("BlockLayout", "local", local, 1)
    check_integer("BlockLayout", "stride", stride, 1)
    _, last, key_block = _diagonal(Sq, Skv, block_q, block_kv, device)
    column = (key_block % stride == stride - 1) & (key_block <= last)
    return column | local_mask(Sq, Skv, block_q, block_kv, (local - 1, 0), device)
