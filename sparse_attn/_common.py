"""The common arguments of every attention function, and the one way from a function to its op.

``attend`` checks the kinds of the arguments, maps ``query_offset`` to the op's two arguments,
chooses the op or its ``_out`` twin, and returns what the caller asked for. What tensors must look
like is the ops' to check.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict, TypeVar

import torch

from . import ops
from ._allowed import with_mask_of
from ._checks import Integer, Number, as_float, check_kind, check_tensor, clamped
from ._pattern import Pattern
from ._warn import warn_once

__all__ = ["Common", "FusedCommon", "Result", "attend", "documented", "op_arguments"]

#: A tensor, or the pair (out, lse) with return_lse: known to the caller, not to the type.
Result = Any
_Function = TypeVar("_Function", bound=Callable[..., Any])

_COMMON_SECTIONS = """attn_mask : Tensor, optional
        What SDPA takes: bool (true is allowed) or additive (float32 or query's dtype),
        broadcastable to ``(B, Hq, Sq, Skv)``; intersected with the pattern.
    is_causal : bool
        Keys ``j <= p`` only, with the lower-right alignment ``p = i + Skv - Sq``. For ``Sq != Skv``
        this differs from SDPA, whose ``is_causal`` aligns the upper left corner.
    scale : float, optional
        Of the scores, ``1 / sqrt(D)`` by default; finite, at most 2.3e38 in size.
    key_bounds : Tensor, optional
        int32 ``(B, 1 or Hq, Sq, 2)``: row i sees keys ``[lo, hi)`` only.
    query_offset : int or Tensor, optional
        Key position of query 0, ``p = i + query_offset``; or int32 ``(B,)`` on the device. By
        default ``Skv - Sq``.
    key_origin : Tensor, optional
        int32 ``(B,)`` on the device: the key at which the entry's text begins, 0 by default. Sinks,
        the first global tokens, strided columns and forced first blocks count from it; positions,
        and so windows, do not change. Below 0 in a cache that dropped its first keys.
    softcap : float
        Scores become ``c * tanh(s / c)`` before the mask; 0 is off.
    sink_logits : Tensor, optional
        ``(Hq,)``: a logit for each head that joins the softmax's denominator only.
    return_lse : bool
        Also return the natural-log log-sum-exp over the keys, float32 ``(B, Hq, Sq)``.
    out : Tensor, optional
        ``(B, Hq, Sq, D)`` of query's dtype, may be strided, must overlap no input; it is returned.
        Refused in grad mode when an input requires grad.
    engine : {"auto", "naive", "tiled", "portable", "decode", "hopper"}
        ``auto`` takes the fastest that serves the case; see `can_use`.

    Returns
    -------
    Tensor or (Tensor, Tensor)
        The output ``(B, Hq, Sq, D)`` in query's dtype and stride order, and the lse when asked for.
        A row without keys is zero, its lse -inf.

    Raises
    ------
    TypeError
        An argument of a wrong kind.
    ValueError
        A wrong call, in one sentence: the argument, what was expected, what came.
    NotImplementedError
        A right call that no engine serves."""

_COMMON_TENSORS = """query : Tensor
        ``(B, Hq, Sq, D)``, float32, float16 or bfloat16; any strides with a contiguous last
        dimension. D is a multiple of 8 up to 256.
    key, value : Tensor
        ``(B, Hkv, Skv, D)`` with ``Hq % Hkv == 0``; key heads are shared without a copy."""


class FusedCommon(TypedDict, total=False):
    """Common keywords of `fused_attention`, which has SDPA's own by name."""

    key_bounds: torch.Tensor | None
    query_offset: int | torch.Tensor | None
    key_origin: torch.Tensor | None
    softcap: float
    sink_logits: torch.Tensor | None
    return_lse: bool
    out: torch.Tensor | None
    engine: str


class Common(FusedCommon, total=False):
    """Common keywords of the attention functions."""

    attn_mask: torch.Tensor | None
    is_causal: bool
    scale: float | None


_OPTIONAL_TENSOR = ((torch.Tensor, type(None)), "a tensor or None")
_KINDS: dict[str, tuple[Any, str]] = {
    "attn_mask": _OPTIONAL_TENSOR,
    "is_causal": (bool, "a bool"),
    "key_bounds": _OPTIONAL_TENSOR,
    "key_origin": _OPTIONAL_TENSOR,
    "softcap": (Number, "a float"),
    "sink_logits": _OPTIONAL_TENSOR,
    "return_lse": (bool, "a bool"),
    "out": _OPTIONAL_TENSOR,
    "engine": (str, "a str"),
}


def documented(function: _Function) -> _Function:
    """Fill in what the docstrings of all attention functions share: {tensors} and {common}."""
    doc = function.__doc__ or ""
    doc = doc.replace("{tensors}", _COMMON_TENSORS)
    function.__doc__ = doc.replace("{common}", _COMMON_SECTIONS)
    return function


def op_arguments(owner: str, common: dict[str, Any]) -> dict[str, Any]:
    """Check the kinds of common arguments and name them as the ops do.

    ``return_lse``, ``out`` and ``engine`` pass through.
    """
    arguments = dict(common)
    for name, value in common.items():
        if name in _KINDS:
            kinds, what = _KINDS[name]
            check_kind(owner, name, value, kinds, what)
        elif name == "scale":
            if value is not None:
                check_kind(owner, name, value, Number, "a float or None")
                arguments[name] = as_float(value)
        elif name == "query_offset":
            if isinstance(value, torch.Tensor):
                arguments["query_offsets"] = arguments.pop(name)
            elif value is not None:
                check_kind(owner, name, value, Integer, "an int or a tensor")
                arguments[name] = clamped(value)
        else:
            raise TypeError(f"sparse_attn.{owner}: got an unexpected keyword argument {name!r}")
    if "softcap" in arguments:
        arguments["softcap"] = as_float(arguments["softcap"])
    return arguments


def attend(
    owner: str,
    pattern: Pattern,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    common: dict[str, Any],
    op: str | None = None,
) -> Result:
    """Call the op of a pattern for the function `owner`.

    Parameters
    ----------
    owner : str
        The public function, for sentences.
    pattern : Pattern
        Names the op and its pattern arguments.
    query, key, value : Tensor
        Checked by the op.
    common : dict
        The caller's common keywords.
    op : str, optional
        Another op that takes the pattern's arguments, or a mask in their place.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(owner, name, tensor)
    reason = pattern._unserved()
    arguments = op_arguments(owner, common)
    if reason is None:
        arguments |= pattern._arguments()
    elif op is None:
        raise NotImplementedError(f"sparse_attn.{owner}: not served: {reason}")
    else:
        arguments = with_mask_of(pattern, query, key, arguments)
    op = op or pattern._op
    out = arguments.pop("out", None)
    return_lse = arguments.get("return_lse", False)
    if out is None:
        out, lse = ops.call(f"{op}", query, key, value, **arguments)
        result = (out, lse) if return_lse else out
    else:
        arguments.pop("return_lse", None)
        lse = query.new_empty(query.shape[:3], dtype=torch.float32) if return_lse else None
        ops.call(f"{op}_out", query, key, value, **arguments, out=out, lse=lse)
        result = (out, lse) if lse is not None else out
    # A traced call has no shapes to ask about.
    if not torch.compiler.is_compiling() and query.shape[2] > key.shape[2]:
        _ask_about_layout(owner, pattern, query, key, common)
    return result


def _ask_about_layout(
    owner: str, pattern: Pattern, query: torch.Tensor, key: torch.Tensor, common: dict[str, Any]
) -> None:
    """Warn once a function where more queries than keys leave the first rows without any.

    So look ``(B, S, H, D)`` tensors of grouped-query heads: their lengths are read as heads.
    """
    ahead = 0 if common.get("is_causal") else pattern._ahead
    placed = common.get("query_offset") is not None
    if placed or ahead is None:
        return
    empty = query.shape[2] - key.shape[2] - ahead
    if empty <= 0 or key.shape[2] == 0:
        return
    warn_once(
        f"layout of {owner}",
        f"sparse_attn.{owner}: the first {empty} of {query.shape[2]} queries see none of "
        f"{key.shape[2]} keys (query i stands at key i + Skv - Sq) and give zeros; expected is the "
        f"layout (B, H, S, D): are these tensors (B, S, H, D)? Then pass .transpose(1, 2)",
        stacklevel=4,
    )
