"""The tensors of a case, made once on the device from random normal numbers, and what they say.

``Inputs`` hands out block masks, the package's pattern and the number of allowed pairs;
``allowed_rows`` states which keys a row may see.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import sparse_attn as sa

from .cases import Case
from .masks import Blocks, BlockTopK, Sketched, Spec, TopK

SEED = 20
SAMPLED_ROWS = 64
HIDING = ("mask", "padding", "bounds", "left padding", "offset")  # options


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
        tensors = (tensor.to(case.torch_dtype) for tensor in (query, key, value))
        self.query, self.key, self.value = _laid_out(case.layout, *tensors)
        extents = torch.tensor([case.extent(batch) for batch in range(case.batch)], device=device)
        rows, self.used = extents.int().T.contiguous()  # keys of an entry end before used
        self.first = torch.zeros_like(rows)  # and begin here
        self.offset = self.used - rows  # the position of an entry's first query
        self.extras: dict[str, torch.Tensor] = {}  # the option's arguments of the package
        self._give(case, generator)
        self._masks: dict[tuple[Spec, bool, float], torch.Tensor] = {}
        self._sketches: dict[Spec, sa.KeySketch] = {}

    def _give(self, case: Case, generator: torch.Generator) -> None:
        """Make the tensors of the case's option."""
        on: dict[str, Any] = {"generator": generator, "device": self.device}
        option, pairs, extras = case.option, (case.rows, case.length), self.extras

        def each(low: int, high: int) -> torch.Tensor:
            return torch.randint(low, high + 1, (case.batch,), **on).int()

        if option in ("bias", "head bias"):
            heads = 1 if option == "bias" else case.heads
            extras["attn_mask"] = torch.randn((1, heads, *pairs), **on).to(case.torch_dtype)
        elif option == "mask":
            extras["attn_mask"] = torch.rand((1, 1, *pairs), **on) < 0.7
        elif option in ("padding", "bounds"):
            self.used = each(case.length // 3, case.length)
        elif option == "left padding":
            self.first = each(0, case.length // 2)
            extras["key_origin"] = self.first
        elif option == "offset":
            self.offset = each(0, case.length - case.rows)
            extras["query_offset"] = self.offset
        elif option == "alibi":
            extras["alibi_slopes"] = torch.rand(case.heads, **on)
        elif option == "sink logits":
            extras["sink_logits"] = torch.randn(case.heads, **on)
        if option == "padding":
            columns = torch.arange(case.length, device=self.device)
            extras["attn_mask"] = (columns < self.used[:, None])[:, None, None]
        elif option in ("bounds", "left padding"):
            bounds = torch.stack([self.first, self.used], -1)[:, None, None]
            extras["key_bounds"] = bounds.expand(-1, 1, case.rows, 2)

    def block_mask(self, case: Case) -> torch.Tensor | None:
        """Return the block mask (1|B, Hq, NQ, NKV) of a block pattern, None for the others."""
        spec = case.spec
        if not isinstance(spec, Blocks | BlockTopK | Sketched):
            return None
        known = (spec, case.causal, case.softcap)
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
        """Return the allowed (query, key) pairs of all batch entries and heads.

        With an option that hides keys this follows from sampled rows of the first and last heads.
        """
        mask = self.block_mask(case)
        if case.option in HIDING:
            sample = sampled_rows(case.rows, self.device)
            most = case.spec.k if isinstance(case.spec, TopK) else case.length
            found = sum(
                allowed_rows(case, self, batch, head, sample).sum(-1).clamp(max=most).sum().item()
                for batch in range(case.batch)
                for head in (0, case.heads - 1)
            )
            return round(found / 2 * case.heads * case.rows / len(sample))
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
    placing: dict[str, Any] = {"is_causal": case.causal, "softcap": case.softcap}
    names = ("key_bounds", "query_offset", "key_origin")
    placing |= {name: inputs.extras[name] for name in names if name in inputs.extras}
    return sa.select_blocks(inputs.query, inputs.key, inputs.pattern(case), **placing)


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
    p = (rows + inputs.offset[batch])[:, None]
    j = torch.arange(case.length, device=rows.device)[None]
    first = inputs.first[batch]
    seen = (first <= j) & (j < inputs.used[batch]) & (not case.causal or j <= p)
    seen = seen.expand(len(rows), -1)
    if case.option == "mask":
        seen = seen & inputs.extras["attn_mask"][0, 0, rows]
    if isinstance(case.spec, TopK):
        return seen
    mask = inputs.block_mask(case)
    if mask is None:
        return seen & case.spec.allowed(p - first, j - first)
    blocks = blocks_of(case.spec)
    head = head * mask.shape[1] // case.heads
    listed = mask[batch % mask.shape[0], head, rows // blocks.block_q]
    return seen & listed[:, j[0] // blocks.block_kv]


def _laid_out(layout: str, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return (B, H, S, D) as views of memory in another order."""
    if layout == "bhsd":
        return tensors
    rows = [tensor.transpose(1, 2) for tensor in tensors]
    if layout == "bshd":
        rows = [tensor.contiguous() for tensor in rows]
    else:
        rows = list(torch.cat(rows, 2).split([tensor.shape[2] for tensor in rows], 2))
    return [tensor.transpose(1, 2) for tensor in rows]


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
