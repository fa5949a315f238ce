"""`ByHead`: a pattern of its own for each key head.

Made by `Policy` for layers with ``heads=``; ``_head_calls`` runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ._checks import check_integer, check_kind, check_length, refuse
from ._pattern import check_pattern
from ._table import Table
from ._tiles import TileRun
from .patterns import BlockSparse, BlockTopK, Pattern
from .windows import DENSE

__all__ = ["ByHead"]


@dataclass(frozen=True)
class ByHead(Pattern):
    """A pattern for each key head; query heads take that of their key head.

    Parameters
    ----------
    patterns : mapping of int to Pattern
        By number of the key head.
    rest : Pattern
        Of heads that are not named.

    Raises
    ------
    TypeError, ValueError
        Heads that are no ints of at least 0; values that are no patterns; a layout with lists, or
        scores, of several heads, or a `ByHead` inside.

    Examples
    --------
    >>> import torch
    >>> from sparse_attn import Band, ByHead, Full, sparse_attention
    >>> pattern = ByHead({0: Full()}, rest=Band((15, 0), sinks=4))
    >>> q, k, v = torch.randn(1, 8, 64, 16), *torch.randn(2, 1, 4, 64, 16)
    >>> out = sparse_attention(q, k, v, pattern, is_causal=True)
    >>> alone = sparse_attention(q[:, :2], k[:, :1], v[:, :1], Full(), is_causal=True)
    >>> torch.equal(out[:, :2], alone)
    True
    """

    patterns: Mapping[int, Pattern] = field(hash=False)
    rest: Pattern = DENSE

    def __post_init__(self) -> None:
        check_kind("ByHead", "patterns", self.patterns, Mapping, "a mapping of head to pattern")
        for head in self.patterns:
            check_integer("ByHead", "head", head, 0)
        for pattern in self._head_patterns:
            check_pattern("ByHead", pattern)
            if isinstance(pattern, ByHead):
                raise refuse("ByHead", "a pattern for each head", "a ByHead")
            blocks = pattern._region
            if isinstance(blocks, BlockSparse) and blocks.layout.counts.shape[1] > 1:
                raise refuse("ByHead", "a layout of one head", blocks.layout)
            scores = blocks.selector if isinstance(blocks, BlockTopK) else None
            if isinstance(scores, torch.Tensor) and scores.dim() == 4 and scores.shape[1] > 1:
                raise refuse("ByHead", "scores of one head", f"shape {tuple(scores.shape)}")
        ordered = Table({int(head): self.patterns[head] for head in sorted(self.patterns)})
        object.__setattr__(self, "patterns", ordered)

    @property
    def _head_patterns(self) -> tuple[Pattern, ...]:
        return (*self.patterns.values(), self.rest)

    def of(self, head: int) -> Pattern:
        """Return the pattern of a key head.

        Parameters
        ----------
        head : int
            Number of the key head.

        Raises
        ------
        TypeError, ValueError
            A number that is no int of at least 0.

        Examples
        --------
        >>> from sparse_attn import Band, ByHead, Full
        >>> ByHead({2: Full()}, rest=Band(7)).of(2)
        Full()
        """
        return self.patterns.get(check_integer("ByHead", "head", head, 0), self.rest)

    def runs(self, num_heads: int) -> list[tuple[Pattern, slice]]:
        """Return equal patterns of neighbouring key heads, each with its heads.

        Parameters
        ----------
        num_heads : int
            Key heads of the call.

        Raises
        ------
        TypeError, ValueError
            A number that is no int of at least 0; a pattern for a head that the call does not have.

        Examples
        --------
        >>> from sparse_attn import ByHead, Full, TopK
        >>> ByHead({2: Full()}, rest=TopK(7)).runs(3)
        [(TopK(k=7), slice(0, 2, None)), (Full(), slice(2, 3, None))]
        """
        check_length("ByHead", "num_heads", num_heads)
        beyond = [head for head in self.patterns if head >= num_heads]
        if beyond:
            what = f"patterns for the call's {num_heads} key heads"
            raise refuse("ByHead", what, f"one for head {beyond[0]}")
        found: list[tuple[Pattern, slice]] = []
        for head in range(num_heads):
            pattern, begin = self.of(head), head
            if found and found[-1][0] == pattern:
                begin = found.pop()[1].start
            found.append((pattern, slice(begin, head + 1)))
        return found

    def allows(self, row: torch.Tensor, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Refuse: each head has a mask of its own."""
        raise NotImplementedError(
            "sparse_attn.ByHead: no mask of all heads; ask the pattern of one, .of(head)"
        )

    def _row_counts(self, position: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError(
            "sparse_attn.ByHead: no density of all heads; ask the pattern of one, .of(head)"
        )

    def _runs(self, Sq: int, Skv: int, is_causal: bool, tile: tuple[int, int]) -> list[TileRun]:
        raise NotImplementedError(
            "sparse_attn.ByHead: no tiles of all heads; ask the pattern of one, .of(head)"
        )
