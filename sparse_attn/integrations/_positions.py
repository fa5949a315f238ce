"""Where the queries and keys of a call stand in the text.

A sliding cache has dropped its oldest keys: key j of the call is key ``first + j`` of the text.
Windows and taps count from the query and do not notice; sinks, global tokens, strided columns and
blocks count from the beginning of the text, so the pattern moves by `first`. The mask function
knows `first` and writes it on its masks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..patterns import Band, BlockSparse, BlockTopK, Dilated, Pattern, Strided
from ._masks import Note, is_intervals

__all__ = ["counts_from_first", "first_key", "from_first_key", "narrowed_mask", "query_positions"]


def counts_from_first(pattern: Pattern) -> bool:
    """Whether a pattern names positions of the text, beside distances from the query."""
    if isinstance(pattern, Band):
        return pattern.sinks > 0 or pattern.global_tokens is not None
    if isinstance(pattern, Dilated):
        return pattern.sinks > 0
    return isinstance(pattern, (Strided, BlockSparse, BlockTopK))


def first_key(module: nn.Module, note: Note | None, seq_q: int, seq_kv: int) -> int | None:
    """Return the position of the first key in the text, None where nothing says it."""
    if note is not None:
        return note.first_key
    return 0 if seq_q == seq_kv or not _slides(module) else None


def _slides(module: nn.Module) -> bool:
    """Whether a layer's cache may drop keys, as caches read it from the configuration."""
    config: Any = getattr(module, "config", None)
    types, number = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if types is not None and number is not None:
        return types[number] != "full_attention"
    windows = ("sliding_window", "attention_chunk_size")
    return any(getattr(config, name, None) is not None for name in windows)


def from_first_key(pattern: Pattern, first: int) -> Pattern | None:
    """Let a pattern that counts from the text count from the first key; None if no pattern can."""
    if first == 0:
        return pattern
    if isinstance(pattern, (Band, Dilated)):
        pattern = replace(pattern, sinks=max(0, pattern.sinks - first))
    if isinstance(pattern, Band) and pattern.global_tokens is not None:
        if isinstance(pattern.global_tokens, torch.Tensor):
            return None
        return replace(pattern, global_tokens=max(0, pattern.global_tokens - first))
    return None if isinstance(pattern, Strided) and first % pattern.stride else pattern


def narrowed_mask(
    mask: torch.Tensor, pattern: Pattern, first: int, is_causal: bool, batch: int, seq_kv: int
) -> torch.Tensor:
    """Cut a mask, intervals or dense, to what a pattern allows at positions of the text."""
    seq_q = mask.shape[2]
    row = torch.arange(seq_q, device=mask.device)[:, None]
    key = torch.arange(seq_kv, device=mask.device)
    position = row + (seq_kv - seq_q)
    if is_causal:
        position = row + query_positions(mask, batch, seq_q)[:, None, None, None]
    allowed = pattern.allows(row, position + first, key + first)
    if is_intervals(mask):
        return allowed & (mask[..., :1] <= key) & (key < mask[..., 1:])
    return mask & allowed if mask.dtype == torch.bool else mask.masked_fill(~allowed, -torch.inf)


def query_positions(mask: torch.Tensor, batch: int, seq_q: int) -> torch.Tensor:
    """Key index of query 0, int32 (B,), read off a causal mask: a token's last key is its own.

    A static cache is longer than its contents, so the lengths do not say it. Rows of padding end
    before their own position, so the maximum over the rows is that of the tokens.
    """
    if is_intervals(mask):
        last = mask[..., 1] - 1
    else:
        allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        index = torch.arange(1, mask.shape[-1] + 1, device=mask.device, dtype=torch.int32)
        last = (allowed * index).amax(-1) - 1
    row = torch.arange(seq_q, device=mask.device, dtype=torch.int32)
    return (last - row).amax((1, 2)).to(torch.int32).expand(batch)
