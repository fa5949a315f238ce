"""Where the queries of a call and the beginnings of its texts stand among the keys.

Windows and taps count from the query. Sinks, global tokens, strided columns and first blocks count
from a text's first token, which left padding moves to a later key and a sliding cache, that has
dropped its oldest keys, to one before key 0: the op's ``key_origin``. The mask function knows it
and writes it on its masks; elsewhere it is read off the mask itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers.masking_utils import is_tracing

from .._origins import bool_mask
from ..patterns import Pattern
from ._masks import Note, in_graph, is_intervals
from ._model_source import makes_masks, takes_cache

__all__ = [
    "has_origin",
    "has_texts_apart",
    "intervals_around",
    "narrowed_mask",
    "origin_of",
    "query_positions",
]


def has_origin(module: nn.Module, note: Note | None, seq_q: int, seq_kv: int) -> bool:
    """Whether anything says where the texts begin."""
    return note is not None or seq_q == seq_kv or not _slides(module)


def has_texts_apart(module: nn.Module, note: Note | None, mask: torch.Tensor | None) -> bool:
    """Whether a mask keeps texts of one row apart, each of which has an origin of its own.

    A mask with a note says it there. Others are read, as long as a call may wait for a GPU; in a
    graph a mask of many rows may do it that the model of an encoder has made itself.
    """
    if note is not None or mask is None or is_intervals(mask) or mask.shape[-2] == 1:
        return note is not None and note.packed
    if in_graph() or is_tracing(mask):
        return makes_masks(type(module)) and not takes_cache(type(module))
    return _falls_apart(mask)


def _falls_apart(mask: torch.Tensor) -> bool:
    """Whether keys after the first text, two of them or more, are seen by rows of their own.

    A key alone is one whose row sees itself, as rows of padding may.
    """
    first, end = intervals_around(mask)[..., None].unbind(-2)
    index = torch.arange(mask.shape[-1], device=mask.device)
    joined = ((first < index) & (index < end)).any(-2)  # each key to the one before it
    seen = bool_mask(mask).any(-2)
    begins = seen & ~joined & (seen.cumsum(-1) > 1)
    return bool((begins & pad(joined[..., 1:], (0, 1))).any())


def origin_of(note: Note | None, mask: torch.Tensor | None, batch: int) -> torch.Tensor | None:
    """Return the key of each text's first token, int32 (B,); None is key 0 in all.

    Without a note it is the first key that any row sees.
    """
    if note is not None or mask is None:
        return None if note is None else note.origin
    if is_intervals(mask):
        low, high = mask.unbind(-1)
        first = torch.where(low < high, low, high.amax()).amin((1, 2))
    else:
        first = bool_mask(mask).any(1).any(1).int().argmax(-1)
    return first.to(torch.int32).expand(batch).contiguous()


def intervals_around(mask: torch.Tensor) -> torch.Tensor:
    """Return the first and the end of what each row of a dense mask sees, int32 (..., Sq, 2)."""
    allowed = bool_mask(mask)
    seen = allowed.byte()  # argmax finds the first 1, in an eighth of the memory of indices
    end = mask.shape[-1] - seen.flip(-1).argmax(-1)
    end = torch.where(allowed.any(-1), end, 0)
    return torch.stack([seen.argmax(-1), end], dim=-1).int()


def _slides(module: nn.Module) -> bool:
    """Whether a layer's cache may drop keys, as caches read it from the configuration."""
    config: Any = getattr(module, "config", None)
    types, number = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if types is not None and number is not None:
        return types[number] != "full_attention"
    windows = ("sliding_window", "attention_chunk_size")
    return any(getattr(config, name, None) is not None for name in windows)


def narrowed_mask(
    mask: torch.Tensor,
    note: Note | None,
    pattern: Pattern,
    origin: torch.Tensor,
    is_causal: bool,
    seq_q: int,
    seq_kv: int,
) -> torch.Tensor:
    """Cut a mask, intervals or dense, to what a pattern allows at positions of the texts."""
    batch = origin.shape[0]
    row = torch.arange(seq_q, device=mask.device)[:, None]
    key = torch.arange(seq_kv, device=mask.device)
    position = row + (seq_kv - seq_q)
    if is_causal:
        position = row + query_positions(mask, note, batch, seq_q)[:, None, None, None]
    first = origin.long()[:, None, None, None]
    allowed = pattern.allows(row, position - first, key - first)
    if is_intervals(mask):
        return allowed & (mask[..., :1] <= key) & (key < mask[..., 1:])
    return mask & allowed if mask.dtype == torch.bool else mask.masked_fill(~allowed, -torch.inf)


def query_positions(mask: torch.Tensor, note: Note | None, batch: int, seq_q: int) -> torch.Tensor:
    """Key index of query 0, int32 (B,): what the note says, else read off a causal mask.

    A static cache is longer than its contents, so the lengths do not say it. A token's last key is
    its own, one past that of the row above. Rows of padding end before their own position and
    tokens of an image after theirs, all at one key: no two of these follow each other so.
    """
    if note is not None and note.position is not None:
        if isinstance(note.position, int):
            return torch.full((batch,), note.position, dtype=torch.int32, device=mask.device)
        return note.position.to(torch.int32).repeat(batch)
    if is_intervals(mask):
        last = mask[..., 1] - 1
    else:
        allowed = bool_mask(mask)
        index = torch.arange(1, mask.shape[-1] + 1, device=mask.device, dtype=torch.int32)
        last = (allowed * index).amax(-1) - 1
    row = torch.arange(seq_q, device=mask.device, dtype=torch.int32)
    first = (last - row).to(torch.int32)
    follows = pad(first[..., 1:] == first[..., :-1], (1, 0))
    none = torch.iinfo(torch.int32).min
    read = first.masked_fill(~follows, none).amax((1, 2))
    return torch.where(read == none, first.amax((1, 2)), read).expand(batch).contiguous()
