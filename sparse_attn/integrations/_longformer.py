"""Longformer's self-attention on fused kernels.

A row sees the local tokens within w of it and all global tokens; a global row sees every token
through projections of its own (Beltagy, Peters and Cohan 2020, section 3.1). The original computes
the window in chunks and concatenates the scores of the global columns. Bound by ``apply``.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

from .._module_names import ask_about_sides
from ..functional import fused_attention, sparse_attention
from ..patterns import Band, Full
from ..policy import Policy
from ..tools import merge_states
from ._layer import Layer, layer_error, place
from ._masks import padding_arguments
from ._placing import joined

__all__ = ["SparseLongformerSelfAttention", "check_policy"]


def check_policy(path: str, policy: Policy) -> None:
    """Raise ``NotImplementedError`` unless the policy only narrows the window."""
    for pattern in policy.patterns():
        band = isinstance(pattern, Band) and not pattern.sinks and pattern.global_tokens is None
        if not band and not isinstance(pattern, Full):
            raise NotImplementedError(
                f"sparse_attn: {path}: not served: {pattern} in Longformer, whose global tokens "
                "come with the call; give Full() or a Band without sinks and global tokens"
            )


class SparseLongformerSelfAttention(LongformerSelfAttention):
    """`LongformerSelfAttention` with another forward: same parameters, same results."""

    _own_kind = LongformerSelfAttention
    _sparse_attn: Layer

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        is_index_masked: torch.Tensor | None = None,
        is_index_global_attn: torch.Tensor | None = None,
        is_global_attn: bool | None = None,
        output_attentions: bool = False,
    ) -> tuple[torch.Tensor]:
        """Attend.

        Parameters
        ----------
        hidden_states : Tensor
            (B, S, E)
        attention_mask : Tensor
            (B, S), negative for padding, 0 for local and positive for global tokens.
        is_index_masked, is_index_global_attn, is_global_attn
            What follows from it.
        output_attentions : bool
            False: weights are never made.

        Returns
        -------
        tuple of Tensor
            ``(out,)``, (B, S, E); zeros where the token is padding.
        """
        if output_attentions:
            raise layer_error(self, "output_attentions", True)
        if self.training and self.dropout:
            raise layer_error(self, "dropout", self.dropout)
        tokens = attention_mask >= 0  # (B, S)
        seen = padding_arguments(tokens, tokens.shape[1])
        is_global = attention_mask > 0  # (B, S)
        query = self._heads(self.query(hidden_states))
        key = self._heads(self.key(hidden_states))
        value = self._heads(self.value(hidden_states))
        if not is_global.any():
            out = sparse_attention(query, key, value, self._window(query), **seen)
        elif (is_global == is_global[:1]).all():
            window = Band(self._window(query).sides, global_tokens=_common_positions(is_global[0]))
            out = sparse_attention(query, key, value, window, **seen)
        else:
            out = self._two_parts(query, key, value, is_global, tokens)
        out = out.transpose(1, 2).flatten(2)
        if is_global.any():
            out = self._with_global_rows(out, hidden_states, is_global, tokens)
        return (out.masked_fill(~tokens[..., None], 0.0),)

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        """(B, S, E) to (B, H, S, D)."""
        sizes = (*projected.shape[:-1], self.num_heads, self.head_dim)
        return projected.view(sizes).transpose(1, 2)

    def _window(self, query: torch.Tensor) -> Band:
        """Return the layer's window, narrowed by the policy."""
        layer, length, own = self._sparse_attn, query.shape[2], self.one_sided_attn_window_size
        pattern = layer.policy.choose(layer.number, length, length)
        ask_about_sides(f"sparse_attn: {place(self)}", pattern, length)
        window = joined(pattern, (own, own))
        assert isinstance(window, Band)  # of all that `check_policy` lets through
        return window

    def _two_parts(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        is_global: torch.Tensor,
        tokens: torch.Tensor,
    ) -> torch.Tensor:
        """Serve globals that differ in the batch: the window and the columns, merged by lse."""
        columns, real = _global_positions(is_global)
        local = (tokens & ~is_global)[:, None, None, :]
        near = sparse_attention(
            query, key, value, self._window(query), attn_mask=local, return_lse=True
        )
        far = fused_attention(
            query,
            _rows(key, columns),
            _rows(value, columns),
            attn_mask=real[:, None, None, :],
            return_lse=True,
        )
        return merge_states(*near, *far)[0]

    def _with_global_rows(
        self,
        out: torch.Tensor,
        hidden_states: torch.Tensor,
        is_global: torch.Tensor,
        tokens: torch.Tensor,
    ) -> torch.Tensor:
        """Overwrite global rows of `out` (B, S, E) with attention through their own projections."""
        rows, real = _global_positions(is_global)
        chosen = hidden_states.gather(1, rows[..., None].expand(-1, -1, self.embed_dim))
        result: Any = fused_attention(
            self._heads(self.query_global(chosen)),
            self._heads(self.key_global(hidden_states)),
            self._heads(self.value_global(hidden_states)),
            **padding_arguments(tokens, rows.shape[1]),
        )
        out = out.clone()
        out[is_global] = result.transpose(1, 2).flatten(2)[real]
        return out


def _common_positions(is_global: torch.Tensor) -> int | torch.Tensor:
    """Return the true positions of (S,), as their number when they come first."""
    positions = is_global.nonzero()[:, 0].to(torch.int32)
    count = positions.shape[0]
    return count if is_global[:count].all() else positions


def _global_positions(is_global: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of global tokens, int64 (B, G) ascending, and which of them are real."""
    most = int(is_global.sum(-1).max())
    order = torch.argsort(~is_global, dim=-1, stable=True)[:, :most]
    return order, is_global.gather(1, order)


def _rows(heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Gather (B, H, S, D) at positions (B, G): (B, H, G, D)."""
    index = positions[:, None, :, None].expand(-1, heads.shape[1], -1, heads.shape[3])
    return heads.gather(2, index)
