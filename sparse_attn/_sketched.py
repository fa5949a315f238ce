"""What a `KeySketch` takes in: keys of 8 bits, and the pages that a cache's sequences use."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from ._checks import as_int32, dtype_name, refuse

__all__ = ["dequantized", "ends_of_groups"]


def _host_sees(tensor: torch.Tensor) -> bool:
    """Whether a tensor's numbers are there to be checked."""
    return tensor.device.type == "cpu" and not is_compiling()


def dequantized(
    owner: str, key: torch.Tensor, key_scale: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return what keys ``(B, Hkv, n, D)`` of 8 bits stand for, others as they are."""
    if key.dtype != torch.float8_e4m3fn:
        if key_scale is not None:
            what = "key_scale beside keys of dtype float8_e4m3fn"
            raise refuse(owner, what, dtype_name(key.dtype))
        return key
    if key.dim() != 4:
        return key  # which the op refuses
    if key_scale is None:
        return key.to(dtype)
    batch, heads = key.shape[:2]
    if key_scale.device != key.device:
        raise refuse(owner, f"key_scale on key's device {key.device}", key_scale.device)
    if key_scale.dtype != torch.float32 or key_scale.shape not in ((), (heads,), (batch, heads)):
        what = f"key_scale of dtype float32 and shape (), ({heads}) or ({batch}, {heads})"
        got = f"{dtype_name(key_scale.dtype)} {tuple(key_scale.shape)}"
        raise refuse(owner, what, got)
    if _host_sees(key_scale):
        wrong = key_scale[~((key_scale > 0) & key_scale.isfinite())]
        if wrong.numel():
            raise refuse(owner, "key_scale above 0 and finite", wrong[0].item())
    return (key.float() * key_scale[..., None, None]).to(dtype)


def ends_of_groups(
    owner: str,
    key: torch.Tensor,
    block_table: torch.Tensor,
    seqused_k: torch.Tensor,
    group: int,
) -> torch.Tensor:
    """Return the slot of the last token of each group that a cache's sequences have, or -1."""
    pages, page_size = key.shape[:2]
    if block_table.dim() != 2 or seqused_k.shape != block_table.shape[:1]:
        shapes = f"{tuple(block_table.shape)} and {tuple(seqused_k.shape)}"
        what = "block_table of shape (batch, pages) and seqused_k of shape (batch)"
        raise refuse(owner, what, shapes)
    for name, tensor in {"block_table": block_table, "seqused_k": seqused_k}.items():
        if tensor.device != key.device:
            raise refuse(owner, f"{name} on key's device {key.device}", tensor.device)
    table = as_int32(owner, "block_table", block_table).long()
    used = as_int32(owner, "seqused_k", seqused_k)
    room = table.shape[1] * page_size
    start = torch.arange(0, room, group, device=table.device)
    last = torch.minimum(start + group, used[:, None]) - 1
    page = table.gather(1, last.clamp(min=0) // page_size)
    if _host_sees(table):
        cut = (used < 0) | (used > room)
        if cut.any():
            what = f"seqused_k from 0 to {room}, the tokens that block_table has room for"
            raise refuse(owner, what, used[cut][0].item())
        named = page[last >= start]
        absent = (named < 0) | (named >= pages)
        if absent.any():
            what = f"block_table to name some of the {pages} pages of key"
            raise refuse(owner, what, named[absent][0].item())
    slots = torch.where(page < 0, -1, page * page_size + last % page_size)
    return torch.where(last < start, -1, slots).flatten()
