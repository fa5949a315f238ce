"""Whether a model's attention is causal, seen at its first call, where the forward ends."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import nn

from .._binding import bound
from .._observe import Attended, watching
from ..patterns import Full
from ..quality._calls import call_model, evaluating

__all__ = ["is_causal_in"]


class _Seen(BaseException):
    """Ends a forward; no model catches it."""


@torch.no_grad()
def is_causal_in(owner: str, model: nn.Module, call: dict[str, Any]) -> bool:
    """Whether the first attention call of a model is causal; True where there is none."""
    found = [True]

    def see(attended: Attended) -> None:
        found[0] = bool(attended.common.get("is_causal"))
        raise _Seen

    with suppress(_Seen), evaluating(model), bound(owner, model, Full()), watching(see):
        call_model(owner, model, call)
    return found[0]
