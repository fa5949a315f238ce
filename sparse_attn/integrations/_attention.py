"""The attention function: transformers' call as a call of ``sparse_attention``.

The mask says what the model allows (intervals or a dense mask; where a model makes none, the causal
flag does); a policy bound to the module narrows it. What the call carries and the ops do not honour
is refused by name, with the layer. Called by models through ``AttentionInterface`` and by the
modules for BigBird.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .._head_calls import attend_by_head
from .._module_names import ask_about_keys, ask_about_sides
from .._observe import attend_in
from ..by_head import ByHead
from ..patterns import Full, Pattern
from ._flattened import FLATTENED, attend_flattened, is_flattened, longest_of, window_of
from ._layer import layer_error, layer_of, place, warn_of_weights
from ._masks import hidden_by_number, is_intervals, missing_keys, note_of, stretched_mask
from ._model_source import reads_flag, takes_cache
from ._placing import joined, placed, without_cut

__all__ = ["attention"]

#: Arguments of the call that change nothing here: the mask holds what they say, or they are notes
#: for other parts of the model.
_HARMLESS = frozenset(
    {
        "cache_position",
        "deterministic",
        "do_sample",  # what Kosmos-2's `generate` hands on to its vision tower
        "encoder_hidden_states",
        "image_sizes",  # this, labels and logits_to_keep: what heads hand on to their text model
        "labels",
        "logits_to_keep",
        "max_new_tokens",
        "mm_token_type_ids",
        "num_beams",
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

#: Arguments of the ops that are the call's own, and what the call names them.
_CALLED = {
    "attn_mask": "attention_mask",
    "cu_seq_q": "cu_seq_lens_q",
    "cu_seq_k": "cu_seq_lens_k",
}


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
        A mask of too few positions; tensors that the ops refuse.
    """
    flattened = is_flattened(query, extras)
    _check(module, dropout, extras, flattened)
    warn_of_weights(module, extras)
    attention_mask = stretched_mask(attention_mask, key.shape[2])
    note = note_of(attention_mask, key.shape[2])
    if note is None:
        attention_mask = hidden_by_number(attention_mask)
    if note is not None and note.causal is not None:
        is_causal = note.causal
    elif is_causal is None:
        is_causal = _is_causal(module, attention_mask, flattened)
    if not flattened:
        _check_keys(module, attention_mask, query.shape[2], key.shape[2], bool(is_causal))
    layer = layer_of(module)

    def attend_texts(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pattern: Pattern,
        **common: Any,
    ) -> torch.Tensor:
        window = window_of(module, attention_mask, note, extras, is_causal)
        inside = joined(without_cut(pattern, bool(is_causal)), window)
        if inside is None:
            got = f"{extras.get('sliding_window', window)} in a flattened batch beside {pattern}"
            advice = "list the layer in the policy's dense_layers, or give a row for each text"
            raise layer_error(module, "sliding_window", got, advice)
        return attend_flattened(query, key, value, inside, extras, common)

    def attend_rows(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pattern: Pattern,
        attn_mask: torch.Tensor | None = None,
        **common: Any,
    ) -> torch.Tensor:
        def place(own: Pattern) -> tuple[Pattern, dict[str, Any]]:
            own, placing = placed(module, query, key, own, attn_mask, note, is_causal)
            return own, common | placing

        pattern, arguments = place(pattern)
        number = None if layer is None else layer.number
        windowed = note is not None and note.inside is not None and note.inside[0] is not None
        return attend_in(number, query, key, value, pattern, place, windowed, **arguments)

    attend: Callable[..., torch.Tensor]
    common: dict[str, Any] = {"scale": scaling, "softcap": softcap or 0.0, "sink_logits": s_aux}
    if flattened:
        attend, lengths = attend_texts, longest_of(extras, query.shape[2])
        common["is_causal"] = is_causal
    else:
        attend, lengths = attend_rows, (query.shape[2], key.shape[2])
        common["attn_mask"] = attention_mask
    pattern = Full() if layer is None else layer.policy.choose(layer.number, *lengths)
    if not is_causal and (note is None or note.causal is False):  # None: a mask that may be causal
        ask_about_keys(f"sparse_attn: {place(module)}", pattern, *lengths, "apply")
        if note is not None or attention_mask is None:  # without a note a mask may be causal
            ask_about_sides(f"sparse_attn: {place(module)}", pattern, lengths[0])
    try:
        if isinstance(pattern, ByHead):
            out = attend_by_head(pattern, query, key, value, common, attend, not flattened)
        else:
            out = attend(query, key, value, pattern, **common)
    except (ValueError, NotImplementedError) as error:
        if str(error).startswith("sparse_attn: "):  # names its layer already
            raise
        advice = _advice(error, query.dtype)
        raise type(error)(f"sparse_attn: {place(module)}: {error}; {advice}") from error
    return out.transpose(1, 2), None


def _is_causal(module: nn.Module, mask: torch.Tensor | None, flattened: bool) -> bool:
    """Whether a call is causal that does not say it, nor its mask's note."""
    # LayoutLM and MarkupLM do not say it, whose mask is their own, nor does Doge.
    default = mask is None or takes_cache(type(module))
    is_causal = bool(getattr(module, "is_causal", default))
    if mask is None:
        return is_causal and (flattened or reads_flag(type(module)))
    # Some decoders leave it to their mask (PegasusX), whose note a compiled graph does not see.
    return is_causal or bool(getattr(module, "is_decoder", False))


def _advice(error: Exception, dtype: torch.dtype) -> str:
    """Say what to do about what the ops refuse."""
    for of_op, of_call in _CALLED.items():
        if f"expected {of_op}" in str(error):
            return f"no pattern changes that: correct the call's {of_call}"
    if dtype == torch.float64:
        return "no pattern changes that: call model.float()"
    if "head_dim" in str(error):
        return "no pattern changes that: load the model with its own attention"
    return "give the layer another pattern, or load the model with its own attention"


def _check(module: nn.Module, dropout: float, extras: dict[str, Any], flattened: bool) -> None:
    """Refuse what the call carries and the ops do not honour."""
    if dropout:
        raise layer_error(module, "dropout", dropout)
    for name, extra in extras.items():
        honoured = name in _HARMLESS or (flattened and name in FLATTENED)
        if extra is not None and not honoured:
            raise layer_error(module, name, _brief(extra))


def _check_keys(
    module: nn.Module, mask: torch.Tensor | None, queries: int, keys: int, is_causal: bool
) -> None:
    """Refuse a mask of too few keys: one of a shorter text, or of a cache that does not count."""
    missing = missing_keys(mask, keys)
    if mask is None or not missing:
        return
    if is_intervals(mask) and is_causal and queries != keys:
        got = f"a mask of {keys - missing} keys for {keys}"
        raise layer_error(module, "attention_mask", got, "pass use_cache=False")
    what = f"attention_mask of {keys} positions, one for each key"
    raise ValueError(f"sparse_attn: {place(module)}: expected {what}, got {keys - missing}")


def _brief(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return f"tensor of shape {tuple(value.shape)}"
    return value if isinstance(value, (bool, int, float, str)) else type(value).__name__
