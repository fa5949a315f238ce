"""A policy's pattern inside the model's mask: one call of an op.

A plain window of the model joins the pattern as one pattern; any other mask goes to the op beside
it, as intervals of keys or as a dense mask. Patterns that count from where a text begins get
that place too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .._checks import dtype_name
from .._head_calls import ListsByHead
from .._origins import asks_positions, counts_from_origin
from ..patterns import Band, BlockSparse, BlockTopK, Full, Pattern
from ._layer import layer_error, place
from ._masks import Note, is_intervals
from ._model_source import appends_keys
from ._positions import (
    has_origin,
    has_texts_apart,
    intervals_around,
    narrowed_mask,
    origin_of,
    query_positions,
)

__all__ = ["joined", "placed", "without_cut"]


def placed(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    pattern: Pattern,
    mask: torch.Tensor | None,
    note: Note | None,
    is_causal: bool,
) -> tuple[Pattern, dict[str, Any]]:
    """Join pattern and mask: the pattern of the op, and the arguments that place it."""
    if mask is not None:
        _check_mask(module, mask, query.shape[0])
    pattern = without_cut(pattern, is_causal)
    if not isinstance(pattern, Full) and appends_keys(type(module)):
        got = f"{_name_of(pattern)} in a layer that appends keys to those of its text"
        raise layer_error(module, "pattern", got, "list the layer in the policy's dense_layers")
    origin = _origin(module, pattern, mask, note, query, key)
    if isinstance(origin, torch.Tensor) and mask is not None and _scattered(pattern):
        # The op's index tensors are key positions, alike for all texts.
        lengths = query.shape[2], key.shape[2]
        mask = narrowed_mask(mask, note, pattern, origin, is_causal, *lengths)
        pattern, note, origin = Full(), None, None
    sides = None if note is None else note.sides
    narrowed = None if sides is None else joined(pattern, sides)
    if narrowed is not None:
        pattern, mask = narrowed, None
    placing: dict[str, Any] = {"is_causal": is_causal}
    if mask is not None:
        placing = _masked(mask, note, query, key, pattern, is_causal)
    return pattern, placing if origin is None else placing | {"key_origin": origin}


def _check_mask(module: nn.Module, mask: torch.Tensor, batch: int) -> None:
    """Refuse a mask that is neither intervals nor dense, and one of other texts."""
    dense = mask.dim() == 4 and (mask.dtype == torch.bool or mask.is_floating_point())
    if not dense and not is_intervals(mask):
        got = f"{dtype_name(mask.dtype)} of shape {tuple(mask.shape)}"
        advice = "give one of dtype bool, true where to attend, in 4 dimensions"
        raise layer_error(module, "attention_mask", got, advice)
    if mask.shape[0] != 1 and mask.shape[0] != batch:  # sizes of a graph are in no tuple
        what = f"attention_mask of {batch} rows, one for each text"
        got = f"shape {tuple(mask.shape)}"
        raise ValueError(f"sparse_attn: {place(module)}: expected {what}, got {got}")


def without_cut(pattern: Pattern, is_causal: bool) -> Pattern:
    """Return `Full` in place of a band, as of a dense layer, that a causal cut says in full."""
    is_whole = isinstance(pattern, Band) and pattern.sides in ((None, 0), (None, None))
    return Full() if is_causal and is_whole else pattern


def joined(pattern: Pattern, window: tuple[int | None, int | None]) -> Pattern | None:
    """Return the pattern inside the model's own window as one pattern; None when none is that."""
    left, right = window
    if left is None:
        return pattern  # all keys, or all up to the row's own: the causal flag says it
    if isinstance(pattern, Full):
        return Band(window)
    if not isinstance(pattern, Band) or pattern.sinks or pattern.global_tokens is not None:
        return None
    own_left, own_right = pattern.sides
    return Band((_narrower(left, own_left), _narrower(right, own_right)))


def _narrower(side: int | None, other: int | None) -> int | None:
    return other if side is None else side if other is None else min(side, other)


def _name_of(pattern: Pattern) -> str:
    """Return what a user calls a pattern; several settings of block top-k are a class of ours."""
    return type(pattern._region if isinstance(pattern, ListsByHead) else pattern).__name__


def _scattered(pattern: Pattern) -> bool:
    """Whether a pattern holds an index tensor of global tokens."""
    return isinstance(pattern, Band) and isinstance(pattern.global_tokens, torch.Tensor)


def _origin(
    module: nn.Module,
    pattern: Pattern,
    mask: torch.Tensor | None,
    note: Note | None,
    query: torch.Tensor,
    key: torch.Tensor,
) -> torch.Tensor | None:
    """Return the key of each text's first token for patterns that count from it, else None."""
    name = _name_of(pattern)
    if note is not None and note.dropped and isinstance(pattern._region, (BlockSparse, BlockTopK)):
        advice = "list the layer in the policy's dense_layers"
        if query.shape[2] == 1:
            advice = "give the policy decode=Full(), or list the layer in its dense_layers"
        raise layer_error(
            module,
            "pattern",
            f"{name} in a sliding cache that has dropped {note.dropped} keys",
            advice,
        )
    by_blocks = isinstance(pattern._region, BlockSparse)  # of key positions, whatever they hold
    if not by_blocks and not counts_from_origin(pattern):
        return None
    if not by_blocks and has_texts_apart(module, note, mask):
        by, advice = "a mask keeps", "give each text, or image, a row of its own"
        if note is not None:
            by = "position_ids keep"
            advice = (
                "pass cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k too, as "
                "transformers' DataCollatorWithFlattening(return_flash_attn_kwargs=True) does, "
                "or a row for each text"
            )
        got = f"{name} in texts of one row that {by} apart: it counts from the first one"
        raise layer_error(module, "pattern", got, advice)
    if not has_origin(module, note, query.shape[2], key.shape[2]):
        raise layer_error(
            module,
            "pattern",
            f"{name} with a mask that does not say which keys the sliding cache has dropped",
            "leave the mask to the model and do not compile it (generate: disable_compile=True), "
            "or list the layer in the policy's dense_layers",
        )
    return None if by_blocks else origin_of(note, mask, query.shape[0])


def _masked(
    mask: torch.Tensor,
    note: Note | None,
    query: torch.Tensor,
    key: torch.Tensor,
    pattern: Pattern,
    is_causal: bool,
) -> dict[str, Any]:
    """Turn a mask into arguments of the ops. The mask holds causality, so the flag stays off."""
    batch, _, seq_q, _ = query.shape
    common: dict[str, Any] = {}
    if is_intervals(mask):
        common["key_bounds"] = mask.expand(batch, -1, -1, -1)
    else:
        common["attn_mask"] = mask
    if asks_positions(pattern) and is_causal and seq_q < key.shape[2]:
        common["query_offset"] = query_positions(mask, note, batch, seq_q)
    if isinstance(pattern._region, BlockTopK):
        common["is_causal"] = is_causal
        if "key_bounds" not in common:  # what a dense mask hides would have a part in the choice
            common["key_bounds"] = intervals_around(mask).expand(batch, -1, seq_q, -1)
    return common
