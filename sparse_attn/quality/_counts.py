"""How many keys each row sees: ``exp(lse)`` of a call whose scores are all zero.

Attention to zero queries has the log of the number of keys as its lse, so the ops themselves count,
with every bound, mask and offset of the call and nothing of size Sq x Skv. Used by `compare`,
`model` and the advisor.
"""

from __future__ import annotations

from typing import Any

import torch

from .._origins import bool_mask
from ..functional import naive_attention, sparse_attention
from ..patterns import BlockSparse, Pattern, TopK
from ..tools import with_lists

__all__ = ["attend_with_lse", "pair_counts", "row_counts"]

_HEAD_DIM = 16
#: Arguments that choose keys; the others change scores, which are zero here.
_PLACING = ("is_causal", "key_bounds", "query_offset", "key_origin")


def attend_with_lse(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pattern: Pattern, **common: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and lse of a pattern, also of a user's own, which the oracle alone serves."""
    call = naive_attention if pattern._op is None else sparse_attention
    out, lse = call(query, key, value, pattern, return_lse=True, **common)
    return out, lse


def row_counts(
    query: torch.Tensor, key: torch.Tensor, pattern: Pattern, common: dict[str, Any]
) -> torch.Tensor:
    """Count the keys that each row visits, float64 ``(B, 1 or Hq, Sq)``.

    Rounded to whole numbers: the lse is float32, exact enough for counts up to 30 000; of larger
    ones the error is below 5e-5 of the count.
    """
    if isinstance(pattern, TopK):
        return row_counts(query, key, pattern._region, common).clamp(max=pattern.k)
    pattern = with_lists(pattern, query, key, common)
    placing = {name: common[name] for name in _PLACING if name in common}
    mask = common.get("attn_mask")
    if mask is not None:
        placing["attn_mask"] = bool_mask(mask)
    by_head = isinstance(pattern, BlockSparse) and pattern.layout.counts.shape[1] > 1
    by_head |= _heads(placing.get("key_bounds")) > 1 or _heads(placing.get("attn_mask")) > 1
    by_head |= pattern._op is None  # whose `allows` may tell heads apart
    batch, heads_q, seq_q, _ = query.shape
    heads = heads_q if by_head else 1
    rows = query.new_zeros((batch, heads, seq_q, _HEAD_DIM))
    keys = key.new_zeros((batch, key.shape[1] if by_head else 1, key.shape[2], _HEAD_DIM))
    _, lse = attend_with_lse(rows, keys, keys, pattern, **placing)
    return lse.double().exp().round()


def pair_counts(
    query: torch.Tensor,
    key: torch.Tensor,
    pattern: Pattern,
    common: dict[str, Any],
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Count the pairs that each head visits, float64 ``(B, Hq)``; those of `rows` if given."""
    counts = row_counts(query, key, pattern, common)
    counts = counts if rows is None else counts * rows
    return counts.sum(-1).expand(query.shape[:2])


def _heads(tensor: torch.Tensor | None) -> int:
    """Heads of ``(..., Hq, Sq, _)``; a mask may have fewer dimensions."""
    return tensor.shape[-3] if tensor is not None and tensor.dim() >= 3 else 1
