"""Which keys a token top-k attends to, read off its outputs on values that tell keys apart.

The ops keep no list of them. A choice follows from queries and keys alone, so calls on values that
name some keys each choose as the call itself does, ties too. Used by `topk_attention` and by the
reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from .._checks import check_tensors
from .._common import Result, attend
from ..patterns import TopK
from ..tools import with_lists

__all__ = ["attend_with_indices", "chosen_keys"]

_OWNER = "topk_attention"

#: Of a key in its own column: all dtypes of values have it.
_SIZE = 256.0
#: Exponent of the scale, of which a power of two keeps ranks: the weights of a row's keys are alike
#: where no ``q.k`` exceeds its inverse.
_FLAT = -44


def chosen_keys(
    pattern: TopK,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    common: dict[str, Any],
) -> Iterator[torch.Tensor]:
    """Tell which keys a call attends to, bool ``(B, Hq, Sq, up to Dv)``, from key 0 on.

    Parameters
    ----------
    pattern : TopK
        Over all keys, or inside blocks that are listed.
    query, key, value, common
        Of the call, which was served.
    """
    flat = _without_sizes(query, common)
    length, columns = key.shape[2], value.shape[3]
    for start in range(0, length, columns):
        width = min(columns, length - start)
        named = torch.zeros_like(value, requires_grad=False)
        named[:, :, start : start + width, :width] = _SIZE * torch.eye(width, device=key.device)
        with torch.no_grad():
            out = attend(_OWNER, pattern, query, key, named, flat)
        yield out[..., :width] > 0


def _without_sizes(query: torch.Tensor, common: dict[str, Any]) -> dict[str, Any]:
    """Return a call's keywords with all that changes weights, and no rank, at nothing."""
    calls = {name: value for name, value in common.items() if name not in ("out", "return_lse")}
    scale = calls.get("scale")
    mantissa, _ = math.frexp(query.shape[3] ** -0.5 if scale is None else scale)
    calls["scale"] = math.ldexp(mantissa, _FLAT)
    for name, nothing in (("sink_logits", 0.0), ("alibi_slopes", 0.0), ("value_scale", 1.0)):
        if calls.get(name) is not None:
            calls[name] = torch.full_like(calls[name], nothing)
    mask = calls.get("attn_mask")
    if mask is not None and mask.dtype != torch.bool:
        calls["attn_mask"] = torch.where(mask == -torch.inf, mask, torch.zeros_like(mask))
    return calls


def attend_with_indices(
    pattern: TopK,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    common: dict[str, Any],
) -> Result:
    """Call `topk_attention`, and list the keys of each row after what it returns.

    Returns
    -------
    (Tensor, Tensor) or (Tensor, Tensor, Tensor)
        The output, the lse when asked for, and int64 ``(B, Hq, Sq, min(k, Skv))``: ascending, then
        -1.
    """
    check_tensors(_OWNER, query, key, value)
    listed = with_lists(pattern, query, key, common)
    assert isinstance(listed, TopK)
    result = attend(_OWNER, listed, query, key, value, common)
    width = min(pattern.k, key.shape[2])
    shape = (*query.shape[:3], width + 1)  # the last place takes the keys that are not chosen
    found = torch.full(shape, -1, dtype=torch.int64, device=query.device)
    count = torch.zeros(*shape[:3], 1, dtype=torch.int64, device=query.device)
    start = 0
    for chosen in chosen_keys(listed, query, key, value, common):
        place = torch.where(chosen, count + chosen.cumsum(-1) - 1, width)
        index = torch.arange(start, start + chosen.shape[-1], device=query.device)
        found = found.scatter(-1, place, index.expand(place.shape))
        count = count + chosen.sum(-1, keepdim=True)
        start += chosen.shape[-1]
    indices = found[..., :width].contiguous()
    return (*result, indices) if common.get("return_lse") else (result, indices)
