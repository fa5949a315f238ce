"""Calls whose pattern is an argument: by head, and with any pattern on the naive op."""

from __future__ import annotations

from typing import Any

import torch

from .._checks import check_tensors
from .._common import Result, attend
from .._head_calls import ListsByHead, attend_by_head
from .._pattern import check_pattern
from ..by_head import ByHead
from ..patterns import Full, Pattern, TopK
from ..tools import with_lists

__all__ = ["attend_any"]


def attend_any(
    owner: str,
    pattern: Pattern | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    common: dict[str, Any],
    *,
    op: str | None = None,
) -> Result:
    """Call the pattern's op, or `op`, for the function `owner`; by head where the pattern is so."""
    if pattern is None and op == "naive":
        pattern = Full()
    check_pattern(owner, pattern)
    assert pattern is not None
    if isinstance(pattern, ByHead):
        check_tensors(owner, query, key, value)

        def of_heads(q: Any, k: Any, v: Any, own: Pattern, **part: Any) -> Result:
            return attend_any(owner, own, q, k, v, part, op=op)

        return attend_by_head(
            pattern, query, key, value, common, of_heads, op="fused" if op is None else op
        )
    if op == "naive" or isinstance(pattern, (ListsByHead, TopK)):
        pattern = with_lists(pattern, query, key, common)
    return attend(owner, pattern, query, key, value, common, op)
