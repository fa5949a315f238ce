"""Partial blocks of a layout: a bit for each pair, so that any token mask is exact.

A block that is seen whole needs no bits, and equal partial blocks share a row. Masks are looked at
some blocks at a time, never all pairs at once. Called by the constructors of ``layout_tokens`` and
``layout_nd``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from ._checks import check_kind, dtype_name, kind_of, refuse

__all__ = [
    "PAIRS",
    "Blocks",
    "blocks_of_mask",
    "checked_mod",
    "existing_pairs",
    "judged",
    "of_pairs",
    "pairs_of_mod",
    "seen_by_bits",
]

#: Pairs that are looked at in one step.
PAIRS = 2**24


class Blocks(NamedTuple):
    """What a token mask is in blocks."""

    visited: torch.Tensor  # bool: some pair is allowed
    rows: torch.Tensor  # int32, of the same shape: row of bits, -1 for a block without
    bits: torch.Tensor  # int32 (P, block_q, words)


def packed(pairs: torch.Tensor) -> torch.Tensor:
    """Pack bool ``(..., keys)`` into int32 ``(..., words)``: bit j % 32 of word j / 32 is key j."""
    pairs = torch.nn.functional.pad(pairs, (0, -pairs.shape[-1] % 32))
    place = torch.arange(32, device=pairs.device)
    words = (pairs.unflatten(-1, (-1, 32)).long() << place).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def seen_by_bits(bits: torch.Tensor, bits_row: Any, row: Any, key: Any) -> Any:
    """Whether rows see keys of their block: its bits say it, or `bits_row` -1, a whole block.

    Parameters
    ----------
    bits : Tensor
        int32 ``(P, block_q, words)``.
    bits_row, row, key : Tensor
        Of the pairs, as they broadcast: the block's row of `bits`, and row and key in the block.
    """
    word = bits[bits_row.clamp(min=0), row, key // 32]
    return (bits_row < 0) | ((word >> (key % 32)) & 1 > 0)


def existing_pairs(Sq: int, Skv: int, block_q: int, block_kv: int, device: Any) -> torch.Tensor:
    """Count the pairs of every block, int64 ``(NQ, NKV)``: the last ones may be short."""
    rows = (Sq - torch.arange(0, Sq, block_q, device=device)).clamp(max=block_q)
    keys = (Skv - torch.arange(0, Skv, block_kv, device=device)).clamp(max=block_kv)
    return rows[:, None] * keys


def of_pairs(
    blocks: torch.Tensor, row: torch.Tensor, key: torch.Tensor, block_q: int, block_kv: int
) -> torch.Tensor:
    """Return the value of each pair's block, zero for pairs outside all blocks.

    Nothing waits for the device, where an index out of range would end the process.

    Parameters
    ----------
    blocks : Tensor
        ``(..., NQ, NKV)``
    row, key : Tensor
        int64 ``(rows,)`` and ``(keys,)``.

    Returns
    -------
    Tensor
        ``(..., rows, keys)``
    """
    num_q, num_kv = blocks.shape[-2:]
    bordered = torch.nn.functional.pad(blocks, (0, 1, 0, 1))
    is_row = (row >= 0) & (row < num_q * block_q)
    is_key = (key >= 0) & (key < num_kv * block_kv)
    block_row = torch.where(is_row, row // block_q, num_q)
    block_key = torch.where(is_key, key // block_kv, num_kv)
    return bordered[..., block_row, :][..., block_key]


def judged(groups: Iterable[tuple[torch.Tensor, torch.Tensor]], whole: bool) -> Blocks:
    """Tell blocks without a pair, whole and partial ones apart; give the last their bits.

    A group is bool ``(n, block_q, block_kv)``, the allowed pairs of n blocks, and ``(n,)``, the
    number of pairs that each has. `whole` sees partial blocks whole.
    """
    visited, rows = [], []
    bits: list[torch.Tensor] = []
    count_of_bits = 0
    for allowed, existing in groups:
        count = allowed.sum((-1, -2))
        partial = (count > 0) & (count < existing) & (not whole)
        row = torch.full_like(count, -1)
        bits.append(packed(allowed[partial]))
        row[partial] = torch.arange(len(bits[-1]), device=row.device) + count_of_bits
        count_of_bits += len(bits[-1])
        visited.append(count > 0)
        rows.append(row)
    every, order = torch.cat(bits), torch.cat(rows)
    if every.shape[0]:
        distinct, place = torch.unique(every.flatten(1), dim=0, return_inverse=True)
        every = distinct.unflatten(1, every.shape[1:])
        order = torch.where(order < 0, -1, place[order])
    return Blocks(torch.cat(visited), order.to(torch.int32), every)


def blocks_of_mask(
    strip_of: Callable[[int, int], torch.Tensor],
    sizes: tuple[int, int, int, int],
    block_q: int,
    block_kv: int,
    whole: bool,
    device: Any,
) -> Blocks:
    """Make blocks ``(B, H, NQ, NKV)`` of a token mask of `sizes` ``(B, H, Sq, Skv)``.

    ``strip_of(begin, end)`` gives those rows of it.
    """
    batch, heads, Sq, Skv = sizes
    existing = existing_pairs(Sq, Skv, block_q, block_kv, device)
    num_q, num_kv = existing.shape
    step = max(1, PAIRS // max(1, batch * heads * block_q * Skv))

    def groups() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for first in range(0, max(num_q, 1), step):
            pairs = strip_of(first * block_q, min((first + step) * block_q, Sq))
            tail = (0, -Skv % block_kv, 0, -pairs.shape[-2] % block_q)
            pairs = torch.nn.functional.pad(pairs.expand(batch, heads, -1, -1), tail)
            pairs = pairs.unflatten(-1, (num_kv, block_kv)).unflatten(-3, (-1, block_q))
            pairs = pairs.permute(2, 0, 1, 4, 3, 5)  # (nq, B, H, NKV, block_q, block_kv)
            of_head = existing[first : first + step, None, None].expand(pairs.shape[:4])
            yield pairs.flatten(0, 3), of_head.flatten()

    blocks = judged(groups(), whole)
    shape = (num_q, batch, heads, num_kv)
    visited, rows = (tensor.view(shape).permute(1, 2, 0, 3) for tensor in blocks[:2])
    return Blocks(visited, rows, blocks.bits)


def checked_mod(owner: str, mask_mod: Any) -> Callable[..., torch.Tensor]:
    """Return ``mask_mod`` with its answers checked; refuse what takes other arguments."""
    if not callable(mask_mod):
        check_kind(owner, "mask_mod", mask_mod, Callable, "a function of (b, h, q_idx, kv_idx)")
    with suppress(ValueError):  # a function without a signature
        signature = inspect.signature(mask_mod)
        try:
            signature.bind(None, None, None, None)
        except TypeError as error:
            what = "mask_mod to be a function of (b, h, q_idx, kv_idx)"
            raise TypeError(f"sparse_attn.{owner}: expected {what}, got {signature}") from error

    def checked(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
        try:
            allowed = mask_mod(b, h, q_idx, kv_idx)
        except RuntimeError as error:
            if "data-dependent control flow" not in str(error):
                raise
            what = "mask_mod of tensor operations alone (write & for and, | for or, torch.where)"
            raise refuse(owner, what, "Python's if, and, or on a tensor") from error
        if not isinstance(allowed, torch.Tensor):
            got: Any = kind_of(allowed)
        elif allowed.dtype != torch.bool:
            got = dtype_name(allowed.dtype)
        elif allowed.dim() > 0:
            got = f"shape {tuple(allowed.shape)} for one pair"
        else:
            return allowed
        what = "mask_mod to return a bool tensor of one number"
        raise TypeError(f"sparse_attn.{owner}: expected {what}, got {got}")

    return checked


def pairs_of_mod(
    mask_mod: Callable[..., Any], first: list[torch.Tensor], ends: list[int], rows: int, keys: int
) -> torch.Tensor:
    """Evaluate FlexAttention's ``mask_mod`` on blocks of pairs, bool ``(n, rows, keys)``.

    `first` holds int64 ``(n,)`` each: batch entry, head, first row and first key of the blocks;
    pairs past `ends`, the lengths, are not allowed and not asked about.
    """
    from torch.nn.attention.flex_attention import create_mask

    batch, head, row, key = first
    last_row, last_key = (end - 1 for end in ends)

    def of_block(n: Any, _: Any, q_idx: Any, kv_idx: Any) -> Any:
        q, k = row[n] + q_idx, key[n] + kv_idx
        allowed = mask_mod(batch[n], head[n], q.clamp(max=last_row), k.clamp(max=last_key))
        return allowed & (q <= last_row) & (k <= last_key)

    mask = create_mask(of_block, len(row), 1, rows, keys, device=row.device)
    return mask.expand(len(row), 1, rows, keys)[:, 0]
