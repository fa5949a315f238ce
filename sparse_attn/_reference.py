"""Attention in plain torch: which keys a row sees, the float64 reference, the same-dtype yardstick.

Written to be read, not to be fast. ``testing`` compares calls with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from typing_extensions import Unpack

from ._allowed import allowed_by, positions
from ._checks import check_tensor, check_tensors, dtype_name, refuse
from ._common import Common, op_arguments
from ._pattern import check_pattern
from .functional._chosen_keys import chosen_keys
from .patterns import Full, Pattern, TopK
from .tools import with_lists

__all__ = [
    "PlainCall",
    "allowed_keys",
    "check_call",
    "choice_of",
    "math_attention",
    "reference_attention",
    "repeated",
]

#: Two scores nearer than this times sum |q_d k_d| are equal to a float32 sum.
ROUNDING = 2.0**-20


def check_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: Pattern | None,
    common: Common,
) -> None:
    """Refuse what no call has, and 8-bit keys: what they stand for is compared."""
    owner = "testing"
    check_tensors(owner, query, key, value)
    if pattern is not None:
        check_pattern(owner, pattern)
    given: Any = common
    op_arguments(owner, given)
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype == torch.float8_e4m3fn:
            what = f"{name} that is read as it is, ({name}.float() * scale).to(query.dtype)"
            raise refuse(owner, what, dtype_name(tensor.dtype))


def repeated(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Key heads repeated to one for each query head."""
    return tensor.repeat_interleave(heads // max(tensor.shape[1], 1), dim=1)


def allowed_keys(
    query: torch.Tensor,
    key: torch.Tensor,
    pattern: Pattern | None = None,
    *,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    key_bounds: torch.Tensor | None = None,
    query_offset: int | torch.Tensor | None = None,
    key_origin: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return which keys each query may see, before a token top-k.

    Parameters
    ----------
    query, key : Tensor
        ``(B, Hq, Sq, D)`` and ``(B, Hkv, Skv, D)``; their shapes matter.
    pattern : Pattern, optional
        Not `BlockTopK`, which needs its list, nor a `TopK` inside one.
    attn_mask, is_causal, key_bounds, query_offset, key_origin
        As in the attention functions; an additive mask forbids where it is -inf.

    Returns
    -------
    Tensor
        bool ``(B, Hq, Sq, Skv)``.

    Examples
    --------
    >>> import torch
    >>> from sparse_attn import Band
    >>> from sparse_attn.testing import allowed_keys
    >>> q, k, _ = torch.randn(3, 1, 1, 3, 16)
    >>> allowed_keys(q, k, Band((1, 0)))[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    check_tensor("allowed_keys", "query", query)
    check_tensor("allowed_keys", "key", key)
    if pattern is not None:
        check_pattern("allowed_keys", pattern)
    region = Full() if pattern is None else pattern._region
    allowed = allowed_by(region, query, key, query_offset, is_causal, key_origin)
    if key_bounds is not None:
        column = torch.arange(key.shape[2], device=query.device)
        low, high = key_bounds.long().unsqueeze(-2).unbind(-1)
        allowed = allowed & (low <= column) & (column < high)
    if attn_mask is not None:
        mask = attn_mask if attn_mask.dtype == torch.bool else attn_mask != -torch.inf
        allowed = allowed & mask
    return allowed


def _keep_top(scores: torch.Tensor, allowed: torch.Tensor, k: int) -> torch.Tensor:
    """Keep the k highest allowed scores of each row, exact ties to the lower key."""
    ranked = scores.masked_fill(~allowed, -torch.inf).sort(dim=-1, descending=True, stable=True)
    best = torch.zeros_like(allowed).scatter(-1, ranked.indices[..., :k], True)
    return best & allowed


def choice_of(
    pattern: TopK, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, common: Common
) -> torch.Tensor:
    """Which keys our own top-k attends to, read off its output on one-hot values."""
    listed = with_lists(pattern, query, key, common)
    assert isinstance(listed, TopK)
    chosen = [torch.zeros((*query.shape[:3], 0), dtype=torch.bool, device=query.device)]
    chosen += chosen_keys(listed, query, key, value, dict(common))
    return torch.cat(chosen, -1)


def _top_keys(
    pattern: TopK,
    query: torch.Tensor,
    key: torch.Tensor,
    allowed: torch.Tensor,
    scale: float,
    choice: torch.Tensor | None,
) -> torch.Tensor:
    """Find the keys of a token top-k; where rounding decides, `choice` does."""
    q, k = query.double(), repeated(key, query.shape[1]).double()
    scores = (q @ k.mT) * scale
    top = _keep_top(scores, allowed, pattern.k)
    if choice is None or not scores.numel():
        return top
    error = ROUNDING * (q.abs() @ k.abs().mT) * abs(scale)
    lowest = scores.masked_fill(~top, torch.inf).amin(-1, keepdim=True)
    near = ((scores - lowest).abs() <= error) & allowed & (error > 0)
    undecided = near & (near & ~top).any(-1, keepdim=True)
    return torch.where(undecided, choice, top)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left @ right``, float32 sums rounded once to the inputs' dtype.

    GPUs do so by themselves. A CPU without 16-bit products takes thirty times as long for them as
    for those of float32, to the same error.
    """
    if left.device.type == "cpu" and left.dtype in (torch.float16, torch.bfloat16):
        return (left.float() @ right.float()).to(left.dtype)
    return left @ right


def _scores(query: torch.Tensor, key: torch.Tensor, scale: float, common: Common) -> torch.Tensor:
    """Scores of all pairs, with one key head for each query head."""
    softcap = common.get("softcap", 0.0)
    scores = _product(query, key.mT).mul_(scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    for bias in _biases(query, key, common):
        scores = scores + bias.to(scores.dtype)
    return scores


def _biases(query: torch.Tensor, key: torch.Tensor, common: Common) -> Iterator[torch.Tensor]:
    """Yield what is added to the scores of all pairs."""
    attn_mask, slopes = common.get("attn_mask"), common.get("alibi_slopes")
    if slopes is not None:
        distance = positions(query, key, common.get("query_offset"))
        distance = (distance - torch.arange(key.shape[2], device=key.device)).abs()
        yield -slopes.double()[..., None, None] * distance
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        yield attn_mask


def _softmax(
    scores: torch.Tensor, allowed: torch.Tensor, sink_logits: torch.Tensor | None = None
) -> torch.Tensor:
    """Softmax of scores that are -inf where not allowed, a sink in the denominator.

    Rows without keys are zero.
    """
    if sink_logits is None:
        return torch.softmax(scores, -1).masked_fill_(~allowed.any(-1, keepdim=True), 0)
    sink = sink_logits.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]
    return weights.masked_fill(~allowed, 0)


class PlainCall:
    """A call whose keys are known, which plain torch can then compute.

    Parameters
    ----------
    tensors : (Tensor, Tensor, Tensor)
        Query, key and value.
    pattern : Pattern, optional
    common : dict
        The call's keywords.
    choice : Tensor, optional
        As in `reference_attention`.
    """

    def __init__(
        self,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        pattern: Pattern | None,
        common: Common,
        choice: torch.Tensor | None = None,
    ) -> None:
        check_call(*tensors, pattern, common)
        query, key, _ = self._tensors = tensors
        self._common = common
        scale = common.get("scale")
        self._scale = query.shape[3] ** -0.5 if scale is None else scale
        placing = ("is_causal", "key_bounds", "query_offset", "key_origin")
        given: Any = {name: argument for name, argument in common.items() if name in placing}
        if pattern is not None:
            pattern = with_lists(pattern, query, key, common)
        allowed = allowed_keys(query, key, pattern, attn_mask=common.get("attn_mask"), **given)
        if isinstance(pattern, TopK):
            allowed = _top_keys(pattern, query, key, allowed, self._scale, choice)
        self._allowed = allowed

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and lse in float64."""
        query, key, value = self._tensors
        k, v = (repeated(tensor, query.shape[1]).double() for tensor in (key, value))
        scores = _scores(query.double(), k, self._scale, self._common)
        scores = scores.masked_fill_(~self._allowed, -torch.inf)
        weights = _softmax(scores, self._allowed, self._common.get("sink_logits"))
        return weights @ v, scores.logsumexp(-1)

    def math(self) -> torch.Tensor:
        """Return the output as plain torch computes it in the input's dtype."""
        query, key, value = self._tensors
        k, v = (repeated(tensor, query.shape[1]) for tensor in (key, value))
        scores = _scores(query, k, self._scale, self._common).float()
        scores = scores.masked_fill_(~self._allowed, -torch.inf)
        weights = _softmax(scores, self._allowed, self._common.get("sink_logits"))
        return _product(weights.to(value.dtype), v)

    def sizes(self) -> torch.Tensor:
        """Return the size of what the scores of each row are sums of, ``(B, Hq, Sq)``.

        A score keeps the rounding of its terms, however small their sum is: sizes are the mean over
        the softmax of ``|scale| sum |q_d k_d|`` and the sizes of the biases.
        """
        query, key, _ = self._tensors
        q, k = query.double(), repeated(key, query.shape[1]).double()
        scores = _scores(q, k, self._scale, self._common)
        scores = scores.masked_fill_(~self._allowed, -torch.inf)
        terms = (q.abs() @ k.abs().mT) * abs(self._scale)
        for bias in _biases(q, k, self._common):
            terms = terms + bias.double().abs()
        sizes = (_softmax(scores, self._allowed) * terms).masked_fill(~self._allowed, 0).sum(-1)
        return sizes.nan_to_num(0, 0, 0)


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: Pattern | None = None,
    *,
    choice: torch.Tensor | None = None,
    **common: Unpack[Common],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64, from the readable mask.

    Parameters
    ----------
    query, key, value, pattern, **common
        As in `naive_attention`; ``return_lse``, ``out`` and ``engine`` are ignored. The list of a
        `BlockTopK` is the one that `select_blocks` makes.
    choice : Tensor, optional
        bool ``(B, Hq, Sq, Skv)``: the keys that a `TopK` call chose, taken where two scores differ
        by less than float32 rounding.

    Returns
    -------
    (Tensor, Tensor)
        ``out64`` ``(B, Hq, Sq, Dv)`` and ``lse64`` ``(B, Hq, Sq)``, float64.

    Examples
    --------
    >>> import torch
    >>> from sparse_attn.testing import reference_attention
    >>> q, k, v = torch.randn(3, 1, 2, 8, 16)
    >>> reference_attention(q, k, v)[0].dtype
    torch.float64
    """
    return PlainCall((query, key, value), pattern, common, choice).reference()


def math_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: Pattern | None = None,
    *,
    choice: torch.Tensor | None = None,
    **common: Unpack[Common],
) -> torch.Tensor:
    """Attention as plain torch computes it in the input's dtype: the yardstick of the error rule.

    ``softmax((q @ k.mT) * scale, dim=-1, dtype=float32).to(dtype) @ v`` with the mask applied.

    Parameters
    ----------
    query, key, value, pattern, choice, **common
        As in `reference_attention`.

    Returns
    -------
    Tensor
        ``(B, Hq, Sq, Dv)`` in the input's dtype.

    Examples
    --------
    >>> import torch
    >>> from sparse_attn.testing import math_attention
    >>> q, k, v = torch.randn(3, 1, 2, 8, 16, dtype=torch.bfloat16)
    >>> math_attention(q, k, v).dtype
    torch.bfloat16
    """
    return PlainCall((query, key, value), pattern, common, choice).math()
