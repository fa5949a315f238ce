"""Attention over a sequence that is cut into shards, one for each rank of a process group.

A rank holds neighbouring queries, keys and values. It is sent the keys that its queries reach (for
a window those next to its shard, and the sinks), attends to those of each rank in a call of its
own, and merges the results by their log-sum-exps. One exchange runs while the call before it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Unpack

from ._checks import LARGE, check_dense, check_kind, refuse
from ._common import Common, Result, op_arguments
from ._pattern import check_pattern
from .by_head import ByHead
from .functional import sparse_attention
from .patterns import Band, Dilated, Full, Pattern, Strided
from .tools import merge_states

__all__ = ["sharded_attention"]

OWNER = "sharded_attention"
#: Common arguments that mean the same on the keys of one rank; others concern all keys, or
#: tensors that one rank does not hold.
_SERVED = (
    "dropout_p",
    "is_causal",
    "scale",
    "enable_gqa",
    "softcap",
    "sink_logits",
    "alibi_slopes",
    "return_lse",
    "engine",
)
Keys = tuple[int, int]  # [begin, end) of the whole sequence
Piece = tuple[int, torch.Tensor, torch.Tensor]  # where its keys begin, keys, values


def sharded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: Pattern | None = None,
    group: Any = None,
    **common: Unpack[Common],
) -> Result:
    """Attend from this rank's queries to the keys of all ranks.

    Every rank of the group calls it, with the same pattern and keywords. Shards follow each other
    by rank and may differ in length.

    Parameters
    ----------
    query : Tensor
        ``(B, Hq, Sq, D)``, this rank's part of the queries.
    key, value : Tensor
        ``(B, Hkv, Skv, D)``, this rank's part of the keys.
    pattern : Pattern, optional
        `Full`, `Band` without global tokens, `Dilated`, `Strided`, or a `ByHead` of these; all keys
        by default. It applies to the whole sequence.
    group : torch.distributed.ProcessGroup, optional
        By default all ranks.
    **common
        ``is_causal``, ``scale``, ``softcap``, ``sink_logits``, ``alibi_slopes``, ``return_lse`` and
        ``engine``, as in `sparse_attention`.

    Returns
    -------
    Tensor or (Tensor, Tensor)
        ``(B, Hq, Sq, D)`` of this rank's queries; with ``return_lse`` also the log-sum-exp over the
        keys of all ranks, float32 ``(B, Hq, Sq)``.

    Raises
    ------
    TypeError, ValueError
        As `sparse_attention`; no process group.
    NotImplementedError
        A pattern or keyword that is not served over shards.

    Examples
    --------
    >>> import sparse_attn as sa, torch
    >>> def on_each_rank(query, key, value):
    ...     window = sa.Band((4095, 0), sinks=4)
    ...     return sa.distributed.sharded_attention(query, key, value, window)

    Notes
    -----
    The lengths of the shards are exchanged first, which waits for the device. Memory holds the keys
    of two ranks beside the own ones. Merging: Liu et al. 2023 (Ring Attention).
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_dense(OWNER, name, tensor)
    pattern = Full() if pattern is None else pattern
    check_pattern(OWNER, pattern)
    calls: dict[str, Any] = {n: a for n, a in common.items() if a is not None}
    unserved = [name for name in Common.__annotations__ if name in calls and name not in _SERVED]
    if unserved:
        raise NotImplementedError(f"sparse_attn.{OWNER}: not served: {unserved[0]} over shards")
    _check_served(pattern)
    op_arguments(OWNER, calls)  # refuses in the name of this function
    if not (dist.is_available() and dist.is_initialized()):
        what = "a process group (torch.distributed.init_process_group)"
        raise refuse(OWNER, what, "none")
    kinds = (dist.ProcessGroup, type(None))
    check_kind(OWNER, "group", group, kinds, "a ProcessGroup that this rank is in, or None")
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return sparse_attention(query, key, value, pattern, **calls)  # refuses them
    # What does not fit is refused before other ranks wait for this one, of a rank without keys too.
    sparse_attention(query[:, :, :0], key, value, pattern, **calls)
    with_lse = calls.pop("return_lse", False)
    sinks = calls.pop("sink_logits", None)
    exchange = _Exchange(query, key, value, pattern, bool(calls.get("is_causal")), group)
    out = query.new_zeros((*query.shape[:3], value.shape[3]), dtype=torch.float32)
    lse = query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32)
    for begin, keys, values in exchange.pieces():
        placed = {"query_offset": exchange.first - begin, "key_origin": exchange.origin(begin)}
        result: Any = sparse_attention(
            query, keys, values, pattern, return_lse=True, **placed, **calls
        )
        out, lse = merge_states(out, lse, result[0].float(), result[1])
    if sinks is not None:  # they join the denominator alone
        share = torch.sigmoid(lse - sinks.float()[:, None])
        out = out * share.masked_fill(lse == -torch.inf, 0)[..., None]  # of a sink of -inf too
    out = out.to(query.dtype)
    return (out, lse) if with_lse else out


def _check_served(pattern: Pattern) -> None:
    """Refuse patterns whose results do not merge, or that count rows or keys of all ranks."""
    for own in pattern._head_patterns:
        has_globals = isinstance(own, Band) and own.global_tokens is not None
        if has_globals or own._op is None or not isinstance(own, (Full, Band, Dilated, Strided)):
            name = f"{type(own).__name__}{' with global tokens' if has_globals else ''}"
            raise NotImplementedError(
                f"sparse_attn.{OWNER}: not served: {name} over shards; Full, Band, Dilated and "
                "Strided are"
            )


def _reached(pattern: Pattern, rows: Keys, is_causal: bool) -> list[Keys]:
    """Return disjoint runs of keys that rows at these positions may reach, no key left out."""
    if isinstance(pattern, ByHead):
        found = [run for own in pattern._head_patterns for run in _reached(own, rows, is_causal)]
        return _joined(found)
    left = right = LARGE
    sinks, step = 0, 1
    if isinstance(pattern, (Band, Dilated)):
        left, right = (LARGE if side is None else side for side in pattern.sides)
        sinks = pattern.sinks
        step = pattern.dilation if isinstance(pattern, Dilated) else 1
    end = rows[1] if is_causal or isinstance(pattern, Strided) else LARGE
    window = max(0, rows[0] - left * step), min(end, rows[1] + right * step)
    return _joined([(0, min(sinks, end)), window])


def _joined(runs: list[Keys]) -> list[Keys]:
    """Return runs in order, those that touch as one, without empty ones."""
    joined: list[Keys] = []
    for begin, end in sorted(run for run in runs if run[0] < run[1]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


class _Exchange:
    """Sends this rank's keys to those that reach them, and receives what its queries reach."""

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pattern: Pattern,
        is_causal: bool,
        group: Any,
    ) -> None:
        self.key, self.value, self.group = key, value, group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        own = torch.tensor([query.shape[2], key.shape[2]], device=query.device)
        lengths = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(lengths, own, group)
        rows, keys = zip(*(length.tolist() for length in lengths), strict=True)
        self.starts = [0, *accumulate(keys)]
        offset = self.starts[-1] - sum(rows)  # the last query stands at the last key
        places = [offset + start for start in (0, *accumulate(rows))]
        self.first = places[self.rank]
        self.reached = [
            _reached(pattern, (places[r], places[r + 1]), is_causal) if rows[r] else []
            for r in range(self.ranks)
        ]

    def origin(self, begin: int) -> torch.Tensor:
        """Return where the text begins, seen from keys that begin at `begin`."""
        batch = self.key.shape[0]
        return torch.full((batch,), -begin, dtype=torch.int32, device=self.key.device)

    def _runs(self, source: int, target: int) -> list[Keys]:
        """Return the runs of the source's keys that the target's queries reach."""
        low, high = self.starts[source], self.starts[source + 1]
        cut = [(max(begin, low), min(end, high)) for begin, end in self.reached[target]]
        return _joined(cut)

    def pieces(self) -> Iterator[Piece]:
        """Give the first position, keys and values of all runs that this rank's queries reach."""
        coming = self._post(1)
        for begin, end in self._runs(self.rank, self.rank):
            yield begin, self._own(self.key, begin, end), self._own(self.value, begin, end)
        for step in range(1, self.ranks):
            pieces, waits, _sent = coming
            coming = self._post(step + 1)
            for wait in waits:
                wait.wait()
            yield from pieces

    def _own(self, tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        start = self.starts[self.rank]
        return tensor[:, :, begin - start : end - start]

    def _post(self, step: int) -> tuple[list[Piece], list[Any], list[torch.Tensor]]:
        """Start the exchange with ranks `step` places away: pieces, what to wait for, buffers."""
        if step >= self.ranks:
            return [], [], []
        target, source = (self.rank + step) % self.ranks, (self.rank - step) % self.ranks
        sent = [
            self._own(tensor.detach(), begin, end).contiguous()
            for begin, end in self._runs(self.rank, target)
            for tensor in (self.key, self.value)
        ]
        pieces: list[Piece] = []
        for begin, end in self._runs(source, self.rank):
            keys, values = (
                tensor.new_empty((*tensor.shape[:2], end - begin, tensor.shape[3]))
                for tensor in (self.key, self.value)
            )
            pieces.append((begin, keys, values))
        ops = [dist.P2POp(dist.isend, t, self._place(target), self.group) for t in sent]
        for _, keys, values in pieces:
            ops += [
                dist.P2POp(dist.irecv, t, self._place(source), self.group) for t in (keys, values)
            ]
        return pieces, dist.batch_isend_irecv(ops) if ops else [], sent

    def _place(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)
