"""BigBird's self-attention on fused kernels.

The first and the last block see every block and are seen by all; the rest see their own block and
both neighbours (Zaheer et al. 2020, section 2; without random blocks, as in the original when it is
not training). A sequence too short for blocks has full attention. Bound by ``apply``.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from transformers.models.big_bird.modeling_big_bird import (
    BigBirdAttention,
    BigBirdBlockSparseAttention,
    BigBirdSelfAttention,
)

from ..functional import fused_attention, sparse_attention
from ..layout import BlockLayout
from ..patterns import BlockSparse, Full
from ..policy import Policy
from ._attention import attention
from ._layer import Layer, layer_error, warn_of_weights

__all__ = ["SparseBigBirdAttention", "check_policy"]


def check_policy(path: str, policy: Policy) -> None:
    """Raise ``NotImplementedError`` unless the policy is dense: BigBird has its own pattern."""
    for pattern in policy.patterns():
        if not isinstance(pattern, Full):
            raise NotImplementedError(
                f"sparse_attn: {path}: not served: {pattern} in BigBird, whose blocks are part of "
                "the model; give Full(), which keeps them"
            )


class SparseBigBirdAttention(BigBirdAttention):
    """`BigBirdAttention` whose inner module, of either attention type, is ours."""

    _own_kind = BigBirdAttention
    _sparse_attn: Layer

    def set_attention_type(self, value: str, layer_idx: int | None = None) -> None:
        """Change between ``block_sparse`` and ``original_full``, as the model does by length."""
        super().set_attention_type(value, layer_idx=layer_idx)
        self.bind()

    def bind(self) -> None:
        """Give the inner module our forward."""
        full = isinstance(self.self, BigBirdSelfAttention)
        self.self.__class__ = _SparseFull if full else _SparseBlocks
        self.self._sparse_attn = self._sparse_attn


class _SparseFull(BigBirdSelfAttention):
    """Full attention, self or cross, with the original's caches."""

    _own_kind = BigBirdSelfAttention

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **extras: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend; `hidden_states` (B, Sq, E) to (B, Sq, E), masks additive (B, 1, Sq, Skv).

        The cache is named ``past_key_values`` in transformers before 5.24.
        """
        cache = past_key_values if cache is None else cache
        cross = encoder_hidden_states is not None
        source = encoder_hidden_states if cross else hidden_states
        mask = encoder_attention_mask if cross else attention_mask
        index = self.layer_idx
        if cross and cache is not None and cache.get_seq_length(index) > 0:
            key, value = cache.layers[index].keys, cache.layers[index].values
        else:
            key, value = _heads(self, self.key(source)), _heads(self, self.value(source))
            if cache is not None:
                key, value = cache.update(key, value, index)
        out, _ = attention(
            self,
            _heads(self, self.query(hidden_states)),
            key,
            value,
            mask,
            dropout=self.dropout.p if self.training else 0.0,
            is_causal=False,
            **extras,
        )
        return out.flatten(2), None


class _SparseBlocks(BigBirdBlockSparseAttention):
    """Block-sparse attention: the edge blocks' rows dense, the others by a block layout."""

    _own_kind = BigBirdBlockSparseAttention

    def forward(
        self,
        hidden_states: torch.Tensor,
        band_mask: torch.Tensor,
        from_mask: torch.Tensor,
        to_mask: torch.Tensor,
        from_blocked_mask: torch.Tensor | None = None,
        to_blocked_mask: torch.Tensor | None = None,
        **extras: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend; `hidden_states` (B, S, E) to (B, S, E), `to_mask` (B, 1, 1, S), 1 for tokens."""
        if self.training:
            raise layer_error(self, "training", True)
        warn_of_weights(self, extras)
        block, length = self.block_size, hidden_states.shape[1]
        if block % 16:
            raise layer_error(self, "block_size", block)
        query, key, value = (
            _heads(self, project(hidden_states)) for project in (self.query, self.key, self.value)
        )
        tokens = to_mask > 0
        # Where the original would draw random blocks it visits block 0 again, once for each: its
        # keys count 1 + num_random_blocks times.
        bias = torch.zeros(length, device=key.device)
        bias[:block] = math.log1p(self.num_random_blocks)
        bias = torch.where(tokens, bias, -math.inf)
        layout = _inner_layout(length // block, block, key.device)
        inner = sparse_attention(
            query[:, :, block:-block], key, value, BlockSparse(layout), attn_mask=bias
        )
        edges = torch.cat([query[:, :, :block], query[:, :, -block:]], dim=2)
        edges = fused_attention(edges, key, value, attn_mask=tokens)
        out = torch.cat([edges[:, :, :block], inner, edges[:, :, block:]], dim=2)
        out = out.transpose(1, 2).flatten(2)
        return out * from_mask[:, 0].to(out.dtype), None


def _heads(module: Any, projected: torch.Tensor) -> torch.Tensor:
    """(B, S, E) to (B, H, S, D)."""
    sizes = (*projected.shape[:-1], module.num_attention_heads, module.attention_head_size)
    return projected.view(sizes).transpose(1, 2)


@lru_cache(maxsize=64)
def _inner_layout(blocks: int, block: int, device: torch.device) -> BlockLayout:
    """Key blocks of the query blocks between the edges: neighbours, the first and the last."""
    row = torch.arange(1, blocks - 1, device=device)[:, None]
    column = torch.arange(blocks, device=device)[None]
    near = (column - row).abs() <= 1
    return BlockLayout.from_mask(near | (column == 0) | (column == blocks - 1), block, block)
