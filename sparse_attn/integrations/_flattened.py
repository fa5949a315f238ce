"""Flattened batches: texts packed into one row, as transformers' flattening collator makes them.

The call says where they begin (``cu_seq_lens_q``), so they go through `varlen_attention`, and of
the mask, which says the same at length, nothing but its window is read.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from ..functional import varlen_attention
from ..patterns import Pattern
from ._layer import layer_error
from ._masks import Note, in_graph

__all__ = ["FLATTENED", "attend_flattened", "is_flattened", "longest_of", "window_of"]

#: Arguments of the call that describe a flattened batch.
FLATTENED = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"})


def is_flattened(query: torch.Tensor, extras: dict[str, Any]) -> bool:
    """Whether a call brings one row of packed texts, and where they begin."""
    starts = (extras.get("cu_seq_lens_q"), extras.get("cu_seq_lens_k"))
    return query.shape[0] == 1 and all(isinstance(start, torch.Tensor) for start in starts)


def longest_of(extras: dict[str, Any], tokens: int) -> tuple[int, int]:
    """Return the queries and keys of the longest text, `tokens` where the call does not say."""
    longest = (extras.get("max_length_q"), extras.get("max_length_k"))
    queries, keys = (size if isinstance(size, int) else tokens for size in longest)
    return queries, keys


def window_of(
    module: nn.Module,
    mask: torch.Tensor | None,
    note: Note | None,
    extras: dict[str, Any],
    is_causal: bool,
) -> tuple[int | None, int | None]:
    """Return the sides of the model's own window: of its mask, or where none tells, of the call.

    Raises
    ------
    NotImplementedError
        A mask of more than a window; of a graph, which does not see what masks are, chunks alone.
    """
    inside = None if note is None else note.inside
    by_mask = mask is not None and not in_graph()
    if by_mask and inside is not None:
        return inside
    if by_mask or (in_graph() and _is_chunked(module)):
        got = "a mask of more than a window, in a flattened batch"
        advice = "pass position_ids and use_cache=False alone, or a row for each text"
        raise layer_error(module, "attention_mask", got, advice)
    window = extras.get("sliding_window")
    left = None if window is None else window - 1
    return left, 0 if is_causal else left


def _is_chunked(module: nn.Module) -> bool:
    """Whether a layer's configuration gives it chunks (Llama 4)."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None) or ()
    number = getattr(module, "layer_idx", None)
    return isinstance(number, int) and "chunked_attention" in kinds[number : number + 1]


def attend_flattened(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: Pattern,
    extras: dict[str, Any],
    common: dict[str, Any],
) -> torch.Tensor:
    """Attend inside each text of a flattened batch.

    Parameters
    ----------
    query, key, value : Tensor
        (1, heads, T, D).
    pattern : Pattern
        What each text's rows see, the model's own window included.
    extras : dict
        The call's arguments, those of FLATTENED among them.
    common : dict
        Keywords of `varlen_attention`; ``out`` as the queries lie.

    Returns
    -------
    Tensor
        (1, Hq, T, D).
    """
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    starts_q, starts_k = extras["cu_seq_lens_q"].int(), extras["cu_seq_lens_k"].int()
    longest = q.shape[0], k.shape[0]  # bounds: larger ones than the lengths change no bit
    if common.get("out") is not None:  # heads of a larger output
        common = {**common, "out": common["out"][0].transpose(0, 1)}
    out = varlen_attention(q, k, v, starts_q, starts_k, *longest, pattern=pattern, **common)
    return cast(torch.Tensor, out).transpose(0, 1)[None]
