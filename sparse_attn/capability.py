"""can_use: which engine serves a call, and why `auto` skips faster ones.

The form ``<op>_engine`` of the op checks the call as the op would and answers from the capability
table that the ops obey; nothing is computed but the lists of packed and paged block top-k.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from typing_extensions import Unpack

from . import ops
from ._autocast import autocast
from ._checks import check_tensors, is_dense
from ._common import Common, op_arguments
from ._head_calls import PLAIN, calls_by_head, check_whole
from ._pattern import check_pattern
from .by_head import ByHead
from .functional._sequences import dims_of, placing_of, sequence_arguments
from .layout import BlockLayout
from .patterns import BlockTopK, Full, Pattern, TopK

__all__ = ["ENGINES", "Capability", "can_use"]

#: The engines of each type of device as the library names them, fastest first.
ENGINES = {"cpu": ("tiled", "naive"), "cuda": ("hopper", "decode", "small", "portable", "naive")}


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


class _Call(NamedTuple):
    """What is asked about, but for the pattern; without `op` the pattern has the op."""

    op: str | None
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    placing: dict[str, Any]
    common: dict[str, Any]


def _of_all(answers: list[Capability]) -> Capability:
    """Join the answers for the heads of several patterns: a refusal, or the slowest engine."""
    for answer in answers:
        if not answer:
            return answer
    by_speed = (*ENGINES["cuda"][:-1], *ENGINES["cpu"])
    slowest = max(answers, key=lambda answer: by_speed.index(str(answer.engine)))
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
    *,
    cu_seq_q: torch.Tensor | None = None,
    cu_seq_k: torch.Tensor | None = None,
    max_q: int | None = None,
    max_k: int | None = None,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    **common: Unpack[Common],
) -> Capability:
    """Tell whether a call is served, by which engine, and why faster engines are skipped.

    Parameters
    ----------
    query, key, value : Tensor
        As in the attention functions; nothing is computed.
    pattern : Pattern, optional
        All keys by default.
    cu_seq_q, cu_seq_k, max_q, max_k, seqused_k, block_table : Tensor or int, optional
        Of a call of `paged_attention`, which has a `block_table`, or of `varlen_attention`: with
        one of them that call is asked about. Blocks that the data chooses are chosen for it.
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
    starts = {"cu_seq_q": cu_seq_q, "cu_seq_k": cu_seq_k, "max_q": max_q, "max_k": max_k}
    sequences = {**starts, "seqused_k": seqused_k, "block_table": block_table}
    call = _Call(None, (query, key, value), {}, dict(common))
    try:
        if any(argument is not None for argument in sequences.values()):
            op = "varlen" if block_table is None else "paged"
            call = call._replace(op=op, placing=placing_of("can_use", op, sequences))
        if isinstance(pattern, ByHead):
            return _of_heads(pattern, call)
        answer = _asked(pattern, call)
    except (ValueError, NotImplementedError) as error:
        return Capability(None, (str(error),), False)
    engine, *reasons = answer.split("\n")
    return Capability(engine or None, tuple(reasons), bool(engine))


def _of_heads(pattern: ByHead, whole: _Call) -> Capability:
    """Answer for a call by head: for each of its calls, in the words of the whole one."""
    op, tensors, placing, given = whole
    arguments = {**given, **placing}
    if given.get("out") is not None:
        check_whole(op or "fused", *tensors, arguments)
    dims = PLAIN if op is None else dims_of(op, placing)
    calls = calls_by_head(pattern, *tensors, given, dims=dims)
    answers = [can_use(*call.tensors, call.pattern, **{**placing, **call.common}) for call in calls]
    if len(calls) > 1 and not all(answers):
        check_whole(op or "fused", *tensors, arguments)
    return _of_all(answers)


def _asked(pattern: Pattern, call: _Call) -> str:
    """Return what the op answers: the engine that serves the call, and a reason a line."""
    op, tensors, placing, given = call
    named = dict(zip(("query", "key", "value"), tensors, strict=True))
    if given.get("out") is None:
        cast = autocast(named | given, tensors[0].device.type)
        named, given = {n: cast[n] for n in named}, {n: cast[n] for n in given}
    query, key = named["query"], named["key"]
    unserved = pattern._unserved()
    if unserved is not None:
        raise NotImplementedError(f"sparse_attn: not served: {unserved}")
    if op is None:
        arguments = op_arguments("can_use", given)
    else:
        arguments = sequence_arguments("can_use", pattern, query, key, placing, given)
    return_lse = arguments.pop("return_lse", False)
    if return_lse and arguments.get("out") is not None and is_dense(query):
        arguments["lse"] = query.new_empty(ops.lse_shape(query), dtype=torch.float32)
    arguments |= named
    if op is not None:
        return ops.ask_engine(op, arguments)
    blocks, pattern = pattern._region, _stand_in(pattern, query, key)
    if isinstance(pattern, TopK) and isinstance(blocks, BlockTopK):  # what the choice refuses
        ops.ask_engine("block_topk", arguments | blocks._arguments())
    return ops.ask_engine(str(pattern._op), arguments | pattern._arguments())
