"""The common arguments of every attention function, and the one way from a function to its op.

``attend`` checks the kinds of the arguments, maps ``query_offset`` to the op's two arguments,
chooses the op or its ``_out`` twin, and returns what the caller asked for. What tensors must look
like is the ops' to check.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

import torch
from torch.compiler import is_compiling

from . import ops
from ._allowed import with_mask_of
from ._checks import (
    Integer,
    Number,
    as_float,
    as_given,
    as_int32,
    as_number,
    check_kind,
    check_tensors,
    clamped,
    is_causal_bias,
    is_dense,
    refuse,
)
from ._pattern import Pattern
from ._warn import warn_once

__all__ = ["ZERO", "Common", "Result", "attend", "call_op", "op_arguments"]

#: A tensor, or the pair (out, lse) with return_lse: known to the caller, not to the type.
Result = Any


class Common(TypedDict, total=False):
    """SDPA's and the common keywords of the attention functions."""

    attn_mask: torch.Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    key_bounds: torch.Tensor | None
    query_offset: int | torch.Tensor | None
    key_origin: torch.Tensor | None
    softcap: float
    sink_logits: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    key_scale: torch.Tensor | None
    value_scale: torch.Tensor | None
    return_lse: bool
    out: torch.Tensor | None
    engine: str


#: The default of numbers. Functions compare with it by identity, so that what is only equal to it
#: (False, a tensor) is checked like any other argument.
ZERO = 0

_MAYBE_TENSOR = (torch.Tensor, type(None))
#: What each argument must be, in words too, and what makes of it what the op takes.
_RULES: dict[str, tuple[Any, str, Callable[[Any], Any] | None]] = {
    "attn_mask": (_MAYBE_TENSOR, "a tensor or None", None),
    "dropout_p": (Number, "a float", None),
    "is_causal": (bool, "a bool", None),
    "scale": ((*Number, type(None)), "a float or None", as_float),
    "enable_gqa": (bool, "a bool", None),
    "key_bounds": (_MAYBE_TENSOR, "a tensor or None", None),
    "query_offset": ((*Integer, *_MAYBE_TENSOR), "an int or a tensor", clamped),
    "key_origin": (_MAYBE_TENSOR, "a tensor or None", None),
    "softcap": (Number, "a float", as_float),
    "sink_logits": (_MAYBE_TENSOR, "a tensor or None", None),
    "alibi_slopes": (_MAYBE_TENSOR, "a tensor or None", None),
    "key_scale": (_MAYBE_TENSOR, "a tensor or None", None),
    "value_scale": (_MAYBE_TENSOR, "a tensor or None", None),
    "return_lse": (bool, "a bool", None),
    "out": (_MAYBE_TENSOR, "a tensor or None", None),
    "engine": (str, "a str", None),
}
#: Tensors of whole numbers, which the ops take in int32.
_INDICES = ("key_bounds", "query_offset", "key_origin")
#: SDPA's, that no op takes.
_UNUSED = ("dropout_p", "enable_gqa")


def op_arguments(owner: str, common: dict[str, Any]) -> dict[str, Any]:
    """Check the kinds of common arguments and name them as the ops do.

    ``return_lse``, ``out`` and ``engine`` pass through.
    """
    arguments: dict[str, Any] = {}
    for name, value in common.items():
        if name not in _RULES:
            raise TypeError(f"sparse_attn.{owner}: got an unexpected keyword argument {name!r}")
        kinds, what, convert = _RULES[name]
        if type(value) is not kinds:
            if name == "scale" and isinstance(value, torch.Tensor):
                value = as_number(owner, name, value, what)
            check_kind(owner, name, value, kinds, what)
            if name == "attn_mask" and is_causal_bias(value):
                what = "attn_mask to be a tensor of values or None"
                got = "CausalBias; write is_causal=True, and query_offset=0 for the upper left"
                raise TypeError(f"sparse_attn.{owner}: expected {what}, got {got}")
            if isinstance(value, torch.Tensor):
                value = as_int32(owner, name, value) if name in _INDICES else value
                name = "query_offsets" if name == "query_offset" else name
            elif value is not None and convert is not None:
                value = convert(value)
        if name not in _UNUSED:
            arguments[name] = value
    if common.get("dropout_p", 0) != 0:
        raise refuse(owner, "dropout_p of 0 (inference only)", common["dropout_p"])
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
    check_tensors(owner, query, key, value)
    arguments = op_arguments(owner, common) if common else {}
    if pattern._op is not None:
        op = op or pattern._op
        arguments |= pattern._arguments()
    elif op is None:
        raise NotImplementedError(f"sparse_attn.{owner}: not served: {pattern._unserved()}")
    else:
        arguments = with_mask_of(pattern, query, key, arguments)
    try:
        result = call_op(op, query, key, value, arguments)
    except ValueError as error:
        raise as_given(error, common) from None
    ahead = 0 if common.get("is_causal") else pattern._ahead
    # A traced call has no shapes to ask about.
    if ahead is not None and not is_compiling() and query.shape[2] > key.shape[2]:
        _ask_about_layout(owner, ahead, query, key, common)
    return result


def call_op(
    op: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    arguments: dict[str, Any],
) -> Result:
    """Call an attention op, or its ``_out`` twin where the arguments have ``out``."""
    out = arguments.pop("out", None)
    return_lse = arguments.get("return_lse", False)
    if out is None:
        out, lse = ops.call(op, (query, key, value), arguments)
        return (out, lse) if return_lse else out
    arguments.pop("return_lse", None)
    lse = None
    if return_lse and is_dense(query):  # the op refuses others
        lse = query.new_empty(ops.lse_shape(query), dtype=torch.float32)
    written = (out,) if lse is None else (out, lse)
    ops.call(f"{op}_out", (query, key, value), arguments | {"out": out, "lse": lse}, written)
    return (out, lse) if lse is not None else out


def _ask_about_layout(
    owner: str, ahead: int, query: torch.Tensor, key: torch.Tensor, common: dict[str, Any]
) -> None:
    """Warn once a function where more queries than keys leave the first rows without any.

    So look ``(B, S, H, D)`` tensors of grouped-query heads, whose heads are read as lengths.
    """
    empty = query.shape[2] - key.shape[2] - ahead
    if empty <= 0 or key.shape[2] == 0 or common.get("query_offset") is not None:
        return
    warn_once(
        f"layout of {owner}",
        f"sparse_attn.{owner}: the first {empty} of {query.shape[2]} queries see none of "
        f"{key.shape[2]} keys (query i stands at key i + Skv - Sq) and give zeros; expected is the "
        f"layout (B, H, S, D): are these tensors (B, S, H, D)? Then pass .transpose(1, 2)",
    )
