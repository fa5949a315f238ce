"""Watchers of the attention calls that models make: how tools see queries, keys and values.

The integrations, `patch_sdpa` and `SparseMultiheadAttention` attend through `attend_in`; inside
``watching`` every such call also goes to the watcher, before it runs. Used by ``quality.model`` and
the advisor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from ._origins import bool_mask, rankable
from .functional import sparse_attention
from .patterns import BlockTopK, Full, Pattern

__all__ = ["Attended", "attend_in", "replacing", "watching"]


Place = Callable[[Pattern], tuple[Pattern, dict[str, Any]]]


@dataclass(frozen=True)
class Attended:
    """A layer's call as watchers see it.

    Attributes
    ----------
    layer : int
    query, key, value : Tensor
        The model's own.
    pattern : Pattern
    common : dict
        Keyword arguments but for ``out``.
    place : callable, optional
        Pattern -> the pattern and keywords of the layer's call under it, where these depend on it.
    windowed : bool
        Whether the model's own mask holds a window, which `pattern` or a bound may say.
    own_keys : bool
        False where the keys are known to be of other tokens than the queries.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    pattern: Pattern
    common: dict[str, Any]
    place: Place | None = None
    windowed: bool = False
    own_keys: bool = True

    def under(self, pattern: Pattern) -> tuple[Pattern, dict[str, Any]]:
        """Return the pattern and keywords of this layer's call under another pattern."""
        pattern, common = (pattern, self.common) if self.place is None else self.place(pattern)
        common = {name: argument for name, argument in common.items() if name != "out"}
        if "attn_mask" in common:
            common["attn_mask"] = rankable(pattern, common["attn_mask"])
        return pattern, common

    def real_rows(self) -> torch.Tensor | None:
        """Tell which rows are no padding, bool ``(B|1, 1, Sq)``: some row may see their own key.

        None where the call says nothing of it, or its keys are of other tokens than its queries.
        """
        common, length = self.under(Full())[1], self.key.shape[2]
        if not self.own_keys or self.query.shape[2] != length:
            return None
        seen = [
            seen_keys(common[name], length)
            for seen_keys, name in ((_seen_by_mask, "attn_mask"), (_seen_by_bounds, "key_bounds"))
            if common.get(name) is not None
        ]
        return functools.reduce(torch.logical_and, seen) if seen else None

    @property
    def is_causal(self) -> bool:
        """Whether rows see no later key, where the call says it: by its flag, or beside a mask."""
        common = self.common
        if self.place is not None and "is_causal" not in common:
            with suppress(NotImplementedError):  # a layer that takes no pattern
                common = self.under(BlockTopK())[1]  # beside a mask it is said to this one alone
        return bool(common.get("is_causal"))


def _seen_by_mask(mask: torch.Tensor, length: int) -> torch.Tensor:
    """Tell which keys a dense mask lets a row see, bool ``(B|1, 1, Skv)``."""
    mask = bool_mask(mask)[(None,) * (4 - mask.dim())]
    return mask.any(2).any(1, keepdim=True).expand(-1, -1, length)


def _seen_by_bounds(bounds: torch.Tensor, length: int) -> torch.Tensor:
    """Tell which keys lie in the interval of a row, bool ``(B, 1, Skv)``."""
    begin, end = bounds.flatten(1, 2).clamp(0, length).long().unbind(-1)
    steps = bounds.new_zeros(bounds.shape[0], length + 1)
    steps.scatter_add_(1, begin, (begin < end).to(steps.dtype))
    steps.scatter_add_(1, end, -(begin < end).to(steps.dtype))
    return (steps.cumsum(1)[:, None, :length]) > 0


Watcher = Callable[[Attended], None]
Substitute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_watchers: list[Watcher] = []
_substitutes: list[Substitute] = []


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Show every attention call of models inside to `watcher`."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


@contextmanager
def replacing(substitute: Substitute) -> Iterator[None]:
    """Run `substitute` of query, key and value in place of every attention call inside."""
    _substitutes.append(substitute)
    try:
        yield
    finally:
        _substitutes.remove(substitute)


def attend_in(
    layer: int | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: Pattern,
    place: Place | None = None,
    windowed: bool = False,
    own_keys: bool = True,
    **common: Any,
) -> torch.Tensor:
    """Call `sparse_attention` for a model's layer; None is a call that no policy numbers.

    Watchers learn by `place` what the call would be under another pattern, by `windowed` whether
    the model's own mask holds a window, and by `own_keys` whether keys may be the queries' tokens.
    """
    if "attn_mask" in common:
        common["attn_mask"] = rankable(pattern, common["attn_mask"])
    if _watchers and layer is not None:
        given = {name: argument for name, argument in common.items() if name != "out"}
        call = Attended(layer, query, key, value, pattern, given, place, windowed, own_keys)
        for watcher in _watchers:
            watcher(call)
    if _substitutes:
        return _substitutes[-1](query, key, value)
    out: torch.Tensor = sparse_attention(query, key, value, pattern, **common)
    return out
