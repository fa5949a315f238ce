"""Calls for serving: sequences packed one after the other, and caches in pages."""

from __future__ import annotations

from typing import Any

import torch

from .._checks import (
    TRACED,
    Integer,
    as_given,
    as_int32,
    check_kind,
    check_tensor,
    check_tensors,
    clamped,
)
from .._common import Result, call_op, op_arguments
from .._head_calls import PACKED, PACKED_ON_PAGES, PAGED, HeadDims, attend_by_head
from .._pattern import check_pattern
from ..by_head import ByHead
from ..patterns import BlockTopK, Pattern
from ..tools import with_lists
from ..windows import DENSE

__all__ = ["attend_sequences", "dims_of", "placing_of", "sequence_arguments"]

#: Arguments that a call may leave out, of each op, and those that it does not have.
_OPTIONAL = {"varlen": ("seqused_k",), "paged": ("cu_seq_q", "max_q")}
_UNKNOWN = {"varlen": ("block_table",), "paged": ("cu_seq_k", "max_k")}
#: What each op's functions call its tensors.
_TENSORS = {"varlen": ("query", "key", "value"), "paged": ("query", "key_cache", "value_cache")}


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
    check_tensors(owner, query, key, value, _TENSORS[op])
    placing = placing_of(owner, op, sequences)
    pattern = DENSE if pattern is None else pattern
    check_pattern(owner, pattern)
    if isinstance(pattern, ByHead):
        return _attend_by_head(op, pattern, query, key, value, placing, common)
    try:
        arguments = sequence_arguments(owner, pattern, query, key, placing, common)
        return call_op(op, query, key, value, arguments)
    except ValueError as error:
        raise as_given(error, common | sequences) from None


def placing_of(owner: str, op: str, sequences: dict[str, Any]) -> dict[str, Any]:
    """Return what says where sequences and pages lie as the op takes it; `owner` asks for it."""
    placing: dict[str, Any] = {}
    for name, argument in sequences.items():
        if argument is None and name in (*_OPTIONAL[op], *_UNKNOWN[op]):
            continue
        if name in _UNKNOWN[op]:
            raise TypeError(f"sparse_attn.{owner}: expected no {name} of a {op} call, got one")
        if name in ("max_q", "max_k"):
            check_kind(owner, name, argument, Integer, "an int")
            placing[name] = clamped(argument)
        else:
            check_tensor(owner, name, argument)
            placing[name] = as_int32(owner, name, argument)
    return placing


def sequence_arguments(
    owner: str,
    pattern: Pattern,
    query: torch.Tensor,
    key: torch.Tensor,
    placing: dict[str, Any],
    common: dict[str, Any],
) -> dict[str, Any]:
    """Return the op's arguments, beside its tensors, for a pattern that all heads share.

    Parameters
    ----------
    owner : str
        The public function, for sentences.
    pattern, query, key, common
        As in `attend_sequences`; blocks that the data chooses are chosen here.
    placing : dict
        What says where sequences and pages lie, as the op takes it.
    """
    if pattern._op is None:
        raise NotImplementedError(f"sparse_attn.{owner}: not served: {pattern._unserved()}")
    arguments = op_arguments(owner, common)
    if isinstance(pattern._region, BlockTopK):
        pattern = with_lists(pattern, query, key, common | placing)
    arguments |= placing | pattern._arguments()
    if isinstance(arguments.get("num_kv_blocks"), torch.Tensor):
        # A number of the example's lengths would cut lists of longer sequences.
        raise TypeError(
            f"sparse_attn.{owner}: expected a layout of an int number of blocks, got {TRACED}"
        )
    return arguments


def _attend_by_head(
    op: str,
    pattern: ByHead,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    placing: dict[str, Any],
    common: dict[str, Any],
) -> Result:
    """Call the op for every run of equal heads."""

    def attend(q: Any, k: Any, v: Any, own: Pattern, **part: Any) -> Result:
        return attend_sequences(op, own, q, k, v, placing, part)

    dims = dims_of(op, placing)
    return attend_by_head(pattern, query, key, value, common, attend, False, dims, op, placing)


def dims_of(op: str, placing: dict[str, Any]) -> HeadDims:
    """Return where a call's tensors have their heads."""
    if op == "varlen":
        return PACKED
    return PACKED_ON_PAGES if "cu_seq_q" in placing else PAGED
