"""Compare attention calls with a float64 reference, in any pytest.

The error rule: with ``out64`` the reference and "math" the same attention in plain torch in the
input's dtype, ``max|out - out64| <= 2 max|math - out64| + a max|out64|`` with a = 2^-20 (float32),
2^-11 (float16), 2^-8 (bfloat16); ``|lse - lse64| <= max(2^-18 max(1, |lse64|), 2^-22 size)``.
The size is that of what a row's float32 scores are sums of, ``|scale| sum |q_d k_d|`` and the
biases, its mean over the softmax: scores that cancel keep the rounding of their terms. Non-finite
values must agree first. Our own tests judge every engine by these functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from typing_extensions import Unpack

from ._checks import check_kind, check_tensors, kind_of
from ._common import Common
from ._reference import (
    PlainCall,
    allowed_keys,
    check_call,
    choice_of,
    math_attention,
    reference_attention,
    repeated,
)
from .patterns import Pattern, TopK

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
#: Two roundings of float32, of products and their sum, and of scale and biases: what an lse may be
#: off by, in units of the size of its scores' terms.
LSE_ROUNDING = 2.0**-22


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
    assert not got.is_meta, f"{name}: a meta tensor, expected one with contents"
    assert got.dtype == dtype, f"{name}: dtype {got.dtype}, expected {dtype}"
    assert got.shape == shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(shape)}"


def _output_shape(query: torch.Tensor, value: torch.Tensor) -> torch.Size:
    return torch.Size((*query.shape[:-1], value.shape[-1]))


def _assert_output(out: torch.Tensor, want: torch.Tensor, math: torch.Tensor) -> None:
    """Assert the error rule; a row of NaN or infinities leaves the limit of the others alone."""
    if not want.numel():
        return
    finite = torch.isfinite(want) & torch.isfinite(math)
    own_error = (math.double() - want).masked_fill(~finite, 0).abs().amax()
    largest = want.masked_fill(~torch.isfinite(want), 0).abs().amax()
    _assert_error("out", out, want, 2 * own_error + ABSOLUTE_TERM[out.dtype] * largest)


def _assert_lse(lse: torch.Tensor, want: torch.Tensor, sizes: Callable[[], torch.Tensor]) -> None:
    """Assert the rule of the lse; `sizes()`, which few calls need, is that of `PlainCall`."""
    finite = want.masked_fill(~torch.isfinite(want), 0)
    limit = LSE_TERM * finite.abs().clamp(min=1)
    if bool(((lse.double() - finite).abs() <= limit)[torch.isfinite(want)].all()):
        _assert_same_pattern("lse", lse, want)
    else:
        _assert_error("lse", lse, want, torch.maximum(limit, LSE_ROUNDING * sizes()))


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
    TypeError, ValueError
        What is no call: tensors, a pattern or keywords of a wrong kind; keys of 8 bits.

    Examples
    --------
    >>> import torch
    >>> from sparse_attn import Band, sparse_attention
    >>> from sparse_attn.testing import assert_close_to_reference
    >>> q, k, v = torch.randn(3, 1, 2, 40, 16)
    >>> out = sparse_attention(q, k, v, Band(8), is_causal=True)
    >>> assert_close_to_reference(out, q, k, v, Band(8), is_causal=True)
    """
    check_call(query, key, value, pattern, common)
    pair = isinstance(result, tuple) and len(result) == 2
    out, lse = result if pair else (result, None)
    _assert_kind("out", out, _output_shape(query, value), query.dtype)
    assert isinstance(out, torch.Tensor)
    if lse is not None:
        _assert_kind("lse", lse, query.shape[:3], torch.float32)

    def compare(choice: torch.Tensor | None) -> None:
        call = PlainCall((query, key, value), pattern, common, choice)
        out64, lse64 = call.reference()
        _assert_output(out, out64, call.math())
        if lse is not None:
            _assert_lse(lse, lse64, call.sizes)

    try:
        compare(None)
    except AssertionError:
        if not isinstance(pattern, TopK):
            raise
        compare(choice_of(pattern, query, key, value, common))  # where rounding decides


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
        ``attn_mask``, ``is_causal``, ``scale``. SDPA aligns causal masks at the other corner,
        so that lengths must be equal there.

    Raises
    ------
    AssertionError
        As `assert_close_to_reference`; a causal call with ``Sq != Skv``.
    TypeError
        What is no callable, what are no tensors.

    Examples
    --------
    >>> import torch
    >>> from sparse_attn import fused_attention
    >>> from sparse_attn.testing import assert_matches_sdpa
    >>> assert_matches_sdpa(fused_attention, *torch.randn(3, 1, 2, 8, 16), is_causal=True)
    """
    check_kind("assert_matches_sdpa", "attention", attention, Callable, "a callable")
    check_tensors("assert_matches_sdpa", query, key, value)
    assert not common.get("is_causal") or query.shape[2] == key.shape[2], (
        "is_causal with Sq != Skv: SDPA aligns the upper left corner, sparse_attn the lower right"
    )
    k, v = (repeated(tensor, query.shape[1]) for tensor in (key, value))
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
    _assert_kind("out", out, _output_shape(query, value), query.dtype)
    _assert_output(out, want, math)
