"""A pattern's own ``allows`` on the rows of a call: for the oracle and the reference.

Dense masks, so memory grows with ``Sq * Skv``. Nothing here checks tensors: where they do not fit,
the op that gets them says so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.compiler import is_compiling

from ._checks import MAX_LENGTH, broadcasts, is_dense, refuse
from ._pattern import Pattern
from .windows import Band, Dilated, Strided

__all__ = ["allowed_by", "positions", "with_mask_of"]


def positions(query: torch.Tensor, key: torch.Tensor, query_offset: Any) -> torch.Tensor:
    """Key position of every query, ``(B|1, 1, Sq, 1)``; offsets beyond any length count as it."""
    row = torch.arange(query.shape[2], device=query.device)[:, None]
    if isinstance(query_offset, torch.Tensor):
        offsets = query_offset.long().clamp(-MAX_LENGTH, MAX_LENGTH)
        return row + offsets[:, None, None, None]
    offset = key.shape[2] - query.shape[2] if query_offset is None else query_offset
    return (row + max(-MAX_LENGTH, min(offset, MAX_LENGTH)))[None, None]


def _allowed_from(
    origin: torch.Tensor | None,
    pattern: Pattern,
    row: torch.Tensor,
    position: torch.Tensor,
    key: torch.Tensor,
) -> torch.Tensor:
    """Keys that the pattern allows where the text of each batch entry begins at `origin`.

    Windows do not change; token indices, layouts and a user's own pattern name key positions.
    """
    own = pattern._op is None or not isinstance(pattern, (Band, Dilated, Strided))
    if origin is None or own:
        return pattern._allowed(row, position, key)
    first = origin.long()[:, None, None, None]
    if isinstance(pattern, Band) and isinstance(pattern.global_tokens, torch.Tensor):
        tokens = replace(pattern, sinks=0)._allowed(row, position, key)
        sinks = replace(pattern, global_tokens=None)
        return tokens | sinks._allowed(row, position - first, key - first)
    allowed = pattern._allowed(row, position - first, key - first)
    if isinstance(pattern, Band) and pattern.global_tokens:
        # Rows before position 0 are never global, though a text may begin there.
        columns = max(pattern.sinks, int(pattern.global_tokens))
        narrow = replace(pattern, sinks=columns, global_tokens=None)
        narrow_rows = narrow._allowed(row, position - first, key - first)
        allowed = torch.where(position >= 0, allowed, narrow_rows)
    return allowed


def allowed_by(
    pattern: Pattern,
    query: torch.Tensor,
    key: torch.Tensor,
    query_offset: Any,
    is_causal: bool,
    key_origin: torch.Tensor | None = None,
) -> torch.Tensor:
    """Keys that the pattern and the causal cut allow, bool ``(B, Hq, Sq, Skv)``."""
    row = torch.arange(query.shape[2], device=query.device)[:, None]
    column = torch.arange(key.shape[2], device=query.device)[None, :]
    position = positions(query, key, query_offset)
    allowed = _allowed_from(key_origin, pattern, row, position, column)
    if allowed.dim() == 4 and 1 < allowed.shape[1] < query.shape[1]:  # lists of key heads
        allowed = allowed.repeat_interleave(query.shape[1] // allowed.shape[1], 1)
    whole = (*query.shape[:3], key.shape[2])
    if not is_compiling() and not broadcasts(allowed.shape, whole):
        what = f"allows to return what broadcasts to {whole}"
        raise refuse(type(pattern).__name__, what, f"shape {tuple(allowed.shape)}")
    allowed = allowed.expand(whole)
    return allowed & (column <= position) if is_causal else allowed


def with_mask_of(
    pattern: Pattern, query: torch.Tensor, key: torch.Tensor, common: dict[str, Any]
) -> dict[str, Any]:
    """Return the op's common arguments with the pattern inside ``attn_mask``.

    Arguments that do not fit come back as they are: the op refuses them.
    """
    mask, offsets = common.get("attn_mask"), common.get("query_offsets")
    given = (query, key, *(mine for mine in (mask, offsets) if mine is not None))
    if not all(map(is_dense, given)) or query.dim() != 4 or key.dim() != 4:
        return common
    if offsets is not None and offsets.shape != query.shape[:1]:
        return common
    offset = common.get("query_offset") if offsets is None else offsets
    allowed = allowed_by(pattern, query, key, offset, is_causal=False)
    if mask is None:
        return {**common, "attn_mask": allowed}
    if mask.dim() > 4 or (mask.dtype != torch.bool and not mask.is_floating_point()):
        return common
    if not broadcasts(mask.shape, allowed.shape):
        return common
    if mask.dtype == torch.bool:
        return {**common, "attn_mask": allowed & mask}
    return {**common, "attn_mask": mask.masked_fill(~allowed, -torch.inf)}
