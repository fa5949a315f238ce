"""Visited pairs over allowed pairs of a model's calls, as they ran: calls left to torch visit all.

The same counts say whether all calls let rows see keys past their own, as no text model does that
predicts the next token.

A watcher sees a call before it runs, and `patch_sdpa` leaves to torch what no engine serves; which
calls these were is known when the forward has ended.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from .._checks import refuse
from .._observe import Attended
from ..patterns import Full
from ..sdpa import PatchedSDPA
from ._counts import row_counts

__all__ = ["Pairs"]


class Pairs:
    """Counts visited and allowed pairs of all calls that it sees.

    Attributes
    ----------
    visited, allowed : float
    ahead : set of bool
        Whether rows see keys past their own, of calls of several queries and as many keys.
    """

    def __init__(self) -> None:
        self.ahead: set[bool] = set()
        self.visited = self.allowed = 0.0
        self._is_served = False
        self._patch: PatchedSDPA | None = None
        self._calls: list[tuple[int, float, float]] = []

    def __call__(self, call: Attended) -> None:
        """Count a call."""
        visited, allowed = (
            row_counts(call.query, call.key, *judged)
            for judged in ((call.pattern, call.common), call.under(Full()))
        )
        heads, length = call.query.shape[1:3]
        if 1 < length == call.key.shape[2]:
            own = torch.arange(1, length + 1, device=allowed.device)
            self.ahead.add(bool((allowed > own).any()))
        real = call.real_rows()
        if real is not None:
            visited, allowed = visited * real, allowed * real
        sums = [float(counts.sum()) * heads / counts.shape[1] for counts in (visited, allowed)]
        self._calls.append((call.layer, sums[0], sums[1]))

    def end_forward(self, patch: PatchedSDPA | None) -> None:
        """Add the calls of a forward, under `patch_sdpa` those of layers that it left as dense."""
        refused = set() if patch is None else patch._refused
        for layer, visited, allowed in self._calls:
            self.visited += allowed if layer in refused else visited
            self.allowed += allowed
        self._calls.clear()
        self._patch = patch
        self._is_served |= patch is None or (patch.layers or 0) > len(refused)

    def check_served(self, owner: str, module: nn.Module, name: str) -> None:
        """Refuse a policy that no call ran, whose row would be that of dense attention."""
        if self._is_served or self._patch is None:
            return
        got = f"{type(module).__name__} without calls of F.scaled_dot_product_attention"
        if self._patch.left:
            reasons = "; ".join(self._patch.left)
            got = f"{type(module).__name__}, which leaves all calls to torch: {reasons}"
        raise refuse(owner, f"a model with attention that {name} reaches", got)

    def share(self, counted: bool) -> float:
        """Return visited over allowed, NaN where a policy's calls were not seen.

        A model's own attention is not seen and sees all.
        """
        if not counted or (self._is_served and not self.allowed):
            return math.nan
        return self.visited / self.allowed if self.allowed else 1.0
