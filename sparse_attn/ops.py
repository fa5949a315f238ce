"""Fake kernels and the door to the registered ops.

Everything is derived from the schemas that the C++ library registers: every attention op has one
fake kernel, its ``_out`` twin another; what differentiation and autocast meet stands in
``_autograd`` and ``_autocast``. ``call`` turns the errors of the ops into Python's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import torch
from torch.compiler import is_compiling

from . import _load
from ._autocast import register_autocast
from ._autograd import InferenceOnly, is_tracked, refuse_gradients, register_refusals
from ._ops import add_op_namespace_prefix
from ._schema import ATTENTION_OPS, TOOL_OPS, WRITING_OPS, named_arguments, overload, written_by

__all__ = [
    "ATTENTION_OPS",
    "TOOL_OPS",
    "ask_engine",
    "call",
    "empty_output",
    "join_heads",
    "lse_shape",
]

_NAMESPACE = add_op_namespace_prefix("").rstrip(":")
#: torch's words for tensors that the op has no kernel for.
_NO_KERNEL = re.compile(rf"Could not run '{_NAMESPACE}::(\w+)' .* the '(\w+)' backend")
#: What classes of tensors raise where they have no rule for the op: its name, or that none took it.
_NO_RULE = re.compile(
    rf"(?:Multiple dispatch failed for 'torch\._ops\.)?{_NAMESPACE}\.(\w+)\.default(?:'|$)"
)
#: What torch.vmap raises of ops that return no tensors, of which it makes no calls.
_NO_BATCHES = re.compile(rf"Batching rule not implemented for {_NAMESPACE}::(\w+)")
_WITH_TWIN = (*ATTENTION_OPS, "merge_states")
#: What each op calls, without the frame of its class.
_OPS = {
    name: overload(name)._op
    for name in (*ATTENTION_OPS, *TOOL_OPS, *(f"{name}_out" for name in _WITH_TWIN))
}


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


def lse_shape(query: torch.Tensor) -> tuple[int, ...]:
    """Shape of the lse of a query, ``(B, Hq, Sq, D)`` or packed ``(T, Hq, D)``."""
    return (query.shape[1], query.shape[0]) if query.dim() == 3 else tuple(query.shape[:3])


def empty_output(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Make the output of a call: of query's dtype and order of strides, with value's head dim."""
    if query.shape[-1] == value.shape[-1]:
        out = torch.empty_like(query)
        if out.stride(-1) == 1:  # not so where rows overlap, a step of 1 apart
            return out
    shape = (*query.shape[:-1], value.shape[-1])
    return torch.empty_permuted(shape, _stride_order(query), dtype=query.dtype, device=query.device)


def join_heads(query: torch.Tensor, outs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join outputs of neighbouring heads, in query's order of strides as one call's would be."""
    order = _stride_order(query)
    joined = torch.cat([out.permute(order) for out in outs], order.index(1))
    return joined.permute([order.index(dim) for dim in range(query.dim())])


def _stride_order(query: torch.Tensor) -> list[int]:
    """Return the dimensions of a query from the largest stride to the head dim's."""
    strides = query.stride()
    order: list[int] = []
    for dim in range(query.dim() - 1):  # torch.compile follows no sort by traced strides
        larger = [other for other in order if strides[other] >= strides[dim]]
        order.insert(len(larger), dim)
    return [*order, query.dim() - 1]


def _attention_fake(op: Any) -> Callable[..., Any]:
    def fake(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        arguments = named_arguments(op, args, kwargs)
        _check_meta(op._schema.name.partition("::")[2], arguments)
        query = arguments["query"]
        shape = lse_shape(query) if arguments["return_lse"] else (0,)
        out = empty_output(query, arguments["value"])
        return out, query.new_empty(shape, dtype=torch.float32)

    return fake


def _select_blocks_fake(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = named_arguments(overload("select_blocks"), args, kwargs)
    _check_meta("select_blocks", arguments)
    query, key, block = (arguments[name] for name in ("query", "key", "block_size"))
    rows = arguments["block_rows"] or block
    starts, starts_k, table = (arguments[name] for name in ("cu_seq_q", "cu_seq_k", "block_table"))
    batch, heads, queries = query.shape[0], query.shape[1], query.shape[-2]
    if starts is not None:
        batch, queries = starts.shape[0] - 1, torch.sym_min(arguments["max_q"], query.shape[0])
    heads_kv, keys = key.shape[1], key.shape[-2]
    if starts_k is not None:
        keys = torch.sym_min(arguments["max_k"], key.shape[0])
    if table is not None:
        heads_kv, keys = key.shape[2], table.shape[1] * key.shape[1]
    heads = heads_kv if arguments["group"] == "kv" else heads
    counts = query.new_empty((batch, heads, -(-queries // rows)), dtype=torch.int32)
    indices = query.new_empty((*counts.shape, -(-keys // block)), dtype=torch.int32)
    return counts, indices


def _list_from_mask_fake(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    counts = mask.new_empty(mask.shape[:-1], dtype=torch.int32)
    return counts, mask.new_empty(mask.shape, dtype=torch.int32)


def _merge_states_fake(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    states = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    _check_meta("merge_states", states)
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


def _writing_fake(name: str, op: Any) -> Callable[..., None]:
    """Fake kernel of an op that writes into its arguments; sentences call it `name`."""
    places = written_by(op)

    def fake(*args: Any, **kwargs: Any) -> None:
        arguments = named_arguments(op, args, kwargs)
        _check_meta(name, arguments)
        written = {place: arguments[place] for place in places if arguments[place] is not None}
        for place, tensor in written.items():
            _check_offset(name, place, tensor)
        for pair in combinations(written.items(), 2):
            _check_parts(name, *pair)

    return fake


def _check_offset(name: str, place: str, tensor: torch.Tensor) -> None:
    """Refuse to write into a view whose place in its storage follows from sizes left open.

    torch's Inductor takes such an offset for 0 and writes at the start of the whole tensor. The
    offset of an input of the graph is a symbol of its own, and arrives.
    """
    offset = tensor.storage_offset()
    if isinstance(offset, torch.SymInt):
        offset = offset.node.expr
        if not offset.is_number and not offset.is_Symbol:
            raise RuntimeError(
                f"sparse_attn::{name}: expected {place} at a fixed place of its storage, got one "
                f"that moves with open sizes ({offset}), which compilation loses: make the view "
                "outside of the graph"
            )


def _check_parts(
    name: str, first: tuple[str, torch.Tensor], second: tuple[str, torch.Tensor]
) -> None:
    """Refuse to write into two parts of one storage, one after the other, at an open place.

    Inductor copies one of them, from the start of the storage. Parts that interleave arrive.
    """
    tensors = first[1], second[1]
    if not any(isinstance(tensor.storage_offset(), torch.SymInt) for tensor in tensors):
        return
    if len({tensor.untyped_storage()._cdata for tensor in tensors}) == 2:
        return
    (begin, end), (other_begin, other_end) = map(_place, tensors)
    if end <= other_begin or other_end <= begin:
        raise RuntimeError(
            f"sparse_attn::{name}: expected {first[0]} and {second[0]} of storages of their own, "
            "got parts of one, of sizes left open, which compilation mixes up"
        )


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a traced tensor begins and ends in its storage, as far as the example tells."""
    numbers = (tensor.storage_offset(), *tensor.shape, *tensor.stride())
    hints = [n.node.hint or 0 if isinstance(n, torch.SymInt) else n for n in numbers]
    sizes, strides = hints[1 : tensor.dim() + 1], hints[tensor.dim() + 1 :]
    reach = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return hints[0], hints[0] + reach + 1


def _register() -> None:
    fakes = {name: _attention_fake(overload(name)) for name in ATTENTION_OPS}
    fakes["select_blocks"] = _select_blocks_fake
    fakes["list_from_mask"] = _list_from_mask_fake
    fakes["merge_states"] = _merge_states_fake
    for name, fake in fakes.items():
        torch.library.register_fake(add_op_namespace_prefix(name), fake)
    writing = {f"{name}_out": name for name in _WITH_TWIN} | {name: name for name in WRITING_OPS}
    for op, name in writing.items():
        torch.library.register_fake(add_op_namespace_prefix(op), _writing_fake(name, overload(op)))
    register_refusals(_WITH_TWIN, writing)
    register_autocast((*ATTENTION_OPS, "select_blocks"))


def _translated(error: Exception) -> Exception:
    """Make the Python error of an op's sentence, which may carry torch's C++ trace after it."""
    sentence = str(error).partition("\n")[0]
    if sentence.startswith("sparse_attn::"):
        not_served = sentence.partition(": ")[2].startswith("not served")
        return NotImplementedError(sentence) if not_served else ValueError(sentence)
    missing = _NO_RULE.match(sentence)
    if missing is not None:
        op = missing.group(1).removesuffix("_engine")
        return NotImplementedError(f"sparse_attn::{op}: not served: tensors of this class")
    missing = _NO_BATCHES.match(sentence)
    if missing is not None:
        op, what = missing.group(1), "to write"
        if op.endswith("_engine"):
            op, what = op.removesuffix("_engine"), "to ask for the engine"
        elif "size 0" in sentence:
            what = "none of its calls (a dimension of size 0)"
        return NotImplementedError(f"sparse_attn::{op}: not served: {what} under torch.vmap")
    missing = _NO_KERNEL.match(sentence)
    if missing is None:
        return error
    op, backend = missing.group(1).removesuffix("_engine"), missing.group(2)
    if backend == "CUDA" and _load.cuda_error is not None:
        return NotImplementedError(f"sparse_attn: no CUDA engines: {_load.cuda_error}")
    return NotImplementedError(
        f"sparse_attn::{op}: not served: tensors of torch's backend {backend}"
    )


def _negated(name: str) -> NotImplementedError:
    """Refusal to write into a negated view.

    torch has no rule for an op that may: it fails late, up to 2.11 with memory that others own.
    """
    what = "to write into a negated view (tensor.is_neg())"
    return NotImplementedError(f"sparse_attn::{name}: not served: {what}")


def call(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    written: tuple[torch.Tensor, ...] = (),
) -> Any:
    """Call an op by name, with positional arguments and keywords; `written` are what it changes.

    Raises
    ------
    ValueError
        A wrong call: the op's sentence ``sparse_attn::<op>: expected X, got Y``.
    NotImplementedError
        A right call that no engine serves, or CUDA tensors without the CUDA library.
    RuntimeError
        A call under forward-mode differentiation: the ops are for inference.
    """
    if is_compiling():
        return overload(name)(*args, **kwargs)
    op = _OPS[name]
    for tensor in written:
        if tensor.is_neg():
            raise _negated(name)
    try:
        # Inference mode leaves the autograd kernels out by itself.
        if (torch.is_inference_mode_enabled() and not written) or is_tracked(args, kwargs):
            return op(*args, **kwargs)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            result = op(*args, **kwargs)
        if written:  # what the kernel of ADInplaceOrView does
            torch.autograd.graph.increment_version(written)
        return result
    except InferenceOnly:
        raise
    except (RuntimeError, TypeError) as error:
        raise _translated(error) from None


def ask_engine(name: str, arguments: dict[str, Any]) -> str:
    """Ask which engine would serve a call of attention op `name`; nothing is computed.

    Returns
    -------
    str
        The engine, empty for none, then the reasons, a line each.

    Raises
    ------
    ValueError, NotImplementedError
        As the call would.
    """
    out = arguments.get("out")
    try:
        _check_meta(name, {"query": arguments["query"], **arguments})
        if arguments["query"].device.type == "meta":
            raise NotImplementedError(f"sparse_attn::{name}: not served: meta tensors have no data")
        if out is not None:
            refuse_gradients(name, arguments)
            if out.is_neg():
                raise _negated(f"{name}_out")
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            answer: str = overload(f"{name}_engine")(**arguments)
    except (RuntimeError, TypeError) as error:
        raise _translated(error) from None
    return answer


_register()
