"""Calls for serving: sequences packed one after the other, and caches in pages."""

from __future__ import annotations

from typing import Any

import torch

from .._checks import Integer, as_int32, check_kind, check_tensor, clamped
from .._common import Result, call_op, op_arguments
from .._pattern import check_pattern
from ..by_head import ByHead
from ..patterns import BlockTopK, Full, Pattern
from ..tools import with_lists

__all__ = ["attend_sequences"]

#: Arguments that a call may leave out, of each op.
_OPTIONAL = {"varlen": ("seqused_k",), "paged": ("cu_seq_q", "max_q")}


def attend_sequences(
    op: str,
    pattern: Pattern | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequences: dict[str, Any],
    common: dict[str, Any],
) -> Result:
    """Call op ``varlen`` or ``paged``, which takes the arguments of any pattern.

    Parameters
    ----------
    op : str
    pattern : Pattern, optional
        All keys by default.
    query, key, value : Tensor
        Checked by the op.
    sequences : dict
        What says where sequences and pages lie: tensors, and ``max_q`` and ``max_k``.
    common : dict
        The caller's common keywords.
    """
    owner = f"{op}_attention"
    names = ("query", "key", "value") if op == "varlen" else ("query", "key_cache", "value_cache")
    for name, tensor in zip(names, (query, key, value), strict=True):
        check_tensor(owner, name, tensor)
    for name, argument in sequences.items():
        if argument is None and name in _OPTIONAL[op]:
            continue
        if name.startswith("max_"):
            check_kind(owner, name, argument, Integer, "an int")
            sequences[name] = clamped(argument)
        else:
            check_tensor(owner, name, argument)
            sequences[name] = as_int32(argument)
    pattern = Full() if pattern is None else pattern
    check_pattern(owner, pattern)
    reason = pattern._unserved()
    if isinstance(pattern, ByHead):
        reason = "ByHead with packed or paged sequences"
    if reason is not None:
        raise NotImplementedError(f"sparse_attn.{owner}: not served: {reason}")
    arguments = op_arguments(owner, common) | sequences
    if isinstance(pattern._region, BlockTopK):
        pattern = with_lists(pattern, query, key, common | sequences)
    arguments |= pattern._arguments()
    return call_op(op, query, key, value, arguments)
