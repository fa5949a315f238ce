"""The common arguments of every attention function, and the one way from a function to its op.

``attend`` checks the kinds of the arguments, maps ``query_offset`` to the op's two arguments,
chooses the op or its ``_out`` twin, and returns what the caller asked for. What tensors must look
like is the ops' to check.
"""

from __future__ import annotations

from operator import is_
from typing import Any, TypedDict

import torch

from . import ops
from ._allowed import with_mask_of
from ._checks import Integer, Number, as_float, as_int32, check_kind, check_tensors, clamped, refuse
from ._pattern import Pattern
from ._warn import warn_once

__all__ = ["Common", "Result", "attend", "call_op", "given", "op_arguments"]

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


_OPTIONAL_TENSOR = ((torch.Tensor, type(None)), "a tensor or None")
_KINDS: dict[str, tuple[Any, str]] = {
    "attn_mask": _OPTIONAL_TENSOR,
    "dropout_p": (Number, "a float"),
    "is_causal": (bool, "a bool"),
    "enable_gqa": (bool, "a bool"),
    "key_bounds": _OPTIONAL_TENSOR,
    "key_origin": _OPTIONAL_TENSOR,
    "softcap": (Number, "a float"),
    "sink_logits": _OPTIONAL_TENSOR,
    "alibi_slopes": _OPTIONAL_TENSOR,
    "key_scale": _OPTIONAL_TENSOR,
    "value_scale": _OPTIONAL_TENSOR,
    "return_lse": (bool, "a bool"),
    "out": _OPTIONAL_TENSOR,
    "engine": (str, "a str"),
}
#: Index tensors, int32 to the ops; others of whole numbers are converted.
_INDICES = ("key_bounds", "key_origin")
#: Defaults of the functions' parameters, in their order: values that are one object wherever they
#: are written, so that a glance tells whether an argument was given.
_OTHER_DEFAULTS = {
    "dropout_p": 0,
    "is_causal": False,
    "enable_gqa": False,
    "softcap": 0,
    "return_lse": False,
    "engine": "auto",
}
_NAMES = tuple(Common.__annotations__)
_DEFAULTS = tuple(map(_OTHER_DEFAULTS.get, _NAMES))


def given(*values: Any) -> dict[str, Any]:
    """Return SDPA's and the common arguments of a call, in the order of the table, by name.

    Those that are left at their defaults are left out: a call pays for what it says.
    """
    if all(map(is_, values, _DEFAULTS)):
        return {}
    return {
        name: value
        for name, value, default in zip(_NAMES, values, _DEFAULTS, strict=True)
        if value is not default
    }


def op_arguments(owner: str, common: dict[str, Any]) -> dict[str, Any]:
    """Check the kinds of common arguments and name them as the ops do.

    ``return_lse``, ``out`` and ``engine`` pass through.
    """
    arguments = dict(common)
    for name, value in common.items():
        if name in _KINDS:
            kinds, what = _KINDS[name]
            check_kind(owner, name, value, kinds, what)
            if name in _INDICES and value is not None:
                arguments[name] = as_int32(value)
            elif name == "softcap":
                arguments[name] = as_float(value)
        elif name == "scale":
            if value is not None:
                check_kind(owner, name, value, Number, "a float or None")
                arguments[name] = as_float(value)
        elif name == "query_offset":
            if isinstance(value, torch.Tensor):
                arguments["query_offsets"] = as_int32(arguments.pop(name))
            elif value is not None:
                check_kind(owner, name, value, Integer, "an int or a tensor")
                arguments[name] = clamped(value)
        else:
            raise TypeError(f"sparse_attn.{owner}: got an unexpected keyword argument {name!r}")
    if arguments.pop("dropout_p", 0) != 0:
        raise refuse(owner, "dropout_p of 0 (inference only)", common["dropout_p"])
    arguments.pop("enable_gqa", None)
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
    reason = pattern._unserved()
    arguments = op_arguments(owner, common) if common else {}
    if reason is None:
        arguments |= pattern._arguments()
    elif op is None:
        raise NotImplementedError(f"sparse_attn.{owner}: not served: {reason}")
    else:
        arguments = with_mask_of(pattern, query, key, arguments)
    result = call_op(str(op or pattern._op), query, key, value, arguments)
    # A traced call has no shapes to ask about.
    if not torch.compiler.is_compiling() and query.shape[2] > key.shape[2]:
        _ask_about_layout(owner, pattern, query, key, common)
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
        out, lse = ops.call(op, query, key, value, **arguments)
        return (out, lse) if return_lse else out
    arguments.pop("return_lse", None)
    lse = query.new_empty(ops.lse_shape(query), dtype=torch.float32) if return_lse else None
    ops.call(f"{op}_out", query, key, value, **arguments, out=out, lse=lse)
    return (out, lse) if lse is not None else out


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
    )
