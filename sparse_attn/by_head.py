"""`ByHead`: a pattern of its own for each key head, run as few calls on views.

Heads of equal patterns that lie side by side run as one call; query, key and value are views, and
each call writes its part of one output. Block top-k of different settings on neighbouring heads is
one call too: each setting selects its heads' lists, and one call attends to all of them. Made by
`Policy` for layers with ``heads=``; run by `sparse_attention`, `naive_attention`,
`varlen_attention`, `paged_attention` and the integrations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from . import ops
from ._autocast import is_autocast_enabled
from ._autograd import is_tracked
from ._checks import as_given, check_integer, check_kind, check_length, is_dense, refuse
from ._common import Common, op_arguments
from ._pattern import check_pattern
from ._tiles import TileRun
from .patterns import BlockSparse, BlockTopK, Pattern
from .windows import DENSE

__all__ = ["ByHead", "ListsByHead", "attend_by_head", "parts_of"]

#: Arguments with query heads or key heads, and the dimension of these, from the right but of `out`,
#: where it is that of query.
_QUERY_HEADS = {
    "attn_mask": -3,
    "key_bounds": -3,
    "out": 1,
    "sink_logits": -1,
    "alibi_slopes": -1,
}
_KEY_HEADS = {"key_scale": -1, "value_scale": -1}

#: Up to so many queries lists stay with their own op, which has an engine for them.
_FEW_QUERIES = 16


@dataclass(frozen=True)
class ByHead(Pattern):
    """A pattern for each key head; query heads take that of their key head.

    Parameters
    ----------
    patterns : mapping of int to Pattern
        By number of the key head.
    rest : Pattern
        Of heads that are not named.

    Raises
    ------
    TypeError, ValueError
        Heads that are no ints of at least 0; values that are no patterns; a layout with lists, or
        scores, of several heads, or a `ByHead` inside.

    Examples
    --------
    >>> import torch
    >>> from sparse_attn import Band, ByHead, Full, sparse_attention
    >>> pattern = ByHead({0: Full()}, rest=Band((15, 0), sinks=4))
    >>> q, k, v = torch.randn(1, 8, 64, 16), *torch.randn(2, 1, 4, 64, 16)
    >>> out = sparse_attention(q, k, v, pattern, is_causal=True)
    >>> alone = sparse_attention(q[:, :2], k[:, :1], v[:, :1], Full(), is_causal=True)
    >>> torch.equal(out[:, :2], alone)
    True
    """

    patterns: Mapping[int, Pattern] = field(hash=False)
    rest: Pattern = DENSE

    def __post_init__(self) -> None:
        check_kind("ByHead", "patterns", self.patterns, Mapping, "a mapping of head to pattern")
        for head in self.patterns:
            check_integer("ByHead", "head", head, 0)
        for pattern in self._head_patterns:
            check_pattern("ByHead", pattern)
            if isinstance(pattern, ByHead):
                raise refuse("ByHead", "a pattern for each head", "a ByHead")
            blocks = pattern._region
            if isinstance(blocks, BlockSparse) and blocks.layout.counts.shape[1] > 1:
                raise refuse("ByHead", "a layout of one head", blocks.layout)
            scores = blocks.selector if isinstance(blocks, BlockTopK) else None
            if isinstance(scores, torch.Tensor) and scores.dim() == 4 and scores.shape[1] > 1:
                raise refuse("ByHead", "scores of one head", f"shape {tuple(scores.shape)}")
        ordered = {int(head): self.patterns[head] for head in sorted(self.patterns)}
        object.__setattr__(self, "patterns", ordered)

    @property
    def _head_patterns(self) -> tuple[Pattern, ...]:
        return (*self.patterns.values(), self.rest)

    def of(self, head: int) -> Pattern:
        """Return the pattern of a key head.

        Examples
        --------
        >>> from sparse_attn import Band, ByHead, Full
        >>> ByHead({2: Full()}, rest=Band(7)).of(2)
        Full()
        """
        return self.patterns.get(check_integer("ByHead", "head", head, 0), self.rest)

    def runs(self, num_heads: int) -> list[tuple[Pattern, slice]]:
        """Return equal patterns of neighbouring key heads, each with its heads.

        Parameters
        ----------
        num_heads : int
            Key heads of the call.

        Raises
        ------
        TypeError, ValueError
            A number that is no int of at least 0; a pattern for a head that the call does not have.

        Examples
        --------
        >>> from sparse_attn import ByHead, Full, TopK
        >>> ByHead({2: Full()}, rest=TopK(7)).runs(3)
        [(TopK(k=7), slice(0, 2, None)), (Full(), slice(2, 3, None))]
        """
        check_length("ByHead", "num_heads", num_heads)
        beyond = [head for head in self.patterns if head >= num_heads]
        if beyond:
            what = f"patterns for the call's {num_heads} key heads"
            raise refuse("ByHead", what, f"one for head {beyond[0]}")
        found: list[tuple[Pattern, slice]] = []
        for head in range(num_heads):
            pattern, begin = self.of(head), head
            if found and found[-1][0] == pattern:
                begin = found.pop()[1].start
            found.append((pattern, slice(begin, head + 1)))
        return found

    def allows(self, row: torch.Tensor, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Refuse: each head has a mask of its own."""
        raise NotImplementedError(
            "sparse_attn.ByHead: no mask of all heads; ask the pattern of one, .of(head)"
        )

    def _row_counts(self, position: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError(
            "sparse_attn.ByHead: no density of all heads; ask the pattern of one, .of(head)"
        )

    def _runs(self, Sq: int, Skv: int, is_causal: bool, tile: tuple[int, int]) -> list[TileRun]:
        raise NotImplementedError(
            "sparse_attn.ByHead: no tiles of all heads; ask the pattern of one, .of(head)"
        )


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
    ) -> list[Part]:
        """Return the parts that select: views of the heads of each setting."""
        return _cut_parts(self.runs, (query, key, key), common, PLAIN)


class Layout(NamedTuple):
    """Dimensions that query and key have, and that of the key heads; query heads are at 1."""

    query: int
    key: int
    key_heads: int


PLAIN = Layout(4, 4, 1)  # (B, Hq, Sq, D) and (B, Hkv, Skv, D)
PACKED = Layout(3, 3, 1)  # (T, Hq, D) and (T, Hkv, D)
PAGED = Layout(4, 4, 2)  # (B, Hq, Sq, D) and (pages, page_size, Hkv, D)
PACKED_ON_PAGES = Layout(3, 4, 2)


class Part(NamedTuple):
    """The heads of one pattern: the pattern, views of query, key and value, their keywords."""

    pattern: Pattern
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    common: dict[str, Any]


def parts_of(
    pattern: ByHead,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    common: dict[str, Any],
    joins: bool = False,
    layout: Layout = PLAIN,
) -> list[Part]:
    """Return the calls that a call by head consists of, on views.

    Parameters
    ----------
    pattern : ByHead
    query, key, value : Tensor
        Of the `layout`. Where they are no such tensors, the one part is the whole call, which the
        op refuses.
    common : dict
        Keywords of the call; those with heads are cut to the heads of each run.
    joins : bool
        Whether neighbouring runs of block top-k become one part, a `ListsByHead`.
    layout : Layout
    """
    tensors = query, key, value
    if not _have_heads(*tensors, layout):
        return [Part(pattern.rest, tensors, common)]
    heads_q, heads_kv = query.shape[1], key.shape[layout.key_heads]
    runs = pattern.runs(heads_kv)
    if len(runs) <= 1 or heads_q % heads_kv:
        return [Part(runs[0][0] if runs else pattern.rest, tensors, common)]
    return _cut_parts(_joined_runs(runs) if joins else runs, tensors, common, layout)


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
        parts = tuple(
            (own, slice(heads.start - first.start, heads.stop - first.start))
            for own, heads in same
            if isinstance(own, BlockTopK)
        )
        found.append((ListsByHead(parts), slice(first.start, last.stop)))
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


def _cut_parts(
    runs: Sequence[tuple[Pattern, slice]],
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    common: Mapping[str, Any],
    layout: Layout,
) -> list[Part]:
    """Return a part for each run of key heads."""
    query, key, value = tensors
    heads_q, heads_kv = query.shape[1], key.shape[layout.key_heads]
    group = heads_q // heads_kv
    parts = []
    for own, heads in runs:
        rows = slice(group * heads.start, group * heads.stop)
        cut = {
            name: _cut(name, argument, rows, heads_q, heads, heads_kv)
            for name, argument in common.items()
        }
        own_keys, own_values = (
            tensor.narrow(layout.key_heads, heads.start, heads.stop - heads.start)
            for tensor in (key, value)
        )
        parts.append(Part(own, (query[:, rows], own_keys, own_values), cut))
    return parts


def attend_by_head(
    pattern: ByHead,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    common: dict[str, Any],
    attend: Callable[..., Any],
    joins: bool = True,
    layout: Layout = PLAIN,
    op: str = "fused",
    placing: Mapping[str, Any] | None = None,
) -> Any:
    """Run ``attend(query, key, value, pattern, **common)`` for every run of equal heads.

    Parameters
    ----------
    pattern, query, key, value, common, joins, layout
        As in `parts_of`; few queries never join, since a decode call takes no lists of tiles.
    attend : callable
        As `sparse_attention`.
    op : str
        What judges the caller's `out` beside the tensors of all heads.
    placing : mapping, optional
        What that op needs besides: where sequences and pages lie.

    Returns
    -------
    Tensor or (Tensor, Tensor)
        What one call would return.
    """
    given = {name: argument for name, argument in common.items() if argument is not None}
    have_heads = _have_heads(query, key, value, layout)
    if "out" in given:
        check_out(op, query, key, value, {**given, **(placing or {})})
    elif have_heads and not _joins((query, key, value), given):
        given["out"] = ops.empty_output(query, value)
    # A traced length is asked about only where the answer matters: to ask would narrow the graph.
    joins = joins and have_heads and _has_lists(pattern) and query.shape[2] > _FEW_QUERIES
    parts = parts_of(pattern, query, key, value, given, joins, layout)
    results = [attend(*part.tensors, part.pattern, **part.common) for part in parts]
    if len(results) == 1:
        return results[0]
    whole = given.get("out")
    if not given.get("return_lse"):
        return torch.cat(results, 1) if whole is None else whole
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, 1) if whole is None else whole, torch.cat(lses, -2)


def check_out(
    op: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: Mapping[str, Any]
) -> None:
    """Raise where the whole of ``out`` does not fit the whole call.

    The calls of single runs see parts: one may write what another is still to read. Where nothing
    is computed (meta and fake tensors, tracing) there is nothing to judge, as in the ops.
    """
    if torch.compiler.is_compiling() or query.is_meta or torch._C._len_torch_dispatch_stack():
        return
    placed = {name: given[name] for name in given.keys() - Common.__annotations__.keys()}
    shared = {name: given[name] for name in given.keys() - placed.keys() - {"return_lse"}}
    arguments = {"query": query, "key": key, "value": value, **placed}
    try:
        ops.ask_engine(op, arguments | op_arguments(op, shared))
    except ValueError as error:
        raise as_given(error, given) from None


def _cut(name: str, argument: Any, rows: slice, heads_q: int, heads: slice, heads_kv: int) -> Any:
    """Cut an argument to the heads of a run; one of another size is left for the op to refuse."""
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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout
) -> bool:
    """Whether tensors can be cut by head; the op refuses others."""
    dims = (layout.query, layout.key, layout.key)
    tensors = (query, key, value)
    return all(is_dense(t) and t.dim() == n for t, n in zip(tensors, dims, strict=True))


def _joins(tensors: tuple[torch.Tensor, ...], common: dict[str, Any]) -> bool:
    """Whether outputs are joined: grad mode, autocast and tracing take no ``out=`` of views."""
    return (
        torch.compiler.is_compiling()
        or is_tracked(tensors, common)
        or is_autocast_enabled(tensors[0].device.type)
    )
