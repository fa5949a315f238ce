"""Kinds and numbers of Python arguments, each refusal one sentence.

``sparse_attn.<owner>: expected <what>, got <value>``: a ``TypeError`` for a wrong kind, a
``ValueError`` for a wrong number. Called by patterns, layouts and functions; tensors are checked by
the ops alone.
"""

from __future__ import annotations

import builtins
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from numbers import Integral, Real
from typing import Any, TypeVar, cast

import torch

__all__ = [
    "LARGE",
    "MAX_LENGTH",
    "TRACED",
    "Integer",
    "Number",
    "as_device",
    "as_float",
    "as_given",
    "as_int32",
    "as_int64",
    "as_number",
    "broadcasts",
    "check_block",
    "check_blocks",
    "check_choice",
    "check_dense",
    "check_index",
    "check_integer",
    "check_kind",
    "check_length",
    "check_num_layers",
    "check_share",
    "check_tensor",
    "check_tensors",
    "check_window",
    "clamped",
    "dtype_name",
    "is_causal_bias",
    "is_dense",
    "kind_of",
    "refuse",
    "same_values",
    "without",
]

_Callable = TypeVar("_Callable", bound=Callable[..., Any])

#: Numbers that no length reaches are alike; the ops take 64 bits.
LARGE = 2**40
#: Most queries or keys of a call (``kMaxLength`` in csrc/interval.h), and so of a block.
MAX_LENGTH = 2**29 - 1
MAX_LAYERS = 2**16  # policies list layers
#: What a length is while torch.jit.trace follows a call, and what to do.
TRACED = "Tensor; torch.jit.trace does not tell lengths, torch.export.export does"

#: An op's sentence about a number of a tensor that is the first or the last of int32.
_AT_AN_END = re.compile(r": expected (?P<name>\w+)\b.*, got (?P<sign>-?)214748364[78]$")

#: Not among them: bool, quantized numbers, numbers of less than 8 bits, bits without a meaning.
_WHOLE = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)

Integer = (int, Integral, torch.SymInt)
Number = (int, float, Real, torch.SymInt, torch.SymFloat)


def kind_of(value: object) -> str:
    """Name of a value's kind, for sentences; with its module where Python has one of that name."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value)
    same_name = hasattr(builtins, kind.__name__) and kind.__module__ != "builtins"
    return f"{kind.__module__}.{kind.__name__}" if same_name else kind.__name__


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name as the ops' sentences have it: ``float32``."""
    return str(dtype).removeprefix("torch.")


def refuse(owner: str, what: str, got: object) -> ValueError:
    """Make the error of a wrong number."""
    return ValueError(f"sparse_attn.{owner}: expected {what}, got {got}")


def as_float(number: Any) -> float:
    """Return `number` as a float, infinite where no float is as large: the ops refuse that."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def as_number(owner: str, name: str, value: torch.Tensor, what: str) -> Any:
    """Return the number of a 0-d tensor, as torch does, but of a GPU's, which it would wait for."""
    if value.dim():
        got = f"a tensor of shape {tuple(value.shape)}"
    elif value.requires_grad:
        got = f"a tensor that requires grad; write {name}.item()"
    elif value.device.type != "cpu":
        got = f"a tensor on {value.device}; write {name}.item(), which waits for the device"
    else:
        return value.item()
    raise TypeError(f"sparse_attn.{owner}: expected {name} to be {what}, got {got}")


def is_index(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds whole numbers, of a dtype that torch converts."""
    return tensor.dtype in _WHOLE


def check_index(owner: str, name: str, tensor: torch.Tensor) -> None:
    """Raise ``ValueError`` unless a tensor, which Python is to convert, holds whole numbers."""
    if not is_index(tensor):
        raise refuse(owner, f"{name} of an integer dtype", dtype_name(tensor.dtype))


def as_int32(owner: str, name: str, indices: torch.Tensor) -> torch.Tensor:
    """Return a tensor of whole numbers as int32, numbers beyond it at its ends."""
    check_index(owner, name, indices)
    if indices.dtype == torch.int32 or not is_dense(indices):
        return indices
    ends = torch.iinfo(torch.int32)
    return as_int64(owner, name, indices).clamp(ends.min, ends.max).to(torch.int32)


def as_given(error: ValueError, given: Mapping[str, Any]) -> ValueError:
    """Reword an op's error for the tensors that the caller passed: `as_int32` cut its numbers."""
    found = _AT_AN_END.search(str(error))
    if found is None:
        return error
    tensor = given.get(found["name"])
    if not isinstance(tensor, torch.Tensor) or tensor.dtype == torch.int32:
        return error
    return ValueError(f"{error} or {'less' if found['sign'] else 'more'}")


def as_int64(owner: str, name: str, indices: torch.Tensor) -> torch.Tensor:
    """Return a tensor of whole numbers as int64, numbers beyond it at its end."""
    check_index(owner, name, indices)
    if not is_dense(indices):
        return indices
    if indices.dtype != torch.uint64:
        return indices.long()
    bits = indices.view(torch.int64)
    return torch.where(bits < 0, torch.iinfo(torch.int64).max, bits)


def check_kind(owner: str, name: str, value: object, kinds: Any, what: str) -> None:
    """Raise ``TypeError`` unless `value` is one of `kinds`; a bool is no number."""
    if type(value) is kinds:
        return
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise TypeError(f"sparse_attn.{owner}: expected {name} to be {what}, got {kind_of(value)}")


def check_tensor(owner: str, name: str, value: object) -> None:
    """Raise ``TypeError`` unless `value` is a tensor."""
    if not isinstance(value, torch.Tensor):
        check_kind(owner, name, value, torch.Tensor, "a tensor")


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has sizes and strides, as nested and sparse ones have not."""
    return tensor.layout is torch.strided and not tensor.is_nested


def check_dense(owner: str, name: str, value: object) -> None:
    """Raise ``TypeError`` unless `value` is a tensor with sizes and strides.

    For what Python computes with before an op, which refuses other tensors, gets it.
    """
    check_tensor(owner, name, value)
    assert isinstance(value, torch.Tensor)
    if not is_dense(value):
        got = "a nested tensor" if value.is_nested else f"one of layout {value.layout}"
        raise TypeError(
            f"sparse_attn.{owner}: expected {name} to be a dense (strided) tensor, got {got}"
        )


def broadcasts(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether the last sizes of a shape broadcast to those of `whole`.

    As many sizes are compared as the shorter of both has.
    """
    return all(mine in (1, size) for mine, size in zip(shape[::-1], whole[::-1], strict=False))


def is_causal_bias(mask: object) -> bool:
    """Whether a mask is one of ``torch.nn.attention.bias``, whose own values were never written."""
    if type(mask) is torch.Tensor or not isinstance(mask, torch.Tensor):
        return False
    from torch.nn.attention.bias import CausalBias  # its import takes a second

    return isinstance(mask, CausalBias)


def check_tensors(
    owner: str,
    query: object,
    key: object,
    value: object,
    names: tuple[str, ...] = ("query", "key", "value"),
) -> None:
    """Raise ``TypeError`` unless these are tensors."""
    if type(query) is type(key) is type(value) is torch.Tensor:
        return
    for name, tensor in zip(names, (query, key, value), strict=True):
        check_tensor(owner, name, tensor)


def same_values(mine: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal in kind and content; reading them waits for the device."""
    if mine is other:
        return True
    alike = (mine.shape, mine.dtype, mine.device) == (other.shape, other.dtype, other.device)
    return alike and not mine.is_meta and torch.equal(mine, other)


def check_integer(owner: str, name: str, value: Any, least: int) -> int:
    """Return `value` when it is an integer of at least `least`."""
    if type(value) is int and value >= least:
        return value
    if isinstance(value, torch.Tensor) and torch.jit.is_tracing():
        raise TypeError(f"sparse_attn.{owner}: expected {name} to be an int, got {TRACED}")
    check_kind(owner, name, value, Integer, "an int")
    if value < least:
        raise refuse(owner, f"{name} of at least {least}", value)
    return cast(int, value if isinstance(value, (int, torch.SymInt)) else int(value))


def check_length(owner: str, name: str, value: Any, least: int = 0) -> int:
    """Return `value` when it is a number of queries or keys that a call may have."""
    number = check_integer(owner, name, value, least)
    if number > MAX_LENGTH:
        raise refuse(owner, f"{name} of at most {MAX_LENGTH}", value)
    return number


def as_device(owner: str, device: Any) -> torch.device:
    """Return what names a device as one; whether the machine has it is torch's to say."""
    if isinstance(device, torch.device):
        return device
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        got = repr(device) if isinstance(device, (str, int)) else kind_of(device)
        kind = TypeError if not isinstance(device, (str, int)) else ValueError
        what = "device to be a torch.device or its name, such as 'cuda:0'"
        raise kind(f"sparse_attn.{owner}: expected {what}, got {got}") from None


def check_num_layers(owner: str, value: Any, least: int = 1) -> int:
    """Return `value` when it is a number of layers that a model may have."""
    number = check_integer(owner, "num_layers", value, least)
    if number > MAX_LAYERS:
        raise refuse(owner, f"num_layers of at most {MAX_LAYERS}", value)
    return number


def check_share(owner: str, name: str, value: Any) -> float:
    """Return `value` when it is a number above 0 and up to 1."""
    check_kind(owner, name, value, Number, "a float")
    if not 0 < value <= 1:
        raise refuse(owner, f"{name} above 0 and up to 1", value)
    return float(value)


def serves_head_dim(size: int) -> bool:
    """Whether the ops take heads of that size."""
    return size % 8 == 0 and size <= 256


def check_block(owner: str, name: str, value: Any) -> int:
    """Return `value` when it is a positive multiple of 16."""
    check_kind(owner, name, value, Integer, "an int")
    if value < 16 or value % 16 != 0:
        raise refuse(owner, f"{name} that is a positive multiple of 16", value)
    if value > MAX_LENGTH:
        raise refuse(owner, f"{name} of at most {MAX_LENGTH}", value)
    return int(value)


def check_blocks(owner: str, block_q: Any, block_kv: Any) -> None:
    """Refuse sizes that blocks of a layout do not have; rows may be 1, a list for each query."""
    check_kind(owner, "block_q", block_q, Integer, "an int")
    if block_q != 1:
        check_block(owner, "block_q", block_q)
    check_block(owner, "block_kv", block_kv)


def check_choice(owner: str, name: str, value: Any, choices: Sequence[str]) -> str:
    """Return `value` when it is one of the words in `choices`."""
    check_kind(owner, name, value, str, "a str")
    if value not in choices:
        raise refuse(owner, f"{name} to be one of {', '.join(choices)}", repr(value))
    return value


def check_window(owner: str, window: Any, name: str = "window") -> tuple[int | None, int | None]:
    """Return the two sides of `window`: an int is both sides, None a side without a limit."""
    if type(window) is tuple and len(window) == 2:
        left, right = window
        if type(left) is type(right) is int and left >= 0 and right >= 0:
            return window  # as most calls have it
    elif type(window) is int and window >= 0:
        return window, window
    if isinstance(window, (tuple, list)):
        if len(window) != 2:
            raise refuse(owner, f"{name} with two sides (left, right)", tuple(window))
        left, right = window
    else:
        what = "an int or a pair (left, right)"
        if window is None:
            got = "None; (None, None) has no limit on either side"
            raise TypeError(f"sparse_attn.{owner}: expected {name} to be {what}, got {got}")
        check_kind(owner, name, window, Integer, what)
        left = right = window
    return _check_side(owner, name, "left", left), _check_side(owner, name, "right", right)


def _check_side(owner: str, name: str, side: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, Integer) and value == -1:  # "no limit", as others write it
        what = f"{name}'s {side} side of at least 0"
        raise refuse(owner, what, f"{value}; None means no limit")
    return check_integer(owner, f"{name}'s {side} side", value, 0)


def clamped(number: Any) -> Any:
    """Return `number` where the ops can take it, -LARGE or LARGE beyond; None stays None.

    So does a size of a graph, which fits: AOTInductor takes no limits of one as an op's argument.
    """
    if number is None or isinstance(number, torch.SymInt):
        return number
    if type(number) is int and -LARGE <= number <= LARGE:
        return number
    return max(min(number, LARGE), -LARGE)


def without(**advice: str) -> Callable[[_Callable], _Callable]:
    """Make a function or class refuse keywords that it no longer has, each with what to write."""

    def decorate(target: _Callable) -> _Callable:
        name = target.__name__
        function = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]

        @wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for keyword, instead in advice.items():
                if keyword in kwargs:
                    raise TypeError(f"sparse_attn.{name}: expected {instead}, got {keyword}=")
            return function(*args, **kwargs)

        if not isinstance(target, type):
            return cast(_Callable, checked)
        target.__init__ = checked  # type: ignore[misc]
        return target

    return decorate
