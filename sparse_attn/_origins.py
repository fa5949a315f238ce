"""Where texts begin and end in a padded batch, for patterns that count from there.

Sinks, first global tokens, strided columns and first blocks count from a text's first token, and
block top-k chooses among the keys that there are. Models forbid a key by -inf or by the lowest
number of their mask's type; the ops know -inf alone, which matters where keys are ranked.
"""

from __future__ import annotations

from typing import Any

import torch

from .patterns import Band, BlockSparse, Dilated, Full, Pattern, TopK

__all__ = [
    "asks_positions",
    "bool_mask",
    "counts_from_origin",
    "first_tokens",
    "rankable",
    "text_arguments",
]


def asks_positions(pattern: Pattern) -> bool:
    """Whether a pattern's keys depend on where queries stand: neither all keys nor listed blocks.

    One of a kind that is not known here is taken to ask.
    """
    return not isinstance(pattern._region, (Full, BlockSparse))


def counts_from_origin(pattern: Pattern) -> bool:
    """Whether a pattern names positions of the text, beside distances from the query.

    One of a kind that is not known here is taken to.
    """
    return any(map(_counts_from_origin, pattern._head_patterns))


def _counts_from_origin(pattern: Pattern) -> bool:
    if isinstance(pattern, Band):
        return pattern.sinks > 0 or pattern.global_tokens is not None
    if isinstance(pattern, Dilated):
        return pattern.sinks > 0
    return asks_positions(pattern)


def bool_mask(mask: torch.Tensor) -> torch.Tensor:
    """View a dense mask, bool or additive, as bool: true where a key may be seen."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def rankable(pattern: Pattern, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return a model's mask with -inf at the keys that it forbids, for patterns that rank keys.

    A finite number, however low, takes no part in token top-k's choice.
    """
    if mask is None or not mask.is_floating_point():
        return mask
    if not any(isinstance(own, TopK) for own in pattern._head_patterns):
        return mask
    return mask.masked_fill(~bool_mask(mask), -torch.inf)


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
    tokens = bool_mask(padding[:, 0, 0])
    first, end = first_tokens(tokens), tokens.shape[1] - first_tokens(tokens.flip(1))
    bounds = torch.stack([first, end], -1)[:, None, None].expand(-1, 1, seq_q, 2)
    return {"key_origin": first.int(), "key_bounds": bounds.int()}
