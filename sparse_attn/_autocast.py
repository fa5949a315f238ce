"""Autocast as SDPA has it: query, key and value are taken in the autocast dtype.

Inside ``torch.autocast`` a call may mix dtypes, as layers leave them. Masks in half precision
follow query; float64 stays and is refused. The ``out=`` twins are not cast, as torch's own are not.
Registered by ``ops``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ._ops import add_op_namespace_prefix
from ._schema import named_arguments, overload

__all__ = ["autocast", "is_autocast_enabled", "register_autocast"]

_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
_HALF = (torch.float16, torch.bfloat16)


def _cast(tensor: Any, kinds: tuple[torch.dtype, ...], device: str) -> Any:
    """Cast a tensor of one of `kinds` on the device type to its autocast dtype."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in kinds:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device)) if tensor.device.type == device else tensor


def is_autocast_enabled(device: str) -> bool:
    """Whether it is, on a type of devices that has one."""
    return device in _KEYS and torch.is_autocast_enabled(device)


def autocast(arguments: dict[str, Any], device: str) -> dict[str, Any]:
    """Return the arguments of a call, by name, as autocast makes them where it is enabled."""
    if not is_autocast_enabled(device):
        return arguments
    kinds = dict.fromkeys(("query", "key", "value"), (torch.float32, *_HALF)) | {"attn_mask": _HALF}
    changed = {
        name: _cast(arguments[name], kinds[name], device) for name in kinds if name in arguments
    }
    return arguments | changed


def _kernel(name: str, device: str) -> Callable[..., Any]:
    op = overload(name)
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEYS[device]))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        arguments = autocast(named_arguments(op, args, kwargs), device)
        with torch._C._ExcludeDispatchKeyGuard(keys):  # within it autocast is off
            return op(**arguments)

    return kernel


def register_autocast(names: Iterable[str]) -> None:
    """Register the autocast kernels of functional ops, for every device type."""
    for name in names:
        for device, key in _KEYS.items():
            torch.library.impl(add_op_namespace_prefix(name), key, _kernel(name, device))
