"""`varlen_attention`: sequences packed one after the other.

Written by ``scripts/write_functions.py`` from the template of this name.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from .._common import ZERO, Result
from ..patterns import Pattern
from ._sequences import attend_sequences

__all__ = ["varlen_attention"]


@overload
def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    pattern: Pattern | None = None,
    seqused_k: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
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
def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    pattern: Pattern | None = None,
    seqused_k: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
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
def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    pattern: Pattern | None = None,
    seqused_k: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
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


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    pattern: Pattern | None = None,
    seqused_k: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
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
    """Attention of sequences that lie packed one after the other, without padding.

    A pattern means in each sequence what it means in a call of its own, and gives the same bits;
    positions start at 0 in each. Lengths stay on the device: nothing waits for them.

    Parameters
    ----------
    query : Tensor
        ``(T, Hq, D)``, the queries of all sequences; dtypes and strides as in `fused_attention`.
    key, value : Tensor
        ``(Tk, Hkv, D)`` and ``(Tk, Hkv, Dv)`` with ``Hq % Hkv == 0``.
    cu_seq_q, cu_seq_k : Tensor
        int32 ``(B + 1,)``: sequence b has queries ``cu_seq_q[b]`` to ``cu_seq_q[b + 1] - 1``, and
        keys likewise. ``cu_seq_q[0]`` may be above 0. Rows of no sequence, before it or from
        ``cu_seq_q[B]`` on, are not written: they and their lse hold anything in new tensors.
    max_q, max_k : int
        Upper bounds of the lengths; larger ones change no bit. A longer sequence is refused on a
        CPU, and cut on a GPU, which alone knows its length.
    pattern : Pattern, optional
        All keys by default. A `BlockSparse` layout is one for all sequences or has one for each.
        A `BlockTopK` chooses for each sequence as in a call of its own.
    seqused_k : Tensor, optional
        int32 ``(B,)``: how many of its keys each sequence has.
    attn_mask, key_bounds : None
        Refused: both need a batch of one length.
    dropout_p : float
        Must be 0: inference only.
    is_causal : bool
        Keys ``j <= p`` only, with the lower-right alignment ``p = i + Skv - Sq``. For ``Sq != Skv``
        this differs from SDPA, whose ``is_causal`` aligns the upper left corner.
    scale : float, optional
        Of the scores, ``1 / sqrt(D)`` by default; finite, at most 2.3e38 in size.
    enable_gqa : bool
        Accepted and never needed: fewer key heads are always shared.
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
        float32 ``(Hq, T)``.
    out : Tensor, optional
        ``(T, Hq, Dv)`` of query's dtype, may be strided, must overlap
        no input; it is returned. Refused in grad mode when an input requires grad.
    engine : {"auto", "naive", "tiled", "portable", "small", "decode", "hopper"}
        ``auto`` takes the fastest that serves the case; see `can_use`.

    Returns
    -------
    Tensor or (Tensor, Tensor)
        The output ``(T, Hq, Dv)`` in query's dtype and stride order,
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
    >>> from sparse_attn import Band, varlen_attention
    >>> q, k, v = torch.randn(3, 10, 2, 16)
    >>> lengths = torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> varlen_attention(q, k, v, lengths, lengths, 7, 7, pattern=Band((2, 0))).shape
    torch.Size([10, 2, 16])

    Notes
    -----
    Called as ``torch.nn.attention.varlen.varlen_attn``, with `scale`, `enable_gqa` and `seqused_k`
    as there. Of its other arguments `window_size` is a ``Band``, or `is_causal` for ``(-1, 0)``,
    `return_aux` is `return_lse`, and with a `block_table` it is `paged_attention`. `num_splits` has
    no counterpart: with one engine a sequence's bits do not depend on others.
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
    sequences = {
        "cu_seq_q": cu_seq_q,
        "cu_seq_k": cu_seq_k,
        "max_q": max_q,
        "max_k": max_k,
        "seqused_k": seqused_k,
    }
    return attend_sequences("varlen", pattern, query, key, value, sequences, common)
