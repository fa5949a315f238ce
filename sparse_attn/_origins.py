"""Where texts begin and end in a padded batch, for patterns that count from there.

Sinks, first global tokens, strided columns and first blocks count from a text's first token, and
block top-k chooses among the keys that there are.
"""

from __future__ import annotations

from typing import Any

import torch

from .by_head import ByHead
from .patterns import Band, BlockSparse, Dilated, Full, Pattern

__all__ = ["counts_from_origin", "first_tokens", "text_arguments"]


def counts_from_origin(pattern: Pattern) -> bool:
    """Whether a pattern names positions of the text, beside distances from the query.

    One of a kind that is not known here is taken to.
    """
    if isinstance(pattern, ByHead):
        return any(map(counts_from_origin, (*pattern.patterns.values(), pattern.rest)))
    if isinstance(pattern, Band):
        return pattern.sinks > 0 or pattern.global_tokens is not None
    if isinstance(pattern, Dilated):
        return pattern.sinks > 0
    return not isinstance(pattern._region, (Full, BlockSparse))


def first_tokens(tokens: torch.Tensor) -> torch.Tensor:
    """Return the first token's key of each text, int64 (B,); `tokens` is bool (B, Skv)."""
    index = torch.arange(tokens.shape[1], device=tokens.device)
    return torch.where(tokens, index, tokens.shape[1]).amin(-1)


def text_arguments(pattern: Pattern, padding: torch.Tensor | None, seq_q: int) -> dict[str, Any]:
    """Say to the ops where each text begins and ends, beside a mask of its padding.

    Parameters
    ----------
    pattern : Pattern
        Nothing is said for one that does not ask.
    padding : Tensor, optional
        (B, 1, 1, Skv), bool (true for tokens) or additive.
    seq_q : int
        Queries of the call.
    """
    if padding is None or not counts_from_origin(pattern):
        return {}
    tokens = padding[:, 0, 0]
    if tokens.dtype != torch.bool:
        tokens = tokens > torch.finfo(tokens.dtype).min / 2
    first, end = first_tokens(tokens), tokens.shape[1] - first_tokens(tokens.flip(1))
    bounds = torch.stack([first, end], -1)[:, None, None].expand(-1, 1, seq_q, 2)
    return {"key_origin": first.int(), "key_bounds": bounds.int()}
