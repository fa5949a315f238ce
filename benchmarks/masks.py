"""What each benchmarked pattern allows, stated once more and apart from the package.

A spec knows the predicate "row at position p may see key j", the number of allowed keys of a row in
closed form, and how to ask the package for the pattern. The predicate feeds the reference and
FlexAttention; the count feeds TFLOP/s. The package's own masks are not used: a wrong mask there
shows here as an error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

import sparse_attn as sa

UNLIMITED = 1 << 29


@dataclass(frozen=True)
class Spec:
    """A pattern to benchmark; ``causal`` is the case's own and cuts every pattern."""

    variant: ClassVar[str] = ""

    def allowed(self, p: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        """Tell whether the row at position ``p`` may see key ``j`` (broadcast), causal apart."""
        raise NotImplementedError(f"{type(self).__name__} depends on data and has no predicate")

    def counts(self, p: np.ndarray, keys: int, causal: bool) -> np.ndarray:
        """Return the number of allowed keys for rows at positions ``p`` (0 <= p < keys)."""
        raise NotImplementedError(f"{type(self).__name__} is counted from its block mask")

    def pattern(self, mask: Any = None, device: torch.device | None = None) -> Any:
        """Return the package's pattern; ``mask`` is the case's block mask where it has one."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        """The pattern in words."""
        return self.variant


def _visible(p: np.ndarray, keys: int, causal: bool) -> np.ndarray:
    return np.minimum(p + 1, keys) if causal else np.full_like(p, keys)


@dataclass(frozen=True)
class Full(Spec):
    """Every key."""

    variant: ClassVar[str] = "fused"

    def allowed(self, p: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (j >= 0) | (p >= 0)

    def counts(self, p: np.ndarray, keys: int, causal: bool) -> np.ndarray:
        return _visible(p, keys, causal)

    def pattern(self, mask: Any = None, device: torch.device | None = None) -> Any:
        return sa.Full()

    @property
    def label(self) -> str:
        return "dense"


@dataclass(frozen=True)
class Band(Spec):
    """A window of ``left`` and ``right`` keys, with sinks and leading global tokens."""

    variant: ClassVar[str] = "band"
    left: int | None
    right: int | None = 0
    sinks: int = 0
    global_tokens: int = 0

    def allowed(self, p: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        left, right = _side(self.left), _side(self.right)
        seen = (j >= p - left) & (j <= p + right)
        if self.sinks or self.global_tokens:
            seen = seen | ((j >= 0) & (j < max(self.sinks, self.global_tokens)))
            seen = seen | ((p >= 0) & (p < self.global_tokens))
        return seen

    def counts(self, p: np.ndarray, keys: int, causal: bool) -> np.ndarray:
        visible = _visible(p, keys, causal)
        low = np.maximum(p - _side(self.left), 0)
        high = np.minimum(p + _side(self.right) + 1, visible)
        lead = np.minimum(max(self.sinks, self.global_tokens), visible)
        both = np.maximum(np.minimum(lead, high) - low, 0)
        total = np.maximum(high - low, 0) + lead - both
        return np.where(p < self.global_tokens, visible, total)

    def pattern(self, mask: Any = None, device: torch.device | None = None) -> Any:
        tokens = self.global_tokens or None
        return sa.Band((self.left, self.right), sinks=self.sinks, global_tokens=tokens)

    @property
    def label(self) -> str:
        extra = f" + {self.sinks} sinks" if self.sinks else ""
        extra += f" + {self.global_tokens} global" if self.global_tokens else ""
        return f"band {_window(self.left, self.right)}{extra}"


@dataclass(frozen=True)
class Scattered(Spec):
    """A window of ``side`` keys on both sides, and global tokens anywhere (Longformer)."""

    variant: ClassVar[str] = "band"
    side: int
    tokens: tuple[int, ...]

    def allowed(self, p: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        seen = (j >= p - self.side) & (j <= p + self.side)
        for token in self.tokens:
            seen = seen | (p == token) | (j == token)
        return seen

    def counts(self, p: np.ndarray, keys: int, causal: bool) -> np.ndarray:
        visible = _visible(p, keys, causal)
        low, high = np.maximum(p - self.side, 0), np.minimum(p + self.side + 1, visible)
        total = high - low
        for token in self.tokens:
            total += (token < visible) & ((token < low) | (token >= high))
        return np.where(np.isin(p, self.tokens), visible, total)

    def pattern(self, mask: Any = None, device: torch.device | None = None) -> Any:
        tokens = torch.tensor(self.tokens, dtype=torch.int32, device=device)
        return sa.Band((self.side, self.side), global_tokens=tokens)

    @property
    def label(self) -> str:
        return f"band {_window(self.side, self.side)} + {len(self.tokens)} scattered global"


@dataclass(frozen=True)
class Dilated(Spec):
    """A window of taps, ``dilation`` keys apart."""

    variant: ClassVar[str] = "dilated"
    left: int
    right: int
    dilation: int

    def allowed(self, p: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        distance = j - p
        window = (distance >= -self.left * self.dilation) & (distance <= self.right * self.dilation)
        return window & (distance % self.dilation == 0)

    def counts(self, p: np.ndarray, keys: int, causal: bool) -> np.ndarray:
        taps_left = np.minimum(self.left, p // self.dilation)
        taps_right = np.minimum(self.right, (keys - 1 - p) // self.dilation)
        return taps_left + 1 + (0 if causal else taps_right)

    def pattern(self, mask: Any = None, device: torch.device | None = None) -> Any:
        return sa.Dilated((self.left, self.right), self.dilation)

    @property
    def label(self) -> str:
        return f"dilated {_window(self.left, self.right)} step {self.dilation}"


@dataclass(frozen=True)
class Strided(Spec):
    """The last ``local`` keys and every ``stride``-th column before them."""

    variant: ClassVar[str] = "strided"
    local: int
    stride: int

    def allowed(self, p: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        column = (j >= 0) & (j % self.stride == self.stride - 1)
        return (j <= p) & ((p - j < self.local) | column)

    def counts(self, p: np.ndarray, keys: int, causal: bool) -> np.ndarray:
        low = np.maximum(p - self.local + 1, 0)
        return p - low + 1 + low // self.stride

    def pattern(self, mask: Any = None, device: torch.device | None = None) -> Any:
        return sa.Strided(self.local, self.stride)

    @property
    def label(self) -> str:
        return f"strided {self.local} + every {self.stride}"


@dataclass(frozen=True)
class TopK(Spec):
    """The ``k`` highest scores of each row."""

    variant: ClassVar[str] = "topk"
    k: int

    def counts(self, p: np.ndarray, keys: int, causal: bool) -> np.ndarray:
        return np.minimum(_visible(p, keys, causal), self.k)

    def pattern(self, mask: Any = None, device: torch.device | None = None) -> Any:
        return sa.TopK(self.k)

    @property
    def label(self) -> str:
        return f"top-k {self.k}"


@dataclass(frozen=True)
class Blocks(Spec):
    """A random block mask for each head; with causal, a share of the blocks that a row sees.

    With a ``spread``, heads differ by that factor and neighbouring rows by two; all together have
    the pairs of even lists.
    """

    variant: ClassVar[str] = "block_sparse"
    block_q: int
    block_kv: int
    density: float
    per: str = "query"  # a mask for each query head, for each "key" head, or "one" for all
    spread: float = 1.0  # of the densities, the highest head's over the lowest one's

    def block_mask(
        self,
        counts: tuple[int, int],
        queries: int,
        keys: int,
        causal: bool,
        device: torch.device,
        seed: int,
    ) -> torch.Tensor:
        """Return bool (1, heads, NQ, NKV), ``ceil(density * visible)`` blocks of every row.

        ``counts`` are the numbers of query and of key heads.
        """
        heads = {"query": counts[0], "key": counts[1], "one": 1}[self.per]
        rows, columns = math.ceil(queries / self.block_q), math.ceil(keys / self.block_kv)
        generator = torch.Generator(device).manual_seed(seed)
        score = torch.rand(heads, rows, columns, generator=generator, device=device)
        first = torch.arange(rows, device=device)[:, None] * self.block_q + keys - queries
        last = first + self.block_q - 1
        column = torch.arange(columns, device=device) * self.block_kv
        visible = torch.full((rows,), columns, device=device)
        if causal:
            future = column > last
            score = score.masked_fill(future, -1.0)
            diagonal = (column <= first) & (column + self.block_kv > first)
            score = score.masked_fill(diagonal, 2.0)
            visible = (~future).sum(-1)
        density = torch.full((heads, rows), self.density, device=device)
        if self.spread != 1:
            share = self.spread ** torch.linspace(0, 1, heads, device=device)
            density *= (share / share.mean())[:, None]
            density[:, ::2] *= 2 / 3
            density[:, 1::2] *= 4 / 3
        kept = torch.ceil(visible * density - 1e-6).clamp(min=1)
        rank = score.argsort(-1, descending=True).argsort(-1)
        return (rank < kept[..., None])[None]

    def pairs(self, mask: torch.Tensor, queries: int, keys: int, causal: bool) -> int:
        """Return the allowed pairs of all heads of ``mask``."""
        listed = mask.sum((0, 1)).cpu().numpy()  # heads that list each block
        p: np.ndarray = np.arange(queries) + keys - queries
        start: np.ndarray = np.arange(mask.shape[-1]) * self.block_kv
        stop = np.minimum(start + self.block_kv, keys)
        total = 0
        for row, heads in enumerate(listed):
            rows = p[row * self.block_q : (row + 1) * self.block_q, None]
            whole = stop <= (rows[0] + 1 if causal else keys)
            total += int(((stop - start) * heads)[whole].sum()) * len(rows)
            cut = (start <= rows[-1]) & ~whole
            seen = np.maximum(np.minimum(stop[cut], rows + 1) - start[cut], 0)
            total += int((seen.sum(0) * heads[cut]).sum())
        return total

    def pattern(self, mask: Any = None, device: torch.device | None = None) -> Any:
        assert mask is not None
        return sa.BlockSparse(sa.BlockLayout.from_mask(mask, self.block_q, self.block_kv))

    @property
    def label(self) -> str:
        size = f"{self.block_q}"
        size += "" if self.block_q == self.block_kv else f"x{self.block_kv}"
        uneven = f", heads differ by {self.spread:g}" if self.spread != 1 else ""
        return f"blocks {size}, density {self.density:.2f}{uneven}"


@dataclass(frozen=True)
class BlockTopK(Spec):
    """The best blocks of each query block by a selector: a share of them, or until a mass."""

    variant: ClassVar[str] = "block_topk"
    block_size: int | tuple[int, int]
    budget: float | None = None
    selector: str = "mean"
    mass: float | None = None
    settings: tuple[tuple[str, int], ...] = (("local_blocks", 1),)

    def pattern(self, mask: Any = None, device: torch.device | None = None) -> Any:
        settings: dict[str, Any] = dict(self.settings)
        return sa.BlockTopK(
            self.block_size, self.mass, self.selector, budget_share=self.budget, **settings
        )

    @property
    def label(self) -> str:
        name = "" if self.selector == "mean" else f" by {self.selector}"
        mass = "" if self.mass is None else f", mass {self.mass:.2f}"
        budget = "" if self.budget is None else f", budget {self.budget:.2f}"
        size = self.block_size
        blocks = size if isinstance(size, int) else "x".join(map(str, size))
        return f"block top-k {blocks}{name}{mass}{budget}"


@dataclass(frozen=True)
class Sketched(Spec):
    """The best blocks of ``tokens`` keys by a sketch of the keys: decoding, a query at a time."""

    variant: ClassVar[str] = "block_topk"
    block_kv: int = 16
    tokens: int = 2048
    bits: int = 2

    def pattern(self, mask: Any = None, device: torch.device | None = None) -> Any:
        sizes = {"block_size": self.block_kv, "budget_tokens": self.tokens}
        return sa.BlockTopK(selector="sketch", group="kv", sketch=mask, **sizes)

    @property
    def label(self) -> str:
        return f"sketch of {self.bits} bits, {self.tokens} tokens in blocks of {self.block_kv}"


def _side(side: int | None) -> int:
    return UNLIMITED if side is None else side


def _window(left: int | None, right: int | None) -> str:
    names = ["all" if side is None else str(side) for side in (left, right)]
    return f"({names[0]}, {names[1]})"
