"""Writes to key and value caches: new tokens into their slots, and caches as float8."""

from __future__ import annotations

import torch

from . import ops
from ._checks import (
    as_given,
    as_int64,
    check_choice,
    check_dense,
    check_kind,
    check_tensor,
    dtype_name,
    refuse,
)
from .sketch import KeySketch

__all__ = ["append_to_cache", "quantize_cache"]

#: The largest float8_e4m3fn.
_LARGEST = 448.0


def append_to_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    sketch: KeySketch | None = None,
) -> None:
    """Write the keys and values of new tokens into their slots of a cache, in place.

    Slot s is row ``s % page_size`` of page ``s // page_size``. Nothing waits for the device.

    Parameters
    ----------
    key, value : Tensor
        ``(tokens, Hkv, D)``, float32, float16 or bfloat16; any strides with a contiguous last
        dimension. The value's D may differ.
    key_cache, value_cache : Tensor
        ``(pages, page_size, Hkv, D)`` of key's dtype or float8_e4m3fn; any strides with a
        contiguous last dimension, so both may be views of one tensor.
    slot_mapping : Tensor
        ``(tokens,)``, int64 or converted to it: the slot of each token. Slots that the cache does
        not have, such as -1, take nothing. Of two tokens with one slot either may be written, or
        parts of both.
    key_scale, value_scale : Tensor, optional
        float32 on the device, 0-d or ``(Hkv,)``, above 0: a float8 cache holds ``key / key_scale``
        rounded to the nearest, at most 448 in size. 1 by default.
    sketch : KeySketch, optional
        A paged sketch of `key_cache`, which takes in the new tokens too, as the cache holds them.

    Raises
    ------
    TypeError
        An argument of a wrong kind.
    ValueError
        A wrong call, in one sentence: the argument, what was expected, what came; a tensor that
        requires grad in grad mode among them.

    Examples
    --------
    >>> import torch
    >>> from sparse_attn import append_to_cache
    >>> key_cache, value_cache = torch.zeros(2, 4, 16, 2, 8)
    >>> key, value = torch.randn(2, 3, 2, 8)
    >>> append_to_cache(key, value, key_cache, value_cache, torch.tensor([17, 16, -1]))
    >>> torch.equal(key_cache[1, 1], key[0])
    True

    Notes
    -----
    Slots as in Kwon et al. 2023 (PagedAttention), section 4.
    """
    tensors = {
        "key": key,
        "value": value,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "slot_mapping": slot_mapping,
    }
    for name, tensor in tensors.items():
        check_tensor("append_to_cache", name, tensor)
    for name, scale in {"key_scale": key_scale, "value_scale": value_scale}.items():
        kinds = (torch.Tensor, type(None))
        check_kind("append_to_cache", name, scale, kinds, "a tensor or None")
    check_kind("append_to_cache", "sketch", sketch, (KeySketch, type(None)), "a KeySketch or None")
    if sketch is not None and not sketch.paged:
        raise refuse("append_to_cache", "a paged sketch", repr(sketch))
    tensors["slot_mapping"] = as_int64("append_to_cache", "slot_mapping", slot_mapping)
    if sketch is not None:  # one that does not fit is refused while nothing is written
        sketch.append(key_cache, slot_mapping.new_empty(0, dtype=torch.int64), key_scale)
    arguments = (*tensors.values(), key_scale, value_scale)
    try:
        ops.call("append_to_cache", arguments, {}, written=(key_cache, value_cache))
    except ValueError as error:
        worded = as_given(error, tensors)
        if str(worded).endswith("float8_e4m3fn, got uint8"):
            hint = "a cache of 8 bits goes in as cache.view(torch.float8_e4m3fn)"
            worded = ValueError(f"{worded}; {hint}")
        raise worded from None
    if sketch is not None:
        sketch.append(key_cache, tensors["slot_mapping"], key_scale)


def _quantized(tensor: torch.Tensor, head_axis: int, per: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to float8 with one scale, or with one for each head."""
    axes = [axis for axis in range(4) if per == "tensor" or axis != head_axis]
    size = tensor.float().abs().nan_to_num(nan=0, posinf=0)
    shape = [1 if axis in axes else tensor.shape[axis] for axis in range(4)]
    largest = size.amax(axes, keepdim=True) if tensor.numel() else size.new_zeros(shape)
    scale = largest / _LARGEST
    scale = torch.where(scale > 0, scale, 1.0)  # so that zeros, or almost, have one above 0
    codes = (tensor.float() / scale).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return codes, scale.reshape(()) if per == "tensor" else scale.flatten()


def quantize_cache(
    key: torch.Tensor, value: torch.Tensor, *, per: str = "head", paged: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round keys and values to float8_e4m3fn, with the scales that use its whole range.

    Parameters
    ----------
    key, value : Tensor
        ``(B, Hkv, S, D)``, or caches ``(pages, page_size, Hkv, D)`` with ``paged=True``.
    per : {"head", "tensor"}
        One scale for each key head, or one in all. A scale is the largest finite size divided by
        448, the largest number of the type.
    paged : bool
        Whether the tensors are paged caches, which their shape does not tell: without it a paged
        cache has a scale for each slot of the pages in place of one for each key head. Unused slots
        count too, so they should hold zeros.

    Returns
    -------
    key8, value8 : Tensor
        float8_e4m3fn, ``key / key_scale`` rounded to the nearest; infinities become 448 in size.
    key_scale, value_scale : Tensor
        float32, ``(Hkv,)`` or 0-d, on the same device.

    Raises
    ------
    TypeError, ValueError
        Wrong kinds; tensors that are not of four dimensions and a floating-point dtype.

    Examples
    --------
    >>> import torch
    >>> from sparse_attn import quantize_cache
    >>> key, value = torch.randn(2, 1, 4, 64, 16)
    >>> key8, value8, key_scale, value_scale = quantize_cache(key, value)
    >>> error = (key8.float() * key_scale[:, None, None] - key).abs()
    >>> bool((error <= key.abs() / 16 + key_scale[:, None, None] / 1024).all())
    True

    Notes
    -----
    The format is that of Micikevicius et al. 2022 (FP8 Formats for Deep Learning), section 3.
    """
    owner = "quantize_cache"
    for name, tensor in (("key", key), ("value", value)):
        check_dense(owner, name, tensor)
        if tensor.dim() != 4 or not tensor.is_floating_point():
            got = f"shape {tuple(tensor.shape)} of {dtype_name(tensor.dtype)}"
            raise refuse(owner, f"{name} of four dimensions and a floating-point dtype", got)
    check_choice(owner, "per", per, ("head", "tensor"))
    check_kind(owner, "paged", paged, bool, "a bool")
    head_axis = 2 if paged else 1
    key8, key_scale = _quantized(key, head_axis, per)
    value8, value_scale = _quantized(value, head_axis, per)
    return key8, value8, key_scale, value_scale
