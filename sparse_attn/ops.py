"""Fake kernels, the refusing backward and the door to the registered ops.

Everything is derived from the schemas that the C++ library registers: every attention op has one
fake kernel, its ``_out`` twin another. The ops are for inference, so a backward pass raises one
sentence. ``call`` turns the errors of the ops into Python's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import forward_ad

from . import _load

__all__ = ["ATTENTION_OPS", "TOOL_OPS", "call"]

#: Ops with the common arguments; each has a twin ``<op>_out``.
ATTENTION_OPS = (
    "naive",
    "fused",
    "band",
    "dilated",
    "strided",
    "block_sparse",
    "topk",
    "block_topk",
)
#: Ops that prepare or combine; ``merge_states`` has a twin ``merge_states_out``.
TOOL_OPS = ("select_blocks", "list_from_mask", "merge_states")


def _bound(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call by name, with the schema's defaults."""
    bound = {}
    for index, argument in enumerate(op._schema.arguments):
        if index < len(args):
            bound[argument.name] = args[index]
        else:
            bound[argument.name] = kwargs.get(argument.name, argument.default_value)
    return bound


def _check_meta(name: str, tensors: dict[str, Any]) -> None:
    """Refuse meta tensors beside others: torch sends such a call here, where nothing is computed.

    Tensors of ``torch.compile`` report the device that they stand for.
    """
    (first_name, first), *others = tensors.items()
    for argument, value in others:
        if not isinstance(value, torch.Tensor):
            continue
        if (value.device.type == "meta") != (first.device.type == "meta"):
            argument = argument.replace("offsets", "offset")
            raise RuntimeError(
                f"sparse_attn::{name}: expected {argument} on {first_name}'s device "
                f"{first.device}, got {value.device}"
            )


def _attention_fake(op: Any) -> Callable[..., Any]:
    def fake(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        bound = _bound(op, args, kwargs)
        _check_meta(op._schema.name.partition("::")[2], bound)
        query = bound["query"]
        shape = query.shape[:3] if bound["return_lse"] else (0,)
        return torch.empty_like(query), query.new_empty(shape, dtype=torch.float32)

    return fake


def _select_blocks_fake(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    bound = _bound(torch.ops.sparse_attn.select_blocks.default, args, kwargs)
    _check_meta("select_blocks", bound)
    query, key, block = bound["query"], bound["key"], bound["block_size"]
    batch, heads, seq_q = query.shape[:3]
    num_q, num_kv = -(-seq_q // block), -(-key.shape[2] // block)
    counts = query.new_empty((batch, heads, num_q), dtype=torch.int32)
    return counts, query.new_empty((batch, heads, num_q, num_kv), dtype=torch.int32)


def _list_from_mask_fake(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    counts = mask.new_empty(mask.shape[:-1], dtype=torch.int32)
    return counts, mask.new_empty(mask.shape, dtype=torch.int32)


def _merge_states_fake(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    states = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    _check_meta("merge_states", states)
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


def _out_fake(name: str) -> Callable[..., None]:
    op = getattr(torch.ops.sparse_attn, f"{name}_out").default

    def fake(*args: Any, **kwargs: Any) -> None:
        _check_meta(name, _bound(op, args, kwargs))

    return fake


def _refuse_backward(name: str) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"sparse_attn::{name}: expected inference (torch.no_grad() or inference_mode()), "
            "got a backward pass"
        )

    return backward


def _refuse_grad_mode(name: str) -> Callable[..., None]:
    """Autograd kernel of an ``_out`` op: out= cannot carry a gradient."""
    op = getattr(torch.ops.sparse_attn, name).default

    def kernel(*args: Any, **kwargs: Any) -> None:
        if torch.is_grad_enabled():
            for argument, value in _bound(op, args, kwargs).items():
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    raise RuntimeError(
                        f"sparse_attn::{name.removesuffix('_out')}: expected out= under "
                        f"torch.no_grad(), got {argument} that requires grad"
                    )
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args, **kwargs)

    return kernel


def _register() -> None:
    namespace = torch.ops.sparse_attn
    fakes = {name: _attention_fake(getattr(namespace, name).default) for name in ATTENTION_OPS}
    fakes["select_blocks"] = _select_blocks_fake
    fakes["list_from_mask"] = _list_from_mask_fake
    fakes["merge_states"] = _merge_states_fake
    for name, fake in fakes.items():
        torch.library.register_fake(f"sparse_attn::{name}", fake)
    for name in (*ATTENTION_OPS, "merge_states"):
        torch.library.register_autograd(f"sparse_attn::{name}", _refuse_backward(name))
        torch.library.register_fake(f"sparse_attn::{name}_out", _out_fake(name))
        kernel = _refuse_grad_mode(f"{name}_out")
        torch.library.impl(f"sparse_attn::{name}_out", "Autograd", kernel)


def _refuse_tangents(name: str, arguments: Iterable[Any]) -> None:
    """Forward-mode differentiation would lose the tangents without a word."""
    for value in arguments:
        if isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise RuntimeError(
                f"sparse_attn::{name.removesuffix('_out')}: expected inference (no dual tensors), "
                "got forward-mode differentiation"
            )


def _translated(error: RuntimeError) -> Exception:
    """Make the Python error of an op's sentence, which may carry torch's C++ trace behind it."""
    sentence = str(error).partition("\n")[0]
    if sentence.startswith("sparse_attn::"):
        not_served = sentence.partition(": ")[2].startswith("not served")
        return NotImplementedError(sentence) if not_served else ValueError(sentence)
    missing = isinstance(error, NotImplementedError) and "'CUDA' backend" in sentence
    if missing and _load.cuda_error is not None:
        return NotImplementedError(f"sparse_attn: no CUDA engines: {_load.cuda_error}")
    return error


def call(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call an op by name.

    Raises
    ------
    ValueError
        A wrong call: the op's sentence ``sparse_attn::<op>: expected X, got Y``.
    NotImplementedError
        A right call that no engine serves, or CUDA tensors without the CUDA library.
    RuntimeError
        A call under forward-mode differentiation: the ops are for inference.
    """
    op = getattr(torch.ops.sparse_attn, name).default
    if torch.compiler.is_compiling():
        return op(*args, **kwargs)
    if getattr(forward_ad, "_current_level", 0) >= 0:
        _refuse_tangents(name, (*args, *kwargs.values()))
    try:
        return op(*args, **kwargs)
    except RuntimeError as error:
        raise _translated(error) from None


_load.load()
_register()
