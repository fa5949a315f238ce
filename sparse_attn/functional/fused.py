"""`fused_attention`: dense attention, in place of SDPA.

Written by ``scripts/write_functions.py`` from the template of this name.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from .._common import ZERO, Result, attend
from ..windows import DENSE

__all__ = ["fused_attention"]


@overload
def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    key_bounds: torch.Tensor | None = None,
    query_offset: int | torch.Tensor | None = None,
    key_origin: torch.Tensor | None = None,
    softcap: float = 0,
    sink_logits: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    return_lse: Literal[False] = False,
    out: torch.Tensor | None = None,
    engine: str = "auto",
) -> torch.Tensor: ...


@overload
def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    key_bounds: torch.Tensor | None = None,
    query_offset: int | torch.Tensor | None = None,
    key_origin: torch.Tensor | None = None,
    softcap: float = 0,
    sink_logits: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    return_lse: Literal[True],
    out: torch.Tensor | None = None,
    engine: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    key_bounds: torch.Tensor | None = None,
    query_offset: int | torch.Tensor | None = None,
    key_origin: torch.Tensor | None = None,
    softcap: float = 0,
    sink_logits: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    return_lse: bool,
    out: torch.Tensor | None = None,
    engine: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    key_bounds: torch.Tensor | None = None,
    query_offset: int | torch.Tensor | None = None,
    key_origin: torch.Tensor | None = None,
    softcap: float = 0,
    sink_logits: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    engine: str = "auto",
) -> Result:
    """Dense attention with SDPA's own signature, so that it swaps in by name.

    ``is_causal`` with ``Sq != Skv`` differs from SDPA: the mask is aligned to the lower right
    corner (query i stands at key ``i + Skv - Sq``), as a decode step needs it, not to the upper
    left.

    Parameters
    ----------
    query : Tensor
        ``(B, Hq, Sq, D)``, float32, float16 or bfloat16; any strides with a contiguous last
        dimension. D is a multiple of 8 up to 256.
    key : Tensor
        ``(B, Hkv, Skv, D)`` with ``Hq % Hkv == 0``; key heads are shared without a copy. Of query's
        dtype, or float8_e4m3fn beside float16 and bfloat16.
    value : Tensor
        ``(B, Hkv, Skv, Dv)`` of key's dtype; Dv may differ from D, with the same limits.
    attn_mask : Tensor, optional
        What SDPA takes: bool (true is allowed) or additive (float32 or query's dtype),
        broadcastable to ``(B, Hq, Sq, Skv)``; intersected with the pattern.
    dropout_p : float
        Must be 0: inference only.
    is_causal : bool
        Keys ``j <= p`` only, with the lower-right alignment ``p = i + Skv - Sq``. For ``Sq != Skv``
        this differs from SDPA, whose ``is_causal`` aligns the upper left corner.
    scale : float, optional
        Of the scores, ``1 / sqrt(D)`` by default; finite, at most 2.3e38 in size.
    enable_gqa : bool
        Accepted and never needed: fewer key heads are always shared.
    key_bounds : Tensor, optional
        int32 ``(B, 1 or Hq, Sq, 2)``: row i sees keys ``[lo, hi)`` only. Documents that are packed
        into a row by bounds have one origin: sinks and the first global tokens are the row's. In
        `varlen_attention` each document has its own.
    query_offset : int or Tensor, optional
        Key position of query 0, ``p = i + query_offset``; or int32 ``(B,)`` on the device. By
        default ``Skv - Sq``. Beyond ``2**29 - 1`` to either side it counts as that.
    key_origin : Tensor, optional
        int32 ``(B,)`` on the device: the key at which the entry's text begins, 0 by default. Sinks,
        the first global tokens, strided columns and forced first blocks count from it; positions,
        and so windows, do not change. Below 0 in a cache that dropped its first keys.
    softcap : float
        Scores become ``c * tanh(s / c)`` before the mask; 0 is off.
    sink_logits : Tensor, optional
        ``(Hq,)``: a logit for each head that joins the softmax's denominator only.
    alibi_slopes : Tensor, optional
        ``(Hq,)`` or ``(B, Hq)``: adds ``-slope * |p - j|`` to the score of key j, after softcap
        (Press et al. 2021, ALiBi).
    key_scale : Tensor, optional
        What keys of float8_e4m3fn are multiplied by: float32 on the device, 0-d, ``(Hkv,)`` or
        ``(B, Hkv)``, above 0; 1 by default.
    value_scale : Tensor, optional
        The same for values.
    return_lse : bool
        Also return the natural-log log-sum-exp over the keys,
        float32 ``(B, Hq, Sq)``.
    out : Tensor, optional
        ``(B, Hq, Sq, Dv)`` of query's dtype, may be strided, must overlap
        no input; it is returned. Refused in grad mode when an input requires grad.
    engine : {"auto", "naive", "tiled", "portable", "small", "decode", "hopper"}
        ``auto`` takes the fastest that serves the case; see `can_use`.

    Returns
    -------
    Tensor or (Tensor, Tensor)
        The output ``(B, Hq, Sq, Dv)`` in query's dtype and stride order,
        and the lse when asked for. A row without keys is zero, its lse -inf.

    Raises
    ------
    TypeError
        An argument of a wrong kind.
    ValueError
        A wrong call, in one sentence: the argument, what was expected, what came.
    NotImplementedError
        A right call that no engine serves.

    Examples
    --------
    >>> import torch
    >>> from sparse_attn import fused_attention
    >>> q, k, v = torch.randn(3, 1, 2, 8, 16)
    >>> fused_attention(q, k, v, is_causal=True).shape
    torch.Size([1, 2, 8, 16])

    Notes
    -----
    Online softmax over tiles (Dao et al. 2022, FlashAttention): scores are never stored.
    """
    common: dict[str, Any] = {}
    if attn_mask is not None:
        common["attn_mask"] = attn_mask
    if dropout_p is not ZERO:
        common["dropout_p"] = dropout_p
    if is_causal is not False:
        common["is_causal"] = is_causal
    if scale is not None:
        common["scale"] = scale
    if enable_gqa is not False:
        common["enable_gqa"] = enable_gqa
    if key_bounds is not None:
        common["key_bounds"] = key_bounds
    if query_offset is not None:
        common["query_offset"] = query_offset
    if key_origin is not None:
        common["key_origin"] = key_origin
    if softcap is not ZERO:
        common["softcap"] = softcap
    if sink_logits is not None:
        common["sink_logits"] = sink_logits
    if alibi_slopes is not None:
        common["alibi_slopes"] = alibi_slopes
    if key_scale is not None:
        common["key_scale"] = key_scale
    if value_scale is not None:
        common["value_scale"] = value_scale
    if return_lse is not False:
        common["return_lse"] = return_lse
    if out is not None:
        common["out"] = out
    if engine != "auto":
        common["engine"] = engine
    return attend("fused_attention", DENSE, query, key, value, common)
