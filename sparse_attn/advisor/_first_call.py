"""What a model's first attention call shows, where the forward ends.

Whether calls are causal, how many positions an image has, and whether the model takes
(batch, length, ...): lengths are cut and repeated along dimension 1.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from .._binding import bound
from .._checks import refuse
from .._observe import Attended, watching
from ..patterns import Full
from ..quality._calls import call_model, evaluating
from ._times import text_of

__all__ = ["FirstCall", "first_call"]


class _Seen(BaseException):
    """Ends a forward; no model catches it."""


class FirstCall(NamedTuple):
    """A model's first attention call."""

    is_causal: bool
    positions: int  # of its queries

    def only_length(self, owner: str, asked: list[int] | None) -> list[int]:
        """Return the one length of inputs that are not cut, such as images; refuse others."""
        if asked not in (None, [self.positions]):
            what = f"lengths of [{self.positions}], the positions of inputs that are not cut"
            raise refuse(owner, what, asked)
        return [self.positions]


@torch.no_grad()
def first_call(owner: str, model: nn.Module, call: dict[str, Any]) -> FirstCall:
    """Return the first attention call of a model; where there is none, a causal one of the inputs.

    Raises
    ------
    ValueError
        A model of (length, batch, ...), such as a ``nn.TransformerEncoder`` without
        ``batch_first``.
    """
    seen: list[Attended] = []

    def see(attended: Attended) -> None:
        seen.append(attended)
        raise _Seen

    with suppress(_Seen), evaluating(model), bound(owner, model, Full()), watching(see):
        call_model(owner, model, call)
    sizes = text_of(owner, call).shape[:2]
    if not seen:
        return FirstCall(True, sizes[1])
    entries, _, positions, _ = seen[0].query.shape
    if entries != positions and sizes == (positions, entries):
        name = type(model).__name__
        got = (
            f"{name} that takes (length, batch, ...); torch's modules take the former where they "
            "are made with batch_first=True"
        )
        raise refuse(owner, "a model of inputs (batch, length, ...)", got)
    return FirstCall(seen[0].is_causal, positions)
