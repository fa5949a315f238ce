"""Compare attention calls with a float64 reference, in any pytest.

The error rule: with ``out64`` the reference and "math" the same attention in plain torch in the
input's dtype, ``max|out - out64| <= 2 max|math - out64| + a max|out64|`` with a = 2^-20 (float32),
2^-11 (float16), 2^-8 (bfloat16); ``|lse - lse64| <= 2^-18 max(1, |lse64|)``. Non-finite values must
agree first. Our own tests use these functions and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from typing_extensions import Unpack

from ._checks import kind_of
from ._common import Common
from .functional import sparse_attention
from .patterns import BlockSparse, BlockTopK, Full, Pattern, TopK
from .tools import select_blocks

__all__ = [
    "allowed_keys",
    "assert_close_to_reference",
    "assert_matches_sdpa",
    "math_attention",
    "reference_attention",
]

#: The error rule's absolute term, in units of the largest output.
ABSOLUTE_TERM = {torch.float32: 2.0**-20, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
LSE_TERM = 2.0**-18
#: Two scores nearer than this times sum |q_d k_d| are equal to a float32 sum.
ROUNDING = 2.0**-20


def _repeated(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Key heads repeated to one for each query head."""
    return tensor.repeat_interleave(heads // max(tensor.shape[1], 1), dim=1)


def _positions(query: torch.Tensor, key: torch.Tensor, query_offset: Any) -> torch.Tensor:
    """Key position of every query, ``(B|1, 1, Sq, 1)``."""
    row = torch.arange(query.shape[2], device=query.device)[:, None]
    if isinstance(query_offset, torch.Tensor):
        return row + query_offset.long()[:, None, None, None]
    offset = key.shape[2] - query.shape[2] if query_offset is None else query_offset
    return (row + max(-(2**40), min(offset, 2**40)))[None, None]


def allowed_keys(
    query: torch.Tensor,
    key: torch.Tensor,
    pattern: Pattern | None = None,
    *,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    key_bounds: torch.Tensor | None = None,
    query_offset: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """Return which keys each query may see, before a token top-k.

    Parameters
    ----------
    query, key : Tensor
        ``(B, Hq, Sq, D)`` and ``(B, Hkv, Skv, D)``; their shapes matter.
    pattern : Pattern, optional
        Not `BlockTopK`, which needs its list.
    attn_mask, is_causal, key_bounds, query_offset
        As in the attention functions; an additive mask forbids where it is -inf.

    Returns
    -------
    Tensor
        bool ``(B, Hq, Sq, Skv)``.
    """
    shape = (*query.shape[:3], key.shape[2])
    row = torch.arange(shape[2], device=query.device)[:, None]
    column = torch.arange(shape[3], device=query.device)
    position = _positions(query, key, query_offset)
    if isinstance(pattern, TopK) or pattern is None:
        pattern = Full()
    allowed = pattern.allows(row, position, column[None, :]).expand(shape)
    if is_causal:
        allowed = allowed & (column <= position)
    if key_bounds is not None:
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


def _choice_of(
    pattern: TopK, query: torch.Tensor, key: torch.Tensor, common: Common
) -> torch.Tensor:
    """Which keys our own top-k attends to, read off its output on one-hot values."""
    ignored = ("out", "return_lse", "softcap", "sink_logits")
    calls: Any = {name: value for name, value in common.items() if name not in ignored}
    mask = common.get("attn_mask")
    if mask is not None and mask.dtype != torch.bool:
        calls["attn_mask"] = mask != -torch.inf  # what is added does not rank
    chosen = [torch.zeros((*query.shape[:3], 0), dtype=torch.bool, device=query.device)]
    head_dim, length = query.shape[3], key.shape[2]
    for start in range(0, length, head_dim):
        width = min(head_dim, length - start)
        value = torch.zeros_like(key)
        value[:, :, start : start + width, :width] = torch.eye(width) * 2.0**14
        chosen.append(sparse_attention(query, key, value, pattern, **calls)[..., :width] > 0)
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
    q, k = query.double(), _repeated(key, query.shape[1]).double()
    scores = (q @ k.mT) * scale
    top = _keep_top(scores, allowed, pattern.k)
    if choice is None or not scores.numel():
        return top
    error = ROUNDING * (q.abs() @ k.abs().mT) * abs(scale)
    lowest = scores.masked_fill(~top, torch.inf).amin(-1, keepdim=True)
    near = ((scores - lowest).abs() <= error) & allowed & (error > 0)
    undecided = near & (near & ~top).any(-1, keepdim=True)
    return torch.where(undecided, choice, top)


def _scores(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    softcap: float,
    attn_mask: torch.Tensor | None,
) -> torch.Tensor:
    scores = (query @ key.mT) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        scores = scores + attn_mask.to(scores.dtype)
    return scores


def _softmax(
    scores: torch.Tensor,
    allowed: torch.Tensor,
    sink_logits: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Softmax over the allowed keys, a sink in the denominator; rows without keys are zero."""
    scores = scores.to(dtype).masked_fill(~allowed, -torch.inf)
    if sink_logits is None:
        return torch.softmax(scores, -1).masked_fill(~allowed.any(-1, keepdim=True), 0)
    sink = sink_logits.to(dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]
    return weights.masked_fill(~allowed, 0)


def _keys_and_scale(
    query: torch.Tensor,
    key: torch.Tensor,
    pattern: Pattern | None,
    common: Common,
    choice: torch.Tensor | None,
) -> tuple[torch.Tensor, float]:
    """Find the keys of every row and the scale of a call."""
    scale = common.get("scale")
    scale = query.shape[3] ** -0.5 if scale is None else scale
    placing = ("is_causal", "key_bounds", "query_offset")
    given: Any = {name: argument for name, argument in common.items() if name in placing}
    if isinstance(pattern, BlockTopK):
        pattern = BlockSparse(select_blocks(query, key, pattern, scale=scale, **given))
    allowed = allowed_keys(query, key, pattern, attn_mask=common.get("attn_mask"), **given)
    if isinstance(pattern, TopK):
        allowed = _top_keys(pattern, query, key, allowed, scale, choice)
    return allowed, scale


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
        ``out64`` ``(B, Hq, Sq, D)`` and ``lse64`` ``(B, Hq, Sq)``, float64.

    Examples
    --------
    >>> import torch
    >>> from sparse_attn.testing import reference_attention
    >>> q, k, v = torch.randn(3, 1, 2, 8, 16)
    >>> reference_attention(q, k, v)[0].dtype
    torch.float64
    """
    allowed, scale = _keys_and_scale(query, key, pattern, common, choice)
    q = query.double()
    k, v = (_repeated(tensor, query.shape[1]).double() for tensor in (key, value))
    scores = _scores(q, k, scale, common.get("softcap", 0.0), common.get("attn_mask"))
    weights = _softmax(scores, allowed, common.get("sink_logits"), torch.float64)
    return weights @ v, scores.masked_fill(~allowed, -torch.inf).logsumexp(-1)


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
        ``(B, Hq, Sq, D)`` in the input's dtype.

    Examples
    --------
    >>> import torch
    >>> from sparse_attn.testing import math_attention
    >>> q, k, v = torch.randn(3, 1, 2, 8, 16, dtype=torch.bfloat16)
    >>> math_attention(q, k, v).dtype
    torch.bfloat16
    """
    allowed, scale = _keys_and_scale(query, key, pattern, common, choice)
    k, v = (_repeated(tensor, query.shape[1]) for tensor in (key, value))
    scores = _scores(query, k, scale, common.get("softcap", 0.0), common.get("attn_mask"))
    weights = _softmax(scores, allowed, common.get("sink_logits"), torch.float32)
    return weights.to(value.dtype) @ v


def _assert_same_pattern(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """NaN and infinities first: they must stand where the reference has them."""
    for what, test in (("NaN", torch.isnan), ("-inf", torch.isneginf), ("inf", torch.isposinf)):
        wrong = test(got) != test(want)
        assert not wrong.any(), (
            f"{name}: {what} differs from the reference in {int(wrong.sum())} of {wrong.numel()} "
            f"entries, first at {wrong.nonzero()[0].tolist()}"
        )


def _assert_kind(name: str, got: object, shape: torch.Size, dtype: torch.dtype) -> None:
    """Assert a tensor of this shape and dtype, so that no comparison broadcasts or promotes."""
    assert isinstance(got, torch.Tensor), f"{name}: {kind_of(got)}, expected a tensor"
    assert got.dtype == dtype, f"{name}: dtype {got.dtype}, expected {dtype}"
    assert got.shape == shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(shape)}"


def _assert_output(out: torch.Tensor, want: torch.Tensor, math: torch.Tensor) -> None:
    """Assert the error rule; a row of NaN or infinities leaves the limit of the others alone."""
    if not want.numel():
        return
    finite = torch.isfinite(want) & torch.isfinite(math)
    own_error = (math.double() - want).masked_fill(~finite, 0).abs().amax()
    largest = want.masked_fill(~torch.isfinite(want), 0).abs().amax()
    _assert_error("out", out, want, 2 * own_error + ABSOLUTE_TERM[out.dtype] * largest)


def _assert_error(name: str, got: torch.Tensor, want: torch.Tensor, limit: torch.Tensor) -> None:
    """Every |got - want| within its limit, infinities aside."""
    _assert_same_pattern(name, got, want)
    finite = torch.isfinite(want)
    error = (got.double() - want).masked_fill(~finite, 0).abs()
    wrong = error > limit
    if wrong.any():
        at = (error - limit).flatten().argmax()
        place = [int(i) for i in torch.unravel_index(at, error.shape)]
        bound = limit.expand_as(error).flatten()[at]
        raise AssertionError(
            f"{name}: error {float(error.flatten()[at]):.3e} above {float(bound):.3e} in "
            f"{int(wrong.sum())} of {wrong.numel()} entries, worst at {place}"
        )


def assert_close_to_reference(
    result: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: Pattern | None = None,
    **common: Unpack[Common],
) -> None:
    """Assert the error rule for the output of a call.

    Parameters
    ----------
    result : Tensor or (Tensor, Tensor)
        What the call returned, with its lse when it was asked for.
    query, key, value, pattern, **common
        The call's arguments. `TopK` calls our own ops once more to see which keys they chose where
        rounding decides.

    Raises
    ------
    AssertionError
        With the largest error, its limit and its place.

    Examples
    --------
    >>> import torch
    >>> from sparse_attn import Band, sparse_attention
    >>> from sparse_attn.testing import assert_close_to_reference
    >>> q, k, v = torch.randn(3, 1, 2, 40, 16)
    >>> out = sparse_attention(q, k, v, Band(8), is_causal=True)
    >>> assert_close_to_reference(out, q, k, v, Band(8), is_causal=True)
    """
    pair = isinstance(result, tuple) and len(result) == 2
    out, lse = result if pair else (result, None)
    _assert_kind("out", out, query.shape, query.dtype)
    assert isinstance(out, torch.Tensor)
    if lse is not None:
        _assert_kind("lse", lse, query.shape[:3], torch.float32)
    choice = None
    if isinstance(pattern, TopK):
        choice = _choice_of(pattern, query, key, common)
    out64, lse64 = reference_attention(query, key, value, pattern, choice=choice, **common)
    math = math_attention(query, key, value, pattern, choice=choice, **common)
    _assert_output(out, out64, math)
    if lse is not None:
        finite = lse64.masked_fill(~torch.isfinite(lse64), 0)
        _assert_error("lse", lse, lse64, LSE_TERM * finite.abs().clamp(min=1))


def assert_matches_sdpa(
    attention: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    **common: Any,
) -> None:
    """Assert that a call equals torch's `scaled_dot_product_attention` within the error rule.

    Parameters
    ----------
    attention : callable
        Called as ``attention(query, key, value, **common)``.
    query, key, value : Tensor
        ``(B, H, S, D)``; key heads may be fewer.
    **common
        ``attn_mask``, ``is_causal``, ``scale``. Causal with ``Sq != Skv`` is refused: SDPA aligns
        the other corner.

    Raises
    ------
    AssertionError
        With the largest error, its limit and its place.

    Examples
    --------
    >>> import torch
    >>> from sparse_attn import fused_attention
    >>> from sparse_attn.testing import assert_matches_sdpa
    >>> assert_matches_sdpa(fused_attention, *torch.randn(3, 1, 2, 8, 16), is_causal=True)
    """
    assert not common.get("is_causal") or query.shape[2] == key.shape[2], (
        "is_causal with Sq != Skv: SDPA aligns the upper left corner, sparse_attn the lower right"
    )
    k, v = (_repeated(tensor, query.shape[1]) for tensor in (key, value))
    doubles = [tensor.double() for tensor in (query, k, v)]
    masks = dict(common)
    mask = common.get("attn_mask")
    if mask is not None and mask.dtype != torch.bool:
        masks["attn_mask"] = mask.double()
    sdpa: Any = torch.nn.functional.scaled_dot_product_attention
    with sdpa_kernel(SDPBackend.MATH):  # fused ones may give rows of NaN as zeros
        want = sdpa(*doubles, **masks)
    math = math_attention(query, key, value, **common)
    out = attention(query, key, value, **common)
    _assert_kind("out", out, query.shape, query.dtype)
    _assert_output(out, want, math)
