"""`SparseMultiheadAttention`: the parameters and the call of ``torch.nn.MultiheadAttention``.

Masks follow torch's module: a true entry of a bool mask is *not* attended.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .._autocast import is_autocast_enabled
from .._checks import (
    Number,
    as_device,
    check_dense,
    check_integer,
    check_kind,
    dtype_name,
    refuse,
)
from .._module_names import ask_about_keys, ask_about_sides
from .._observe import attend_in
from .._origins import text_arguments
from ..patterns import Full, Pattern
from ..policy import Policy, as_policy
from ._served import check_parameters, unserved_module, unserved_options

__all__ = ["SparseMultiheadAttention"]

_OWNER = "SparseMultiheadAttention"


class SparseMultiheadAttention(nn.Module):
    """``torch.nn.MultiheadAttention`` for inference, with a pattern.

    It loads the state dict of ``nn.MultiheadAttention`` and takes the same call. It is no subclass:
    the fused path of ``nn.TransformerEncoderLayer``, which would bypass the pattern, is not taken.

    Parameters
    ----------
    embed_dim, num_heads : int
        Model width and number of heads; their quotient is a multiple of 8, at most 256.
    dropout : float
        Accepted; a call in training mode with dropout above 0 is refused.
    bias, batch_first, device, dtype
        As in ``nn.MultiheadAttention``.
    add_bias_kv, add_zero_attn, kdim, vdim
        Refused, except for values that change nothing.
    policy : Policy or Pattern, optional
        What to attend to; default ``Full()``. A bare pattern runs whatever the length.
    layer : int or None
        Number of this module in the policy. None is for cross attention, which no policy numbers:
        it runs ``Full()``, and no tool watches its calls.

    Raises
    ------
    TypeError, ValueError
        An argument of a wrong kind; `embed_dim` that `num_heads` does not divide.
    NotImplementedError
        A head dim that no engine serves, `add_bias_kv`, `add_zero_attn`, or `kdim`, `vdim` other
        than `embed_dim`.

    Examples
    --------
    >>> import torch
    >>> from sparse_attn import Band
    >>> from sparse_attn.nn import SparseMultiheadAttention
    >>> attention = SparseMultiheadAttention(64, 4, batch_first=True, policy=Band(16)).eval()
    >>> tokens = torch.randn(2, 100, 64)
    >>> with torch.no_grad():
    ...     out, weights = attention(tokens, tokens, tokens, need_weights=False)
    >>> out.shape, weights
    (torch.Size([2, 100, 64]), None)

    Source: Vaswani et al. 2017, section 3.2.2.
    """

    # Read by nn.TransformerEncoderLayer: False keeps its fused path, which ignores patterns, away.
    _qkv_same_embed_dim = False

    in_proj_bias: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        policy: Policy | Pattern | None = None,
        layer: int | None = 0,
    ) -> None:
        super().__init__()
        check_integer(_OWNER, "embed_dim", embed_dim, 1)
        check_integer(_OWNER, "num_heads", num_heads, 1)
        check_kind(_OWNER, "dropout", dropout, Number, "a float")
        check_kind(_OWNER, "bias", bias, bool, "a bool")
        check_kind(_OWNER, "batch_first", batch_first, bool, "a bool")
        if embed_dim % num_heads:
            what = "embed_dim divisible by num_heads"
            raise refuse(_OWNER, what, f"{embed_dim} and {num_heads}")
        reason = unserved_options(embed_dim, num_heads, kdim, vdim, add_bias_kv, add_zero_attn)
        if reason:
            raise NotImplementedError(f"sparse_attn.{_OWNER}: {reason}")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.dropout = dropout
        self.batch_first = batch_first
        self.policy = as_policy(Full() if policy is None else policy)
        self.layer = layer if layer is None else check_integer(_OWNER, "layer", layer, 0)
        self._warned = False
        device = None if device is None else as_device(_OWNER, device)
        check_kind(_OWNER, "dtype", dtype, (torch.dtype, type(None)), "a torch.dtype or None")
        if dtype is not None and not dtype.is_floating_point:
            raise refuse(_OWNER, "dtype of floating point", dtype_name(dtype))
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim, **kind))
        in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim, **kind)) if bias else None
        self.register_parameter("in_proj_bias", in_proj_bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **kind)
        nn.init.xavier_uniform_(self.in_proj_weight)
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    @classmethod
    def from_dense(
        cls, module: nn.MultiheadAttention, policy: Policy | Pattern, layer: int | None = 0
    ) -> SparseMultiheadAttention:
        """Make the sparse twin of a module; it shares the parameters.

        Parameters
        ----------
        module : nn.MultiheadAttention
            Stays as it is.
        policy, layer
            As in the class.

        Returns
        -------
        SparseMultiheadAttention

        Raises
        ------
        TypeError
            `module` is no ``nn.MultiheadAttention``.
        NotImplementedError
            A subclass of ``nn.MultiheadAttention``, hooks, or an option or dtype that is not
            served.

        Examples
        --------
        >>> import torch
        >>> from sparse_attn import Band
        >>> from sparse_attn.nn import SparseMultiheadAttention
        >>> dense = torch.nn.MultiheadAttention(64, 4)
        >>> twin = SparseMultiheadAttention.from_dense(dense, Band(16))
        >>> twin.out_proj is dense.out_proj
        True
        """
        check_kind(_OWNER, "module", module, nn.MultiheadAttention, "an nn.MultiheadAttention")
        reason = unserved_module(module)
        if reason:
            raise NotImplementedError(f"sparse_attn.{_OWNER}: {reason}")
        twin = cls(
            module.embed_dim,
            module.num_heads,
            module.dropout,
            bias=module.in_proj_bias is not None,
            batch_first=module.batch_first,
            device="meta",
            policy=policy,
            layer=layer,
        )
        twin.in_proj_weight = module.in_proj_weight
        twin.in_proj_bias = module.in_proj_bias
        twin.out_proj = module.out_proj
        object.__setattr__(twin, "_dense", module)  # no part of it: kept for `dense`
        return twin.train(module.training)

    def dense(self) -> nn.MultiheadAttention | None:
        """Return the module that this one was made from, with its parameters of now.

        Returns
        -------
        nn.MultiheadAttention or None
            None for a module that `from_dense` did not make.

        Examples
        --------
        >>> import torch
        >>> from sparse_attn import Band
        >>> from sparse_attn.nn import SparseMultiheadAttention
        >>> module = torch.nn.MultiheadAttention(64, 4)
        >>> SparseMultiheadAttention.from_dense(module, Band(16)).dense() is module
        True
        """
        module: nn.MultiheadAttention | None = vars(self).get("_dense")
        if module is not None:
            module.in_proj_weight = self.in_proj_weight
            module.register_parameter("in_proj_bias", self.in_proj_bias)
            module.out_proj = self.out_proj  # type: ignore[assignment]
            module.train(self.training)
        return module

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, None]:
        """Project, attend, project.

        Parameters
        ----------
        query, key, value : Tensor
            (B, S, E) with ``batch_first``, else (S, B, E); or unbatched (S, E).
        key_padding_mask : Tensor, optional
            (B, Skv) or (Skv,): bool, true for padding, or additive.
        need_weights, average_attn_weights : bool
            Weights are never made: None comes back, with one warning a module.
        attn_mask : Tensor, optional
            (Sq, Skv) or (B * num_heads, Sq, Skv): bool, true where not to attend, or additive.
        is_causal : bool
            A causal mask, aligned to the lower right. With an `attn_mask` it is torch's hint that
            this mask is the causal one, and for ``Sq == Skv`` the mask is not read.

        Returns
        -------
        out, None
            `out` in the layout of `query`; zeros before the last projection where no key is left.

        Raises
        ------
        NotImplementedError
            Training with dropout.
        TypeError, ValueError
            Arguments that are no tensors; shapes or dtypes that do not fit.

        Examples
        --------
        >>> import torch
        >>> from sparse_attn import Band
        >>> from sparse_attn.nn import SparseMultiheadAttention
        >>> attention = SparseMultiheadAttention(64, 4, batch_first=True, policy=Band(3)).eval()
        >>> tokens, padding = torch.randn(2, 9, 64), torch.zeros(2, 9).bool()
        >>> padding[1, 6:] = True
        >>> with torch.no_grad():
        ...     out, _ = attention(tokens, tokens, tokens, padding, need_weights=False)
        >>> out.shape
        torch.Size([2, 9, 64])
        """
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            check_dense(_OWNER, name, tensor)
        if self.training and self.dropout:
            reason = f"not served: dropout={self.dropout} in training; call eval()"
            raise NotImplementedError(f"sparse_attn.{_OWNER}: {reason}")
        if need_weights and not self._warned:
            self._warned = True
            warnings.warn(
                "SparseMultiheadAttention makes no attention weights: need_weights=True gives None",
                stacklevel=2,
            )
        check_parameters(f"{_OWNER}, layer {self.layer}", self.in_proj_weight.dtype)
        batched, own_keys = query.dim() == 3, query is key
        query, key, value = self._project(query, key, value, batched)
        batch, _, seq_q, _ = query.shape
        seq_kv = key.shape[2]
        if is_causal and seq_q == seq_kv:
            attn_mask = None
        elif attn_mask is not None:
            is_causal = False
        padding = _attended("key_padding_mask", key_padding_mask, (batch, 1, 1, seq_kv))
        mask = _attended("attn_mask", attn_mask, (batch, self.num_heads, seq_q, seq_kv))
        common: dict[str, Any] = {"is_causal": is_causal}
        common["attn_mask"] = _merge(mask, padding, query.dtype)
        pattern: Pattern = Full()
        if self.layer is not None:
            pattern = self.policy.choose(self.layer, seq_q, seq_kv)
        what = f"sparse_attn.{_OWNER}: layer {self.layer}"
        ask_about_keys(what, pattern, seq_q, seq_kv, "swap_attention")
        if mask is None and not is_causal:
            ask_about_sides(what, pattern, seq_q)

        def place(own: Pattern) -> tuple[Pattern, dict[str, Any]]:
            return own, common | text_arguments(own, padding, seq_q)

        out = attend_in(
            self.layer, query, key, value, pattern, place, own_keys=own_keys, **place(pattern)[1]
        )
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if not batched:
            return out[0], None
        return (out if self.batch_first else out.transpose(0, 1)), None

    def _project(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batched: bool
    ) -> list[torch.Tensor]:
        """Project to heads (B, H, S, D) each."""
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.dim() != query.dim() or tensor.dim() not in (2, 3):
                what = "query, key and value with 3 dimensions, or 2 without batch"
                raise refuse(_OWNER, what, f"{name} of shape {tuple(tensor.shape)}")
            if tensor.shape[-1] != self.embed_dim:
                raise refuse(_OWNER, f"{name} of embed_dim {self.embed_dim}", tensor.shape[-1])
            dtype = self.in_proj_weight.dtype
            if tensor.dtype != dtype and not is_autocast_enabled(tensor.device.type):
                what = f"{name} of the weights' dtype {dtype_name(dtype)}"
                raise refuse(_OWNER, what, dtype_name(tensor.dtype))
        weights = self.in_proj_weight.chunk(3)
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        heads = []
        for tensor, weight, bias in zip((query, key, value), weights, biases, strict=True):
            if not batched:
                tensor = tensor[None]
            elif not self.batch_first:
                tensor = tensor.transpose(0, 1)
            projected = functional.linear(tensor, weight, bias)
            sizes = (*projected.shape[:-1], self.num_heads, self.head_dim)
            heads.append(projected.view(sizes).transpose(1, 2))
        return heads

    def extra_repr(self) -> str:
        """Sizes and the pattern."""
        return f"{self.embed_dim}, {self.num_heads}, layer={self.layer}, {self.policy.pattern}"


def _attended(
    name: str, mask: torch.Tensor | None, sizes: tuple[int, int, int, int]
) -> torch.Tensor | None:
    """View one of torch's masks in 4 dimensions and in the ops' sense: true is attended."""
    if mask is None:
        return None
    check_dense(_OWNER, name, mask)
    batch, heads, seq_q, seq_kv = sizes
    # By their ranks: sizes of a graph are in no set, and are compared with no others.
    shapes: dict[int, tuple[int, ...]]
    shapes = {2: (seq_q, seq_kv), 3: (batch * heads, seq_q, seq_kv)}
    if name == "key_padding_mask":
        shapes = {2: (batch, seq_kv)}
        if mask.dim() == 1 and batch == 1:
            shapes = {1: (seq_kv,)} | shapes
    fits = mask.shape == shapes.get(mask.dim())
    if not fits or not (mask.dtype == torch.bool or mask.is_floating_point()):
        what = f"{name} bool or additive of shape {' or '.join(map(str, shapes.values()))}"
        raise refuse(_OWNER, what, f"{dtype_name(mask.dtype)} of shape {tuple(mask.shape)}")
    shared = mask.dim() < 3 and name == "attn_mask"
    mask = mask[None, None] if shared else mask.reshape(sizes)
    return ~mask if mask.dtype == torch.bool else mask


def _merge(
    first: torch.Tensor | None, second: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor | None:
    """Intersect two masks, bool or additive."""
    if first is None or second is None:
        return second if first is None else first
    if first.dtype == second.dtype == torch.bool:
        return first & second
    zero = torch.zeros((), dtype=dtype, device=first.device)
    terms = [
        torch.where(mask, zero, -torch.inf) if mask.dtype == torch.bool else mask.to(dtype)
        for mask in (first, second)
    ]
    return terms[0] + terms[1]
