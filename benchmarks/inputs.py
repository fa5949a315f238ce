"""The tensors of a case, made once on the device from random normal numbers, and what they say.

``Inputs`` hands out block masks, the package's pattern and the number of allowed pairs;
``allowed_rows`` states which keys a row may see.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

import sparse_attn as sa

from .cases import Case
from .masks import Blocks, BlockTopK, Sketched, Spec, TopK

SEED = 20
SAMPLED_ROWS = 64


class Inputs:
    """The tensors of one shape on one device."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.device = device
        generator = torch.Generator(device).manual_seed(SEED)

        def normal(heads: int, rows: int) -> torch.Tensor:
            shape = (case.batch, heads, rows, case.head_dim)
            return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)

        kv_heads = case.kv_heads or case.heads
        query, key = normal(case.heads, case.rows), normal(kv_heads, case.length)
        if case.peaked:
            query, key = _with_positions(query, key)
        value = normal(kv_heads, case.length)
        if case.coarse:
            key, value = (tensor.to(torch.float8_e4m3fn) for tensor in (key, value))
        self.query = query.to(case.torch_dtype)
        self.key = key.to(case.torch_dtype)
        self.value = value.to(case.torch_dtype)
        self.mask: torch.Tensor | None = None
        self.used = torch.tensor(case.lengths or [case.length] * case.batch, device=device).int()
        if case.mask == "bias":
            shape = (1, 1, case.rows, case.length)
            self.mask = torch.randn(shape, generator=generator, device=device).to(case.torch_dtype)
        elif case.mask == "padding":
            low = (case.length // 3, case.length + 1)
            self.used = torch.randint(*low, (case.batch,), generator=generator, device=device).int()
            columns = torch.arange(case.length, device=device)
            self.mask = (columns < self.used[:, None])[:, None, None]
        self._masks: dict[tuple[Spec, bool], torch.Tensor] = {}
        self._sketches: dict[Spec, sa.KeySketch] = {}

    def block_mask(self, case: Case) -> torch.Tensor | None:
        """Return the block mask (1|B, Hq, NQ, NKV) of a block pattern, None for the others."""
        spec = case.spec
        if not isinstance(spec, Blocks | BlockTopK | Sketched):
            return None
        known = (spec, case.causal)
        if known not in self._masks:
            if isinstance(spec, Blocks):
                heads = (case.heads, case.kv_heads or case.heads)
                self._masks[known] = spec.block_mask(
                    heads, case.rows, case.length, case.causal, self.device, SEED
                )
            else:
                self._masks[known] = select_blocks(self, case).to_mask()
        return self._masks[known]

    def pattern(self, case: Case) -> Any:
        """Return the package's pattern, what it holds of tensors on the device."""
        spec = case.spec
        if isinstance(spec, Sketched):
            if spec not in self._sketches:
                self._sketches[spec] = sa.KeySketch(self.key, bits=spec.bits)
            return spec.pattern(self._sketches[spec])
        if isinstance(spec, Blocks):
            return spec.pattern(self.block_mask(case))
        return spec.pattern(None, self.device)

    def pairs(self, case: Case) -> int:
        """Return the allowed (query, key) pairs of all batch entries and heads."""
        mask = self.block_mask(case)
        if case.mask == "padding":
            return int(self.used.sum()) * case.rows * case.heads
        if mask is None:
            total = 0
            for batch in range(case.batch if case.lengths else 1):
                rows, keys = case.extent(batch)
                p: np.ndarray = np.arange(rows, dtype=np.int64) + keys - rows
                total += int(case.spec.counts(p, keys, case.causal).sum())
            return total * case.heads * (1 if case.lengths else case.batch)
        total = blocks_of(case.spec).pairs(mask, case.rows, case.length, case.causal)
        return total * (case.batch // mask.shape[0]) * (case.heads // mask.shape[1])

    def nbytes(self) -> int:
        """Return the bytes of the keys and values."""
        return sum(t.numel() * t.element_size() for t in (self.key, self.value))


def blocks_of(spec: Spec) -> Blocks:
    """Return the block sizes of a spec that has a block mask."""
    if isinstance(spec, BlockTopK):
        size = spec.block_size
        return Blocks(*((size, size) if isinstance(size, int) else size), 1.0)
    if isinstance(spec, Sketched):
        return Blocks(1, spec.block_kv, 1.0)
    assert isinstance(spec, Blocks)
    return spec


def select_blocks(inputs: Inputs, case: Case) -> sa.BlockLayout:
    """Return the package's choice of blocks."""
    pattern = inputs.pattern(case)
    return sa.select_blocks(inputs.query, inputs.key, pattern, is_causal=case.causal)


def sampled_rows(rows: int, device: torch.device) -> torch.Tensor:
    """Return about 64 row indices: the first, the last, and an even spread with odd steps."""
    if rows <= SAMPLED_ROWS:
        return torch.arange(rows, device=device)
    spread = torch.linspace(0, rows - 1, SAMPLED_ROWS, device=device).long()
    return spread + (torch.arange(SAMPLED_ROWS, device=device) % 2) * (spread < rows - 1)


def allowed_rows(
    case: Case, inputs: Inputs, batch: int, head: int, rows: torch.Tensor
) -> torch.Tensor:
    """Return bool (rows, Skv) of what the rows may see, top-k's choice apart."""
    queries, keys = case.extent(batch)
    p = (rows + keys - queries)[:, None]
    j = torch.arange(case.length, device=rows.device)[None]
    seen = j <= p if case.causal else torch.ones_like(j <= p)
    if case.lengths or case.mask == "padding":
        seen = seen & (j < inputs.used[batch])
    if isinstance(case.spec, TopK):
        return seen
    mask = inputs.block_mask(case)
    if mask is None:
        return seen & case.spec.allowed(p, j)
    blocks = blocks_of(case.spec)
    head = head * mask.shape[1] // case.heads
    listed = mask[batch % mask.shape[0], head, rows // blocks.block_q]
    return seen & listed[:, j[0] // blocks.block_kv]


def _with_positions(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Add what real attention has: nearness counts, and the first keys are sinks.

    Positions enter as rotating features of several wavelengths, whose products decay with the
    distance; four sink keys point along the mean direction of the queries.
    """
    dim = query.shape[-1]
    features = dim // 4
    wavelength = torch.logspace(1.0, 4.0, features // 2, device=query.device)

    def positions(rows: int, offset: int) -> torch.Tensor:
        angle = (torch.arange(rows, device=query.device) + offset)[:, None] * (
            2 * math.pi / wavelength
        )
        return torch.cat([angle.cos(), angle.sin()], -1)

    strength = math.sqrt(8.0 * math.sqrt(dim) / (features // 2))
    query, key = query.clone(), key.clone()
    rows, keys = query.shape[-2], key.shape[-2]
    query[..., :features] = strength * positions(rows, keys - rows)
    key[..., :features] = strength * positions(keys, 0)
    query[..., features] = math.sqrt(dim) / 2
    key[..., features] = 0.0
    key[..., :4, features] = 10.0
    return query, key
