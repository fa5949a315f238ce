"""The mask function: which keys a row of a call may see, as one interval a row.

For causal or full attention, with or without a window, under left or right padding, the allowed
keys of a row are one run. ``attention_mask`` returns it as int32 (B, 1, Sq, 2) = [lo, hi), which is
4-D as transformers expects of a finished mask and goes to the ops as ``key_bounds``. All else
(holes in the padding, packed sequences, chunks, overlays) becomes a dense mask. It never
returns None: the mask alone holds the model's window and causality, which flags of modules do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.functional import pad
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    is_tracing,
    sdpa_mask,
)

from .._checks import refuse
from .._origins import first_tokens
from ._model_source import calls_attention, reads_mask, refuse_model

__all__ = [
    "Note",
    "attention_mask",
    "hidden_by_number",
    "in_graph",
    "is_intervals",
    "missing_keys",
    "note_of",
    "padding_arguments",
    "stretched_mask",
]

_NOTE = "_sparse_attn_note"
#: MarkupLM hides padding by -10000, which is -9984 in bfloat16.
_HIDES = -9000.0


class Note(NamedTuple):
    """What a mask is, written on it beside its values.

    The values are the model's whole mask without it (a copy of the mask loses it, a compiled graph
    does not see it). It spares the ops to read them, and says where each text begins.
    """

    causal: bool | None  # None: a dense mask of a function that does not say it
    sides: tuple[int | None, int | None] | None  # set: nothing but this window, queries at the end
    kv_length: int
    dropped: int  # keys that a sliding cache has dropped
    origin: torch.Tensor | None  # int32 (B,): key of each text's first token; None: key 0 in all
    packed: bool  # several texts in a row, told apart by their positions
    position: int | torch.Tensor | None = None  # key index of query 0 where that is causal
    inside: tuple[int | None, int | None] | None = None  # set: a window, and that of each text


class _Band(NamedTuple):
    """What a mask function says when it is a plain band."""

    causal: bool
    window: int | None  # causal: keys with the query's own; else distance to either side

    def sides(self) -> tuple[int | None, int | None]:
        """Return the window's sides (left, right), None without a limit."""
        if self.causal:
            return (None if self.window is None else self.window - 1), 0
        return self.window, self.window


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    config: Any = None,
    **extras: Any,
) -> torch.Tensor:
    """Return the keys that the queries of a call may see.

    Parameters
    ----------
    batch_size, q_length, kv_length : int
        Sizes of the call.
    q_offset, kv_offset : int
        Position of the first query and of the first key; a 0-dim tensor for static caches.
    mask_function : callable
        transformers' description of the mask.
    attention_mask : Tensor, optional
        bool (B, positions), true for tokens, false for padding.
    use_vmap, device, dtype, config, extras
        As transformers passes them.

    Returns
    -------
    Tensor
        int32 (B, 1, Sq, 2), intervals of keys; bool (B, 1, Sq, Skv), true where to attend, when no
        interval says it; additive, as eager attention has it, for models that compute with it.

    Raises
    ------
    ValueError
        A model that does not call attention functions, such as Longformer; a mask of another rank
        or batch, or of no positions.
    """
    if attention_mask is not None:
        attention_mask = _checked_tokens(attention_mask, batch_size)
    call: dict[str, Any] = dict(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        use_vmap=use_vmap,
        device=device,
    )
    compiling = in_graph()
    dense = Note(None, None, kv_length, kv_offset, None, False)
    if not compiling:
        inside = None if use_vmap else _recognised(_inside_texts(mask_function), compiling)
        origin = _origin(attention_mask, batch_size, kv_offset, device)
        dense = dense._replace(origin=origin, packed=_tells_texts_apart(mask_function))
        dense = dense._replace(inside=None if inside is None else inside.sides())
        if _starts_causal(mask_function):
            dense = dense._replace(causal=True, position=q_offset - kv_offset)
    if config is not None:
        if not calls_attention(type(config)):
            raise refuse_model(type(config).__name__.removesuffix("Config"))
        if reads_mask(type(config)):
            return _noted(eager_mask(**call, dtype=dtype), dense)
    band = None if use_vmap else _recognised(mask_function, compiling)
    run = _token_run(attention_mask, kv_length, kv_offset) if band is not None else None
    # Of one key the dense mask is as small, and stretches over more keys as in models whose cache
    # does not count them (MiniMax).
    if band is None or run is None or kv_length == 1:
        mask = sdpa_mask(**call, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        return _noted(mask, dense)
    position = torch.arange(q_length, device=device) + (q_offset - kv_offset)
    mask = _intervals(band, position, run, batch_size, kv_length)
    at_end = not isinstance(q_offset, torch.Tensor) and (
        q_offset + q_length == kv_offset + kv_length
    )
    plain = run.whole and (at_end or band.sides() == (None, None))
    return _noted(mask, dense._replace(causal=band.causal, sides=band.sides() if plain else None))


def in_graph() -> bool:
    """Whether a graph is made of the call, which must hold for other padding than the example's."""
    tracing = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return tracing or get_proxy_mode() is not None  # make_fx


def _checked_tokens(tokens: torch.Tensor, batch: int) -> torch.Tensor:
    """Return tokens and padding of each text, of one row for all texts too; refuse other shapes."""
    owner, got = "integrations.transformers", f"shape {tuple(tokens.shape)}"
    if tokens.dim() != 2:
        what = "attention_mask of shape (batch, positions) or (batch, 1 or heads, queries, keys)"
        raise refuse(owner, what, got)
    if tokens.shape[0] != 1 and tokens.shape[0] != batch:  # sizes of a graph are in no tuple
        raise refuse(owner, f"attention_mask of {batch} rows, one for each text", got)
    if not tokens.shape[1]:
        raise refuse(owner, "attention_mask of at least one position", got)
    return tokens.expand(batch, -1)


def _noted(mask: torch.Tensor, note: Note) -> torch.Tensor:
    if not in_graph():
        setattr(mask, _NOTE, note)
    return mask


def _origin(
    tokens: torch.Tensor | None, batch: int, dropped: int, device: torch.device | str
) -> torch.Tensor | None:
    """Find the key of each text's first token; before key 0 where a cache has dropped it."""
    if tokens is None:
        kind: dict[str, Any] = {"dtype": torch.int32, "device": device}
        return torch.full((batch,), -dropped, **kind) if dropped else None
    return (first_tokens(tokens.bool()) - dropped).to(torch.int32)


def is_intervals(mask: torch.Tensor) -> bool:
    """Whether `mask` holds an interval for each row."""
    return mask.dtype == torch.int32 and mask.dim() == 4 and mask.shape[-1] == 2


def note_of(mask: torch.Tensor | None, kv_length: int) -> Note | None:
    """Return the note on a mask of `kv_length` keys, when it has one."""
    if mask is None or in_graph():
        return None
    note: Note | None = getattr(mask, _NOTE, None)
    return note if note is not None and note.kv_length == kv_length else None


def stretched_mask(mask: torch.Tensor | None, kv_length: int) -> torch.Tensor | None:
    """Stretch a dense mask of one key over the keys of a call, as the sum with scores does."""
    if mask is None or mask.dim() != 4 or mask.shape[-1] != 1 or kv_length < 2:
        return mask
    return mask.expand(-1, -1, -1, kv_length)


def hidden_by_number(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return a mask of padding with -inf where a number hides a key, which choices ignore."""
    if mask is None or not mask.is_floating_point() or mask.dim() != 4:
        return mask
    return mask.masked_fill(mask <= _HIDES, -torch.inf) if mask.shape[1:3] == (1, 1) else mask


def missing_keys(mask: torch.Tensor | None, kv_length: int) -> int:
    """Return how many keys of a call its mask does not know of; 0 where it does not say it."""
    if mask is None or mask.dim() != 4:
        return 0
    known = mask.shape[-1]
    if is_intervals(mask):
        note: Note | None = getattr(mask, _NOTE, None)
        known = kv_length if note is None else note.kv_length
    return max(kv_length - known, 0)


def padding_arguments(tokens: torch.Tensor, seq_q: int) -> dict[str, Any]:
    """Say which keys are tokens, bool (B, Skv), to the ops: as bounds, or as a mask for holes."""
    batch, kv_length = tokens.shape
    run = _token_run(tokens, kv_length, 0)
    if run is None:
        return {"attn_mask": tokens[:, None, None, :]}
    if run.whole:
        return {}
    position = torch.arange(seq_q, device=tokens.device)
    return {"key_bounds": _intervals(_Band(False, None), position, run, batch, kv_length)}


def _recognised(function: Callable[..., Any], compiling: bool) -> _Band | None:
    """Read a mask function that is a plain band; None for all others."""
    if function is causal_mask_function:
        return _Band(True, None)
    if function is bidirectional_mask_function:
        return _Band(False, None)
    # Windows are closures: and_masks of an overlay and a base. Dynamo cannot look into them.
    parts = () if compiling else _parts(function)
    if len(parts) != 2:
        return None
    overlay, base = parts
    name = _maker(overlay)
    known = {
        "sliding_window_overlay": causal_mask_function,
        "sliding_window_bidirectional_overlay": bidirectional_mask_function,
    }
    window = _free_variable(overlay, "sliding_window")
    if name not in known or base is not known[name] or not isinstance(window, int):
        return None
    return _Band(base is causal_mask_function, window)


def _tells_texts_apart(function: Callable[..., Any]) -> bool:
    """Whether a mask function keeps packed texts apart, which it knows by their positions."""
    name = _maker(function)
    return name == "packed_sequence_mask_function" or any(map(_tells_texts_apart, _parts(function)))


def _inside_texts(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what a mask function says inside of texts where it keeps them apart, else itself."""
    parts = _parts(function)
    if len(parts) != 2 or _maker(parts[1]) != "packed_sequence_mask_function":
        return function
    moved = _maker(parts[0]) == "remap_positions_for_packed_sequence"
    inside: Callable[..., Any] = _free_variable(parts[0], "mask_function") if moved else parts[0]
    return inside


def _maker(function: Callable[..., Any]) -> str:
    """Name the function of transformers that made a mask function."""
    return getattr(function, "__qualname__", "").split(".")[0]


def _starts_causal(function: Callable[..., Any]) -> bool:
    """Whether a mask function begins with the causal one, whatever it adds or takes away."""
    return function is causal_mask_function or any(
        map(_starts_causal, _parts(function) or _parts(function, "or_mask"))
    )


def _parts(function: Callable[..., Any], joined: str = "and_mask") -> tuple[Any, ...]:
    """Return what and_masks, or or_masks, has put together; nothing of other functions."""
    if getattr(function, "__qualname__", "") != f"{joined}s.<locals>.{joined}":
        return ()
    parts = _free_variable(function, "mask_functions")
    return parts if isinstance(parts, tuple) else ()


def _free_variable(function: Callable[..., Any], name: str) -> Any:
    names = function.__code__.co_freevars
    if name not in names or function.__closure__ is None:
        return None
    return function.__closure__[names.index(name)].cell_contents


class _Run(NamedTuple):
    """The run of tokens in each text of the batch."""

    first: torch.Tensor | int  # (B, 1)
    end: torch.Tensor | int  # (B, 1)
    whole: bool  # all keys


def _token_run(tokens: torch.Tensor | None, kv_length: int, kv_offset: int) -> _Run | None:
    """Find the run of tokens; None where there are holes, or values cannot be read."""
    if tokens is None:
        return _Run(0, kv_length, True)
    if in_graph() or is_tracing(tokens):  # or a stream is captured, which waits for nothing
        return None
    tokens = tokens[:, kv_offset : kv_offset + kv_length]
    tokens = pad(tokens, (0, kv_length - tokens.shape[1]))
    count = tokens.sum(-1, keepdim=True, dtype=torch.int32)
    index = torch.arange(kv_length, device=tokens.device, dtype=torch.int32)
    first = torch.where(tokens, index, kv_length).amin(-1, keepdim=True)
    end = torch.where(tokens, index + 1, 0).amax(-1, keepdim=True)
    holes = ((count > 0) & (end - first != count)).any()
    has_holes, whole = torch.stack([holes, (count == kv_length).all()]).tolist()
    return None if has_holes else _Run(first, end, whole)


def _intervals(
    band: _Band, position: torch.Tensor, run: _Run, batch: int, kv_length: int
) -> torch.Tensor:
    """Write the intervals, int32 (B, 1, Sq, 2); `position` (Sq,) counts from the first key."""
    left, right = band.sides()
    low = position - left if left is not None else torch.zeros_like(position)
    high = position + right + 1 if right is not None else torch.full_like(position, kv_length)
    low = low.clamp(min=run.first) if isinstance(run.first, int) else torch.maximum(low, run.first)
    high = high.clamp(max=run.end) if isinstance(run.end, int) else torch.minimum(high, run.end)
    rows = torch.stack([low.clamp(min=0), high], dim=-1).to(torch.int32)  # (B|1, Sq, 2)
    return rows.expand(batch, -1, -1)[:, None].contiguous()
