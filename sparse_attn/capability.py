"""can_use: which engine serves a call, and why `auto` skips faster ones.

The form ``<op>_engine`` of the op checks the call as the op would and answers from the capability
table that the ops obey; nothing is computed.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import Unpack

from . import ops
from ._autocast import autocast
from ._checks import check_tensors, is_dense
from ._common import Common, op_arguments
from ._head_calls import calls_by_head, check_whole
from ._pattern import check_pattern
from .by_head import ByHead
from .layout import BlockLayout
from .patterns import BlockTopK, Full, Pattern, TopK

__all__ = ["Capability", "can_use"]

_BY_SPEED = (None, "naive", "tiled", "portable", "small", "decode", "hopper")


@dataclass(frozen=True)
class Capability:
    """Answer of `can_use`: true when the call is served.

    Attributes
    ----------
    engine : str or None
        ``naive`` or ``tiled`` on the CPU; ``naive``, ``portable``, ``small``, ``decode`` or
        ``hopper`` on CUDA; None when the call is refused.
    reasons : tuple of str
        Sentences: why faster engines are skipped and what slows the one that serves, or why the
        call is refused.
    served : bool
        The truth value.

    Examples
    --------
    >>> from sparse_attn import Capability
    >>> "served" if Capability("tiled", (), served=True) else "refused"
    'served'
    """

    engine: str | None
    reasons: tuple[str, ...]
    served: bool

    def __bool__(self) -> bool:
        return self.served

    def _repr_html_(self) -> str:
        """Return the answer for notebooks: the engine, and a line for each reason."""
        answer = f"served by {self.engine}" if self.served else "not served"
        reasons = "".join(f"<li>{html.escape(reason)}</li>" for reason in self.reasons)
        return f"<b>{html.escape(answer)}</b><ul>{reasons}</ul>" if reasons else f"<b>{answer}</b>"


def _of_all(answers: list[Capability]) -> Capability:
    """Join the answers for the heads of several patterns: a refusal, or the slowest engine."""
    for answer in answers:
        if not answer:
            return answer
    slowest = min(answers, key=lambda answer: _BY_SPEED.index(answer.engine))
    reasons = dict.fromkeys(reason for answer in answers for reason in answer.reasons)
    return Capability(slowest.engine, tuple(reasons), True)


def _stand_in(pattern: Pattern, query: torch.Tensor, key: torch.Tensor) -> Pattern:
    """Return a top-k inside blocks that the data chooses with lists of their size, of no block."""
    blocks = pattern._region
    if not isinstance(pattern, TopK) or not isinstance(blocks, BlockTopK):
        return pattern
    if any(not is_dense(tensor) or tensor.dim() != 4 for tensor in (query, key)):
        return TopK(pattern.k)  # the op refuses it
    block_q, block_kv = blocks._blocks
    counts = query.new_zeros((1, 1, -(-query.shape[2] // block_q)), dtype=torch.int32)
    num_kv = -(-key.shape[2] // block_kv)
    layout = BlockLayout._trusted(counts, counts[..., None], block_q, block_kv, num_kv)
    return TopK(pattern.k, layout)


def can_use(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: Pattern | None = None,
    **common: Unpack[Common],
) -> Capability:
    """Tell whether a call is served, by which engine, and why faster engines are skipped.

    Parameters
    ----------
    query, key, value : Tensor
        As in the attention functions; nothing is computed.
    pattern : Pattern, optional
        All keys by default.
    **common
        The common keywords of the call, ``engine`` among them.

    Returns
    -------
    Capability
        True when served, with ``.engine`` and ``.reasons``. A wrong call is refused with the
        sentence that it would raise.

    Raises
    ------
    TypeError
        An argument of a wrong kind.

    Examples
    --------
    >>> import torch
    >>> from sparse_attn import Band, can_use
    >>> q, k, v = torch.randn(3, 1, 2, 64, 16)
    >>> can_use(q, k, v, Band(8))
    Capability(engine='tiled', reasons=(), served=True)
    >>> can_use(q, k[..., :8], v, Band(8)).served
    False
    """
    check_tensors("can_use", query, key, value)
    pattern = Full() if pattern is None else pattern
    check_pattern("can_use", pattern)
    if isinstance(pattern, ByHead):
        try:
            if common.get("out") is not None:
                check_whole("fused", query, key, value, common)
            calls = calls_by_head(pattern, query, key, value, dict(common))
            answers = [can_use(*call.tensors, call.pattern, **call.common) for call in calls]
            if len(calls) > 1 and not all(answers):
                check_whole("fused", query, key, value, common)  # in the words of the whole call
        except (ValueError, NotImplementedError) as error:
            return Capability(None, (str(error),), False)
        return _of_all(answers)
    given: dict[str, Any] = {"query": query, "key": key, "value": value, **common}
    if common.get("out") is None:
        given = autocast(given, query.device.type)
    query, key, value = (given.pop(name) for name in ("query", "key", "value"))
    unserved = pattern._unserved()
    if unserved is not None:
        return Capability(None, (f"sparse_attn: not served: {unserved}",), False)
    try:
        arguments = op_arguments("can_use", given)
    except ValueError as error:
        return Capability(None, (str(error),), False)
    return_lse = arguments.pop("return_lse", False)
    if return_lse and arguments.get("out") is not None and is_dense(query):
        arguments["lse"] = query.new_empty(ops.lse_shape(query), dtype=torch.float32)
    arguments |= {"query": query, "key": key, "value": value}
    blocks, pattern = pattern._region, _stand_in(pattern, query, key)
    try:
        if isinstance(pattern, TopK) and isinstance(blocks, BlockTopK):  # what the choice refuses
            ops.ask_engine("block_topk", arguments | blocks._arguments())
        answer = ops.ask_engine(str(pattern._op), arguments | pattern._arguments())
    except (ValueError, NotImplementedError) as error:
        return Capability(None, (str(error),), False)
    engine, *reasons = answer.split("\n")
    return Capability(engine or None, tuple(reasons), bool(engine))
