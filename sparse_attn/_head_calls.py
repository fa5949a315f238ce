"""The few calls of a `ByHead`: runs of equal heads, on views of query, key and value.

Heads of equal patterns that lie side by side run as one call, and each call writes its heads of one
output. Block top-k of different settings on neighbouring heads is one call too: each setting
selects its heads' lists, and one call attends to all of them. Called by `sparse_attention`,
`naive_attention`, `varlen_attention`, `paged_attention` and the integrations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from . import ops
from ._autocast import autocast, is_autocast_enabled
from ._autograd import is_tracked
from ._checks import as_given, is_dense
from ._common import Common, op_arguments
from .by_head import ByHead
from .patterns import BlockTopK, Pattern

__all__ = [
    "PACKED",
    "PACKED_ON_PAGES",
    "PAGED",
    "HeadCall",
    "HeadDims",
    "ListsByHead",
    "attend_by_head",
    "calls_by_head",
    "check_whole",
]

#: Arguments with query heads or key heads, and the dimension of these, from the right but of `out`,
#: where it is that of query. Without that dimension a mask and a scale are those of all heads.
_QUERY_HEADS = {
    "attn_mask": -3,
    "key_bounds": -3,
    "out": 1,
    "sink_logits": -1,
    "alibi_slopes": -1,
}
_KEY_HEADS = {"key_scale": -1, "value_scale": -1}
_MAY_LACK_HEADS = ("attn_mask", *_KEY_HEADS)
#: Of one head for all of them.
_MAY_SHARE = ("attn_mask", "key_bounds")

#: Up to so many queries lists stay with their own op, which has an engine for them.
_FEW_QUERIES = 16


@dataclass(frozen=True)
class ListsByHead(Pattern):
    """Block top-k of one block size, with settings by key head: lists of all heads for one call.

    Parameters
    ----------
    runs : tuple of (BlockTopK, slice)
        Settings, each with its key heads.
    """

    runs: tuple[tuple[BlockTopK, slice], ...]

    @property
    def _region(self) -> Pattern:
        return self.runs[0][0]

    def allows(self, row: torch.Tensor, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Refuse, as block top-k does: the blocks depend on the scores."""
        return self._region.allows(row, position, key)

    def selections(
        self, query: torch.Tensor, key: torch.Tensor, common: Mapping[str, Any]
    ) -> list[HeadCall]:
        """Return the calls that select: views of the heads of each setting."""
        return _cut_calls(self.runs, (query, key, key), common, PLAIN)


class HeadDims(NamedTuple):
    """Dimensions that query and key have, and that of the key heads; query heads are at 1."""

    query: int
    key: int
    key_heads: int


PLAIN = HeadDims(4, 4, 1)  # (B, Hq, Sq, D) and (B, Hkv, Skv, D)
PACKED = HeadDims(3, 3, 1)  # (T, Hq, D) and (T, Hkv, D)
PAGED = HeadDims(4, 4, 2)  # (B, Hq, Sq, D) and (pages, page_size, Hkv, D)
PACKED_ON_PAGES = HeadDims(3, 4, 2)


class HeadCall(NamedTuple):
    """The heads of one pattern: the pattern, views of query, key and value, their keywords."""

    pattern: Pattern
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    common: dict[str, Any]


def calls_by_head(
    pattern: ByHead,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    common: dict[str, Any],
    joins: bool = False,
    dims: HeadDims = PLAIN,
) -> list[HeadCall]:
    """Return the calls that a call by head consists of, on views.

    Parameters
    ----------
    pattern : ByHead
    query, key, value : Tensor
        Of `dims`. Where they, or keywords, have not the heads of the call, the one call is the
        whole one, which the op refuses.
    common : dict
        Keywords of the call; those with heads are cut to the heads of each run.
    joins : bool
        Whether neighbouring runs of block top-k become one call, with a `ListsByHead`.
    dims : HeadDims
    """
    tensors = query, key, value
    if not _have_heads(*tensors, dims):
        return [HeadCall(pattern.rest, tensors, common)]
    heads_q, heads_kv = query.shape[1], key.shape[dims.key_heads]
    runs = pattern.runs(heads_kv)
    if len(runs) <= 1 or heads_q % heads_kv or not _agree(value, common, heads_q, heads_kv, dims):
        return [HeadCall(runs[0][0] if runs else pattern.rest, tensors, common)]
    return _cut_calls(_joined_runs(runs) if joins else runs, tensors, common, dims)


def _joined_runs(runs: list[tuple[Pattern, slice]]) -> list[tuple[Pattern, slice]]:
    """Join neighbouring runs of block top-k of one block size, whose lists one call takes."""
    neighbours: list[list[tuple[Pattern, slice]]] = []
    for run in runs:  # torch.compile follows no itertools.groupby by tuples
        blocks = _lists_of(run[0])
        if neighbours and blocks is not None and blocks == _lists_of(neighbours[-1][0][0]):
            neighbours[-1].append(run)
        else:
            neighbours.append([run])
    found: list[tuple[Pattern, slice]] = []
    for same in neighbours:
        if len(same) == 1:
            found += same
            continue
        first, last = same[0][1], same[-1][1]
        settings = tuple(
            (own, slice(heads.start - first.start, heads.stop - first.start))
            for own, heads in same
            if isinstance(own, BlockTopK)
        )
        found.append((ListsByHead(settings), slice(first.start, last.stop)))
    return found


def _has_lists(pattern: ByHead) -> bool:
    return any(_lists_of(own) is not None for own in pattern._head_patterns)


def _lists_of(pattern: Pattern) -> tuple[int, int] | None:
    """Return the block size of lists by query head that data choose; None of other patterns."""
    if not isinstance(pattern, BlockTopK) or pattern.group != "q" or pattern._by_sketch:
        return None
    if isinstance(pattern.selector, torch.Tensor):
        return None
    return pattern._blocks


def _cut_calls(
    runs: Sequence[tuple[Pattern, slice]],
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    common: Mapping[str, Any],
    dims: HeadDims,
) -> list[HeadCall]:
    """Return a call for each run of key heads."""
    query, key, value = tensors
    heads_q, heads_kv = query.shape[1], key.shape[dims.key_heads]
    group = heads_q // heads_kv
    calls = []
    for own, heads in runs:
        rows = slice(group * heads.start, group * heads.stop)
        cut = {
            name: _cut(name, argument, rows, heads_q, heads, heads_kv)
            for name, argument in common.items()
        }
        own_keys, own_values = (
            tensor.narrow(dims.key_heads, heads.start, heads.stop - heads.start)
            for tensor in (key, value)
        )
        calls.append(HeadCall(own, (query[:, rows], own_keys, own_values), cut))
    return calls


def attend_by_head(
    pattern: ByHead,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    common: dict[str, Any],
    attend: Callable[..., Any],
    joins: bool = True,
    dims: HeadDims = PLAIN,
    op: str | None = None,
    placing: Mapping[str, Any] | None = None,
) -> Any:
    """Run ``attend(query, key, value, pattern, **common)`` for every run of equal heads.

    Parameters
    ----------
    pattern, query, key, value, common, joins, dims
        As in `calls_by_head`; few queries never join, since a decode call takes no lists of tiles.
    attend : callable
        As `sparse_attention`.
    op : str, optional
        What judges the call of all heads: the caller's `out`, and what a run refused, whose tensors
        the caller does not know. None where `attend` takes other keywords than ops do.
    placing : mapping, optional
        What that op needs besides: where sequences and pages lie.

    Returns
    -------
    Tensor or (Tensor, Tensor)
        What one call would return.
    """
    given, placing = dict(common), placing or {}
    have_heads = _have_heads(query, key, value, dims)
    if given.get("out") is not None:
        assert op is not None
        check_whole(op, query, key, value, {**given, **placing})
    elif have_heads and not _joins_outputs((query, key, value), given):
        given["out"] = ops.empty_output(query, value)
    # A traced length is asked about only where the answer matters: to ask would narrow the graph.
    joins = joins and have_heads and _has_lists(pattern) and query.shape[2] > _FEW_QUERIES
    calls = calls_by_head(pattern, query, key, value, given, joins, dims)
    try:
        results = [attend(*call.tensors, call.pattern, **call.common) for call in calls]
    except ValueError:
        by_head = len(calls) > 1 or isinstance(calls[0].pattern, ListsByHead)
        if op is not None and by_head:
            check_whole(op, query, key, value, {**common, **placing})
        raise
    if len(results) == 1:
        return results[0]
    whole = given.get("out")
    if not given.get("return_lse"):
        return ops.join_heads(query, results) if whole is None else whole
    outs, lses = zip(*results, strict=True)
    joined = ops.join_heads(query, outs) if whole is None else whole
    return joined, torch.cat(lses, -2)


def check_whole(
    op: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: Mapping[str, Any]
) -> None:
    """Raise where the whole call is refused whatever its pattern, in a sentence of its tensors.

    A call sees the heads of its run alone: ``out`` may write what another is still to read. Where
    nothing is computed (meta and fake tensors, tracing) there is nothing to judge, as in the ops,
    nor under torch.vmap, which asks no op.
    """
    if torch.compiler.is_compiling() or query.is_meta or torch._C._len_torch_dispatch_stack():
        return
    if torch._C._are_functorch_transforms_active():
        return
    placed = {name: given[name] for name in given.keys() - Common.__annotations__.keys()}
    shared = {name: given[name] for name in given.keys() - placed.keys() - {"return_lse"}}
    arguments = {"query": query, "key": key, "value": value, **placed}
    try:
        arguments |= op_arguments(op, shared)
    except (TypeError, ValueError):
        return  # of the whole call too, which the first run refuses for the caller's function
    if given.get("out") is None:  # as the op's twin for `out` is not cast
        arguments = autocast(arguments, query.device.type)
    try:
        ops.ask_engine(op, arguments)
    except ValueError as error:
        raise as_given(error, given) from None


def _agree(
    value: torch.Tensor, common: Mapping[str, Any], heads_q: int, heads_kv: int, dims: HeadDims
) -> bool:
    """Whether values and keywords have the heads of query and key."""
    if value.shape[dims.key_heads] != heads_kv:
        return False
    for table, count in ((_QUERY_HEADS, heads_q), (_KEY_HEADS, heads_kv)):
        for name, dim in table.items():
            argument = common.get(name)
            if not isinstance(argument, torch.Tensor) or not is_dense(argument):
                continue
            if not -argument.dim() <= dim < argument.dim():
                if name in _MAY_LACK_HEADS:
                    continue
                return False
            heads = argument.shape[dim]
            if heads != count and (heads != 1 or name not in _MAY_SHARE):
                return False
    return True


def _cut(name: str, argument: Any, rows: slice, heads_q: int, heads: slice, heads_kv: int) -> Any:
    """Cut an argument to the heads of a run; one without heads, or of one for all, stays."""
    for table, own, count in ((_QUERY_HEADS, rows, heads_q), (_KEY_HEADS, heads, heads_kv)):
        dim = table.get(name)
        if dim is None or not isinstance(argument, torch.Tensor) or not is_dense(argument):
            continue
        if not -argument.dim() <= dim < argument.dim():
            continue
        if argument.shape[dim] == count:
            return argument.narrow(dim, own.start, own.stop - own.start)
    return argument


def _have_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dims: HeadDims
) -> bool:
    """Whether tensors can be cut by head; the op refuses others."""
    wanted = ((query, dims.query), (key, dims.key), (value, dims.key))
    return all(is_dense(tensor) and tensor.dim() == count for tensor, count in wanted)


def _joins_outputs(tensors: tuple[torch.Tensor, ...], common: dict[str, Any]) -> bool:
    """Whether outputs are joined: grad mode, autocast and tracing take no ``out=`` of views."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or is_tracked(tensors, common)
        or is_autocast_enabled(tensors[0].device.type)
    )
