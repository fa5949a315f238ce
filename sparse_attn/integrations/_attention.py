"""The attention function: transformers' call as a call of ``sparse_attention``.

The mask says what the model allows (intervals or a dense mask; where a model makes none, the causal
flag does); a policy bound to the module narrows it. What the call carries and the ops do not honour
is refused by name, with the layer. Called by models through ``AttentionInterface`` and by the
modules for BigBird.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .._observe import attend_in
from .._warn import warn_once
from ..by_head import ByHead, attend_by_head
from ..patterns import Band, BlockSparse, BlockTopK, Dilated, Full, Pattern, Strided
from ..policy import Policy
from ._flattened import FLATTENED, attend_flattened, is_flattened
from ._masks import Note, is_intervals, note_of
from ._positions import (
    counts_from_origin,
    has_origin,
    narrowed_mask,
    origin_of,
    query_positions,
)

__all__ = ["Layer", "attention", "layer_error", "place", "warn_of_weights"]

#: Arguments of the call that change nothing here: the mask holds what they say, or they are notes
#: for other parts of the model.
_HARMLESS = frozenset(
    {
        "cache_position",
        "deterministic",
        "encoder_hidden_states",
        "mm_token_type_ids",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "seq_idx",
        "sliding_window",
        "token_type_ids",
        "use_cache",
    }
)

#: What to do instead, for arguments that come up.
_ADVICE = {
    "block_size": "set the configuration's block_size to a multiple of 16, or load the model with "
    "its own attention",
    "cache": "generate without continuous batching",
    "cu_seq_lens_q": "give one row of packed texts with cu_seq_lens_k, or a padded batch with an "
    "attention_mask",
    "dropout": "call model.eval()",
    "position_bias": "load this model with attn_implementation='sdpa'",
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


def place(module: nn.Module) -> str:
    """Name an attention module in sentences."""
    layer: Layer | None = getattr(module, "_sparse_attn", None)
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


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as the model asks, inside the pattern of the module's policy.

    Parameters
    ----------
    module : nn.Module
        The caller; ``is_causal`` counts where the call does not say it.
    query : Tensor
        (B, Hq, Sq, D)
    key, value : Tensor
        (B, Hkv, Skv, D), heads not repeated; the value's D may differ.
    attention_mask : Tensor, optional
        int32 (B, 1, Sq, 2) intervals, or bool (true: attend) or additive, broadcast to
        (B, Hq, Sq, Skv).
    dropout : float
        0: inference only.
    scaling, softcap : float, optional
        Scale of the scores, default 1/sqrt(D); ``softcap * tanh(s / softcap)`` after it.
    s_aux : Tensor, optional
        (Hq,) learned sinks, which join the denominator of the softmax.
    extras
        Harmless ones are accepted by name.

    Returns
    -------
    out, None
        (B, Sq, Hq, D), with the value's D; weights are never made.

    Raises
    ------
    NotImplementedError
        An argument that the ops do not honour, with layer, name and what to do.
    ValueError
        Tensors that the ops refuse.
    """
    if dropout:
        raise layer_error(module, "dropout", dropout)
    flattened = is_flattened(query, extras)
    for name, extra in extras.items():
        if flattened and name in FLATTENED:
            continue
        if extra is not None and name not in _HARMLESS:
            raise layer_error(module, name, _brief(extra))
    warn_of_weights(module, extras)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    note = note_of(attention_mask, key.shape[2])
    if note is not None and note.causal is not None:
        is_causal = note.causal

    if flattened:
        longest = [extras.get(name) for name in ("max_length_q", "max_length_k")]
        lengths = [size if isinstance(size, int) else query.shape[2] for size in longest]
        note = Note(is_causal, _own_sides(extras, is_causal), key.shape[2], 0, None)
        attention_mask = None
        pattern = _chosen(module, *lengths)
    else:
        pattern = _chosen(module, query.shape[2], key.shape[2])

    bound: Layer | None = getattr(module, "_sparse_attn", None)
    layer = None if bound is None else bound.number

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pattern: Pattern,
        *,
        attn_mask: torch.Tensor | None = None,
        **common: Any,
    ) -> torch.Tensor:
        if flattened:
            joined = _joined(pattern, note)
            if joined is None:
                window = f"{extras['sliding_window']} in a flattened batch beside {pattern}"
                raise layer_error(module, "sliding_window", window)
            common["is_causal"] = is_causal
            return attend_flattened(query, key, value, joined, extras, common)
        placed = _placed(module, query, key, pattern, attn_mask, note, is_causal)
        pattern, common = placed[0], common | placed[1]
        return attend_in(layer, query, key, value, pattern, **common)

    common: dict[str, Any] = {
        "attn_mask": attention_mask,
        "scale": scaling,
        "softcap": softcap or 0.0,
        "sink_logits": s_aux,
    }
    try:
        if isinstance(pattern, ByHead):
            out = attend_by_head(pattern, query, key, value, common, attend, not flattened)
        else:
            out = attend(query, key, value, pattern, **common)
    except (ValueError, NotImplementedError) as error:
        if str(error).startswith("sparse_attn: "):  # names its layer already
            raise
        advice = "give the layer another pattern, or load the model with its own attention"
        if query.dtype == torch.float64:
            advice = "no pattern changes that: call model.float()"
        raise type(error)(f"sparse_attn: {place(module)}: {error}; {advice}") from error
    return out.transpose(1, 2), None


def _own_sides(extras: dict[str, Any], is_causal: bool) -> tuple[int | None, int | None]:
    """Return the sides of the model's own window, which a flattened batch names in the call."""
    window = extras.get("sliding_window")
    left = None if window is None else window - 1
    return left, 0 if is_causal else left


def _placed(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    pattern: Pattern,
    mask: torch.Tensor | None,
    note: Note | None,
    is_causal: bool,
) -> tuple[Pattern, dict[str, Any]]:
    """Join pattern and mask: the pattern of the op, and the arguments that place it."""
    if is_causal and isinstance(pattern, Band) and pattern.window[0] is None:  # type: ignore[index]
        pattern = Full()  # the causal cut says it all
    origin = _origin(module, pattern, mask, note, query, key)
    if isinstance(origin, torch.Tensor) and mask is not None and _scattered(pattern):
        # The op's index tensors are key positions, alike for all texts.
        mask = narrowed_mask(mask, pattern, origin, is_causal, key.shape[2])
        pattern, note, origin = Full(), None, None
    narrowed = _joined(pattern, note)
    if narrowed is not None:
        pattern, mask = narrowed, None
    placing: dict[str, Any] = {"is_causal": is_causal}
    if mask is not None:
        placing = _masked(module, mask, query, key, pattern, is_causal)
    return pattern, placing if origin is None else placing | {"key_origin": origin}


def warn_of_weights(module: nn.Module, extras: dict[str, Any]) -> None:
    """Warn once where weights are asked for, which are never made."""
    config = getattr(module, "config", None)
    if extras.get("output_attentions", getattr(config, "output_attentions", False)):
        warn_once(
            "output_attentions",
            "sparse_attn makes no attention weights: output_attentions=True gives none; load the "
            "model with attn_implementation='eager' to see them",
        )


def _brief(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return f"tensor of shape {tuple(value.shape)}"
    return value if isinstance(value, (bool, int, float, str)) else type(value).__name__


def _chosen(module: nn.Module, seq_q: int, seq_kv: int) -> Pattern:
    """Return the policy's pattern, ``Full`` without policy."""
    layer: Layer | None = getattr(module, "_sparse_attn", None)
    if layer is None:
        return Full()
    return layer.policy.choose(layer.number, seq_q, seq_kv)


def _scattered(pattern: Pattern) -> bool:
    """Whether a pattern holds an index tensor of global tokens."""
    return isinstance(pattern, Band) and isinstance(pattern.global_tokens, torch.Tensor)


def _origin(
    module: nn.Module,
    pattern: Pattern,
    mask: torch.Tensor | None,
    note: Note | None,
    query: torch.Tensor,
    key: torch.Tensor,
) -> torch.Tensor | None:
    """Return the key of each text's first token for patterns that count from it, else None."""
    name = type(pattern).__name__
    if note is not None and note.dropped and isinstance(pattern._region, (BlockSparse, BlockTopK)):
        advice = "list the layer in the policy's dense_layers"
        if query.shape[2] == 1:
            advice = "give the policy decode=Full(), or list the layer in its dense_layers"
        raise layer_error(
            module,
            "pattern",
            f"{name} in a sliding cache that has dropped {note.dropped} keys",
            advice,
        )
    by_blocks = isinstance(pattern._region, BlockSparse)  # of key positions, whatever they hold
    if not by_blocks and not counts_from_origin(pattern):
        return None
    if not has_origin(module, note, query.shape[2], key.shape[2]):
        raise layer_error(
            module,
            "pattern",
            f"{name} with a mask that does not say which keys the sliding cache has dropped",
            "leave the mask to the model and do not compile it (generate: disable_compile=True), "
            "or list the layer in the policy's dense_layers",
        )
    return None if by_blocks else origin_of(note, mask, query.shape[0])


def _joined(pattern: Pattern, note: Note | None) -> Pattern | None:
    """Return the pattern inside the model's own window as one pattern; None when none is that."""
    if note is None or note.sides is None:
        return None
    left, right = note.sides
    if left is None:
        return pattern  # all keys, or all up to the row's own: the causal flag says it
    if isinstance(pattern, Full):
        return Band(note.sides)
    if not isinstance(pattern, Band) or pattern.sinks or pattern.global_tokens is not None:
        return None
    own_left, own_right = pattern.window  # type: ignore[misc]
    return Band((_narrower(left, own_left), _narrower(right, own_right)))


def _narrower(side: int | None, other: int | None) -> int | None:
    return other if side is None else side if other is None else min(side, other)


def _masked(
    module: nn.Module,
    mask: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    pattern: Pattern,
    is_causal: bool,
) -> dict[str, Any]:
    """Turn a mask into arguments of the ops. The mask holds causality, so the flag stays off."""
    batch, _, seq_q, _ = query.shape
    common: dict[str, Any] = {}
    if is_intervals(mask):
        common["key_bounds"] = mask.expand(batch, -1, -1, -1)
    elif mask.dim() == 4 and (mask.dtype == torch.bool or mask.is_floating_point()):
        common["attn_mask"] = mask
    else:
        got = f"{mask.dtype} of shape {tuple(mask.shape)}"
        raise layer_error(module, "attention_mask", got)
    placed = isinstance(pattern._region, (Band, BlockTopK, Dilated, Strided))
    if placed and is_causal and seq_q < key.shape[2]:
        common["query_offset"] = query_positions(mask, batch, seq_q)
    if isinstance(pattern._region, BlockTopK):
        common["is_causal"] = is_causal
    return common
