"""A case is one pattern at one shape, an entry a case served by somebody, a group timed together.

Cases are data. ``Inputs`` makes the tensors of a shape once, on the device, from random normal
numbers, and hands out block masks and the number of allowed pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

import sparse_attn as sa

from .masks import Blocks, BlockTopK, Sketched, Spec

SEED = 20


@dataclass(frozen=True)
class Case:
    """One attention problem: ``query`` (batch, heads, queries, head_dim), keys alike."""

    spec: Spec
    length: int
    queries: int | None = None  # rows; None is as many as keys
    batch: int = 1
    heads: int = 16
    kv_heads: int | None = None
    head_dim: int = 128
    dtype: str = "bfloat16"
    causal: bool = False
    peaked: bool = False  # keys with positions, sinks and locality in them, not white noise
    softcap: float = 0.0
    mask: str = ""  # a tensor beside the pattern: "bias" (added) or "padding" (bool, by key)
    lengths: tuple[int, ...] = ()  # of each batch entry's keys, and queries unless ``queries`` says
    coarse: bool = False  # keys and values that 8 bits hold exactly

    @property
    def rows(self) -> int:
        """Query rows of a head."""
        return self.length if self.queries is None else self.queries

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of the inputs."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def shape(self) -> tuple[object, ...]:
        """What the inputs depend on."""
        return (
            self.length,
            self.rows,
            self.batch,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.dtype,
            self.peaked,
            self.mask,
            self.lengths,
            self.coarse,
        )

    def extent(self, batch: int) -> tuple[int, int]:
        """Rows and keys of a batch entry."""
        keys = self.lengths[batch] if self.lengths else self.length
        return keys if self.queries is None else self.queries, keys

    @property
    def label(self) -> str:
        """The case in words."""
        heads = str(self.heads) if self.kv_heads is None else f"{self.heads}/{self.kv_heads}"
        size = f"{self.rows}x{self.length}" if self.queries is not None else _kilo(self.length)
        if self.lengths:
            size = f"{min(self.lengths)} to {max(self.lengths)}"
        causal = " causal" if self.causal else ""
        causal += f", softcap {self.softcap:g}" if self.softcap else ""
        causal += f", {self.mask}" if self.mask else ""
        return (
            f"{self.spec.label}{causal}, {size}, batch {self.batch}, {heads} heads of "
            f"{self.head_dim}, {self.dtype}"
        )


@dataclass(frozen=True)
class Entry:
    """A contestant: ``via`` names who computes the case (see peers.py)."""

    name: str
    case: Case
    via: str = "ours"


@dataclass(frozen=True)
class Group:
    """Entries that are timed in the same shuffled rounds, and may be compared."""

    name: str
    entries: tuple[Entry, ...]
    sweep: str = ""  # a curve of the report that this group is a point of
    x: float = 0.0  # where on it
    flops_ceiling: bool = True  # shares are of the matrix product; else of the memory's read rate
    methods: tuple[str, ...] = ("single",)  # of timing; the first one's figures stand in the tables


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


def _kilo(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def tiny(group: Group) -> Group:
    """Return the group with every case small: shows on a CPU in seconds that it runs."""
    return replace(group, entries=tuple(replace(e, case=_tiny(e.case)) for e in group.entries))


def _tiny(case: Case) -> Case:
    shared = case.heads // (case.kv_heads or case.heads)
    heads = max(1, min(4, case.heads) // shared)
    lengths = tuple(min(length, 40 + 8 * i) for i, length in enumerate(case.lengths[-3:]))
    return replace(
        case,
        length=max(lengths) if lengths else min(case.length, 384),
        queries=None if case.queries is None else min(case.queries, 32),
        batch=len(lengths) or min(case.batch, 2),
        heads=heads * shared,
        kv_heads=None if case.kv_heads is None else heads,
        lengths=lengths,
    )
