"""An attention module of a model: the policy bound to it, its name in sentences, its refusals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from .._module_names import LAYER
from .._warn import warn_once
from ..policy import Policy

__all__ = ["Layer", "layer_error", "layer_of", "place", "warn_of_weights"]


#: What to do instead, for arguments that come up.
_ADVICE = {
    "block_size": "set the configuration's block_size to a multiple of 16, or load the model with "
    "its own attention",
    "cache": "generate without continuous batching",
    "cu_seq_lens_q": "give one row of packed texts with cu_seq_lens_k, or a padded batch with an "
    "attention_mask",
    "dropout": "call model.eval()",
    "position_bias": "load this model with attn_implementation='sdpa', or 'eager' if it has none",
    "training": "call model.eval()",
}


@dataclass(frozen=True)
class Layer:
    """A policy bound to an attention module.

    Attributes
    ----------
    policy : Policy
    number : int
        The layer's number in the policy.
    path : str
        The module's name in its model.
    """

    policy: Policy
    number: int
    path: str


def layer_of(module: nn.Module) -> Layer | None:
    """Return what a policy bound to an attention module, None where none did."""
    layer: Layer | None = getattr(module, LAYER, None)
    return layer


def place(module: nn.Module) -> str:
    """Name an attention module in sentences."""
    layer = layer_of(module)
    if layer is not None:
        return f"layer {layer.number} ({layer.path})"
    number = getattr(module, "layer_idx", None)
    name = type(module).__name__
    return name if number is None else f"layer {number} ({name})"


def layer_error(
    module: nn.Module, argument: str, got: object, advice: str | None = None
) -> NotImplementedError:
    """Make the error of an argument that is not served: layer, argument, what to do."""
    usual = "leave it out, or load the model with its own attention"
    advice = advice or _ADVICE.get(argument, usual)
    return NotImplementedError(
        f"sparse_attn: {place(module)}: not served: {argument}={got}; {advice}"
    )


def warn_of_weights(module: nn.Module, extras: dict[str, Any]) -> None:
    """Warn once where weights are asked for, which are never made."""
    config = getattr(module, "config", None)
    if extras.get("output_attentions", getattr(config, "output_attentions", False)):
        warn_once(
            "output_attentions",
            "sparse_attn makes no attention weights: output_attentions=True gives none; load the "
            "model with attn_implementation='eager' to see them",
        )
