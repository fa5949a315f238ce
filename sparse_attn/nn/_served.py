"""What of ``torch.nn.MultiheadAttention`` has a sparse twin: its options, subclasses, dtypes."""

from __future__ import annotations

import torch
from torch import nn

from .._checks import dtype_name, refuse, serves_head_dim

__all__ = ["check_parameters", "unserved_module", "unserved_options"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_HELPS = ".float() or .to(torch.bfloat16) of the model"


def unserved_options(
    embed_dim: int,
    num_heads: int,
    kdim: int | None,
    vdim: int | None,
    add_bias_kv: bool,
    add_zero_attn: bool,
) -> str | None:
    """Say which option of ``nn.MultiheadAttention`` the ops do not have, by name."""
    head_dim = embed_dim // num_heads
    extras = {
        "head_dim": None if serves_head_dim(head_dim) else head_dim,
        "kdim": kdim if kdim not in (None, embed_dim) else None,
        "vdim": vdim if vdim not in (None, embed_dim) else None,
        "add_bias_kv": add_bias_kv or None,
        "add_zero_attn": add_zero_attn or None,
    }
    for name, value in extras.items():
        if value is not None:
            return f"not served: {name}={value}; keep nn.MultiheadAttention there"
    return None


def unserved_module(module: nn.MultiheadAttention) -> str | None:
    """Say why a module has no sparse twin."""
    if type(module) is not nn.MultiheadAttention:
        return (
            f"not served: {type(module).__name__}, a subclass of nn.MultiheadAttention; "
            "replace it by a SparseMultiheadAttention yourself"
        )
    if module._forward_hooks or module._forward_pre_hooks:
        return "not served: forward hooks; register them after the swap"
    reason = unserved_options(
        module.embed_dim,
        module.num_heads,
        module.kdim,
        module.vdim,
        module.bias_k is not None,
        module.add_zero_attn,
    )
    if reason is None and module.in_proj_weight.dtype not in _DTYPES:
        dtype = dtype_name(module.in_proj_weight.dtype)
        return f"not served: parameters of {dtype}; first call {_HELPS}"
    return reason


def check_parameters(owner: str, dtype: torch.dtype) -> None:
    """Refuse parameters of a dtype that no engine serves, which a module may have got later."""
    if dtype not in _DTYPES:
        what = "parameters of dtype float32, float16 or bfloat16"
        raise refuse(owner, what, f"{dtype_name(dtype)}; call {_HELPS}")
