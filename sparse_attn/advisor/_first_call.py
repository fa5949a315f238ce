"""What a model's first attention call shows, where the forward ends: whether calls are causal.

And whether the model takes (batch, length, ...): lengths are cut and repeated along dimension 1.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import nn

from .._binding import bound
from .._checks import refuse
from .._observe import Attended, watching
from ..patterns import Full
from ..quality._calls import call_model, evaluating
from ._times import text_of

__all__ = ["is_causal_in"]


class _Seen(BaseException):
    """Ends a forward; no model catches it."""


@torch.no_grad()
def is_causal_in(owner: str, model: nn.Module, call: dict[str, Any]) -> bool:
    """Whether the first attention call of a model is causal; True where there is none.

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
    if not seen:
        return True
    entries, _, positions, _ = seen[0].query.shape
    if entries != positions and text_of(owner, call).shape[:2] == (positions, entries):
        name = type(model).__name__
        got = f"{name} that takes (length, batch, ...); batch_first=True turns torch's modules"
        raise refuse(owner, "a model of inputs (batch, length, ...)", got)
    return bool(seen[0].common.get("is_causal"))
