"""A case is one pattern at one shape, an entry a case served by somebody, a group timed together.

Cases are data; inputs.py makes their tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .masks import Spec

TINY_LENGTH = 384  # the most keys of a small case
OPTIONS = {
    "bias": "an additive mask, the same for all heads",
    "head bias": "an additive mask for each head",
    "mask": "a random boolean mask of seven pairs in ten",
    "padding": "a boolean mask by key: each sequence ends early",
    "bounds": "the same ends as an interval of keys",
    "left padding": "each sequence begins late, and so do its sinks: an interval and an origin",
    "offset": "positions of the first query, a tensor",
    "alibi": "slopes by head",
    "sink logits": "a logit of each head in the softmax's denominator",
}
LAYOUTS = {
    "bhsd": "a head's rows side by side",
    "bshd": "a row's heads side by side",
    "qkv": "a row's heads of query, key and value side by side, as one projection writes them",
}


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
    option: str = ""  # one more argument of the call, see OPTIONS
    lengths: tuple[int, ...] = ()  # of each batch entry's keys, and queries unless ``queries`` says
    coarse: bool = False  # keys and values that 8 bits hold exactly
    layout: str = "bhsd"  # of the tensors in memory, see LAYOUTS

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
            self.option,
            self.lengths,
            self.coarse,
            self.layout,
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
        causal += f", {self.option}" if self.option else ""
        return (
            f"{self.spec.label}{causal}, {size}, batch {self.batch}, {heads} heads of "
            f"{self.head_dim}, {self.dtype}" + f", {self.layout}" * (self.layout != "bhsd")
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


def _kilo(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def tiny(group: Group) -> Group:
    """Return the group with every case small: shows on a CPU in seconds that it runs."""
    entries = tuple(replace(e, case=_tiny(e.case)) for e in group.entries)
    return replace(group, entries=entries, x=min(group.x, TINY_LENGTH))


def _tiny(case: Case) -> Case:
    shared = case.heads // (case.kv_heads or case.heads)
    heads = max(1, min(4, case.heads) // shared)
    lengths = tuple(min(length, 40 + 8 * i) for i, length in enumerate(case.lengths[-3:]))
    return replace(
        case,
        length=max(lengths) if lengths else min(case.length, TINY_LENGTH),
        queries=None if case.queries is None else min(case.queries, 32),
        batch=len(lengths) or min(case.batch, 2),
        heads=heads * shared,
        kv_heads=None if case.kv_heads is None else heads,
        lengths=lengths,
    )
