"""The same keys and values in other places: pages, one tensor for both, packed sequences, 8 bits.

Each function returns the call and how its result is laid out as (B, Hq, Sq, D), so that one
reference judges all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import sparse_attn as sa

from .cases import Case
from .contender import Contender
from .inputs import SEED, Inputs

SCALE = 0.5  # of 8-bit keys and values: a power of two, so that codes hold them exactly


def _paged(case: Case, inputs: Inputs, page_size: int) -> Contender:
    """Lay keys and values in pages, shuffled."""
    table, pages = _table(case, inputs, page_size)
    caches = [_into_pages(t, table, pages, page_size) for t in (inputs.key, inputs.value)]
    return _attend_pages(case, inputs, caches, table)


def _joined_pages(case: Case, inputs: Inputs, page_size: int) -> Contender:
    """Lay keys and values side by side in one tensor of pages: two views of it."""
    table, pages = _table(case, inputs, page_size)
    both = _into_pages(torch.cat([inputs.key, inputs.value], -1), table, pages, page_size)
    return _attend_pages(case, inputs, both.chunk(2, -1), table)


def _joined(case: Case, inputs: Inputs, _: int) -> Contender:
    """Lay keys and values side by side in one tensor: a token is 2 D numbers after the last."""
    return _attend(case, inputs, *torch.cat([inputs.key, inputs.value], -1).chunk(2, -1))


def _coarse(case: Case, inputs: Inputs, page_size: int) -> Contender:
    """Hold keys and values in 8 bits, in pages where a size is given."""
    assert case.coarse
    key, value = ((t / SCALE).to(torch.float8_e4m3fn) for t in (inputs.key, inputs.value))
    scale = torch.full((key.shape[1],), SCALE, device=inputs.device)
    scales = {"key_scale": scale, "value_scale": scale}
    if page_size:
        table, pages = _table(case, inputs, page_size)
        caches = [_into_pages(t, table, pages, page_size) for t in (key, value)]
        return _attend_pages(case, inputs, caches, table, **scales)
    return _attend(case, inputs, key, value, **scales)


def _packed(case: Case, inputs: Inputs, _: int) -> Contender:
    """Lay the sequences one after the other, no padding between them."""
    extents = [case.extent(batch) for batch in range(case.batch)]
    rows, keys = ([extent[side] for extent in extents] for side in (0, 1))
    tensors = _pack(inputs.query, rows), _pack(inputs.key, keys), _pack(inputs.value, keys)
    placing = {
        "cu_seq_q": _starts(rows, inputs.device),
        "cu_seq_k": _starts(keys, inputs.device),
        "max_q": max(rows),
        "max_k": max(keys),
    }
    made = _made(sa.varlen_attention, tensors, placing, inputs.pattern(case), case)

    def arrange(out: torch.Tensor) -> torch.Tensor:
        parts = [part.transpose(0, 1) for part in out.split(rows)]
        padded = out.new_zeros(case.batch, case.heads, max(rows), case.head_dim)
        for whole, part in zip(padded, parts, strict=True):
            whole[:, : part.shape[1]] = part
        return padded

    return replace(made, arrange=arrange)


def _attend(
    case: Case, inputs: Inputs, key: torch.Tensor, value: torch.Tensor, **scales: Any
) -> Contender:
    call = (inputs.query, key, value, inputs.pattern(case))
    served = sa.can_use(*call, is_causal=case.causal, **scales)
    attend = partial(sa.sparse_attention, *call, is_causal=case.causal, **scales)
    return Contender(attend, engine=str(served.engine))


def _attend_pages(
    case: Case,
    inputs: Inputs,
    caches: Sequence[torch.Tensor],
    table: torch.Tensor,
    **scales: torch.Tensor,
) -> Contender:
    tensors = (inputs.query, *caches)
    placing = {"block_table": table, "seqused_k": inputs.used}
    pattern = inputs.pattern(case)
    return _made(sa.paged_attention, tensors, placing, pattern, case, **scales)


def _made(
    attend: Callable[..., torch.Tensor],
    tensors: tuple[torch.Tensor, ...],
    placing: dict[str, Any],
    pattern: sa.Pattern,
    case: Case,
    **scales: torch.Tensor,
) -> Contender:
    """Return a call on packed or paged sequences, and its engine."""
    given: dict[str, Any] = {"pattern": pattern, **placing, "is_causal": case.causal, **scales}
    query, key, value = tensors
    served = sa.can_use(query, key, value, **given)
    return Contender(partial(attend, *tensors, **given), engine=str(served.engine))


def _table(case: Case, inputs: Inputs, page_size: int) -> tuple[torch.Tensor, int]:
    """Return a table (B, pages of a sequence) of shuffled pages, and how many there are."""
    columns = -(-case.length // page_size)
    pages = case.batch * columns
    generator = torch.Generator(inputs.device).manual_seed(SEED)
    shuffled = torch.randperm(pages, generator=generator, device=inputs.device)
    return shuffled.int().view(case.batch, columns), pages


def _into_pages(
    tensor: torch.Tensor, table: torch.Tensor, pages: int, page_size: int
) -> torch.Tensor:
    """Return (pages, page_size, Hkv, D) with the rows of (B, Hkv, S, D) where the table says."""
    batch, heads, length, dim = tensor.shape
    columns = table.shape[1]
    padded = tensor.new_zeros(batch, columns * page_size, heads, dim)
    padded[:, :length] = tensor.transpose(1, 2)
    cache = torch.empty(pages, page_size, heads, dim, dtype=tensor.dtype, device=tensor.device)
    cache[table.flatten().long()] = padded.view(-1, page_size, heads, dim)
    return cache


def _pack(tensor: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Return (T, H, D) of (B, H, S, D)."""
    return torch.cat([t[:, :n].transpose(0, 1) for t, n in zip(tensor, lengths, strict=True)])


def _starts(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


STORED: dict[str, Callable[[Case, Inputs, int], Contender]] = {
    "paged": _paged,
    "joined": _joined,
    "joined pages": _joined_pages,
    "8 bits": _coarse,
    "packed": _packed,
}
