"""What differentiation meets: the ops are for inference and say so, one sentence each.

An output requires grad where an input does, and its backward raises: by an op of its own, so that
``torch.compile`` can trace a backward that never runs. Forward-mode differentiation, which would
lose the tangents without a word, the gradients of ``torch.func``, and ``out=`` for inputs that
require grad raise at once. ``out=`` counts as changed, for backwards of other ops that saved it.
Registered by ``ops``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from ._ops import add_op_namespace_prefix, ops
from ._schema import named_arguments, overload, written_by

__all__ = ["InferenceOnly", "is_tracked", "refuse_gradients", "register_refusals"]


class InferenceOnly(RuntimeError):
    """Differentiation of an op that is for inference."""


def _wants_gradient(arguments: Iterable[Any]) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in arguments
    )


def is_tracked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether differentiation of any kind looks at a call with these arguments.

    No other call needs the autograd kernels, which in Python cost as much as the op's own way down.
    """
    return (
        getattr(forward_ad, "_current_level", 0) >= 0
        or torch._C._are_functorch_transforms_active()
        or (torch.is_grad_enabled() and torch._C._any_requires_grad(*args, **kwargs))
    )


def _refuse_tangents(name: str, arguments: Iterable[Any]) -> None:
    if getattr(forward_ad, "_current_level", 0) < 0:
        return
    for value in arguments:
        if isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise InferenceOnly(
                f"sparse_attn::{name}: expected inference (no dual tensors), "
                "got forward-mode differentiation"
            )


def _refuse_backward(
    grad: torch.Tensor, sizes: Sequence[int], dtype: torch.dtype, name: str
) -> torch.Tensor:
    """Raise in place of the gradient, of these sizes and dtype, of an input of op `name`."""
    raise InferenceOnly(
        f"sparse_attn::{name}: expected inference (torch.no_grad() or inference_mode()), "
        "got a backward pass"
    )


def _refuse_backward_fake(
    grad: torch.Tensor, sizes: Sequence[int], dtype: torch.dtype, name: str
) -> torch.Tensor:
    return grad.new_empty(sizes, dtype=dtype)


def _kernel(name: str) -> Callable[..., Any]:
    """Autograd kernel of a functional op."""
    op = overload(name)

    def below(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args, **kwargs)

    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, kwargs: dict[str, Any], *args: Any) -> Any:
            ctx.inputs = [
                (value.shape, value.dtype) if isinstance(value, torch.Tensor) else None
                for value in args
            ]
            return below(*args, **kwargs)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
            refuse = ops.refuse_backward
            needed = zip(ctx.inputs, ctx.needs_input_grad[1:], strict=True)
            return None, *(
                refuse(grad, *given, name) if given and needs else None for given, needs in needed
            )

    def kernel(*args: Any, **kwargs: Any) -> Any:
        _refuse_tangents(name, (*args, *kwargs.values()))
        if _wants_gradient(args):
            if torch._C._are_functorch_transforms_active():  # they take no such Function
                raise InferenceOnly(
                    f"sparse_attn::{name}: expected inference (no torch.func.grad or vjp), "
                    "got an input that it differentiates"
                )
            return Refusing.apply(kwargs, *args)
        return below(*args, **kwargs)

    return kernel


def refuse_gradients(name: str, arguments: Mapping[str, Any], place: str = "out=") -> None:
    """Raise in grad mode where an argument of a call that writes into `place` requires grad."""
    if not torch.is_grad_enabled():
        return
    for argument, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise RuntimeError(
                f"sparse_attn::{name}: expected {place} under torch.no_grad(), "
                f"got {argument} that requires grad"
            )


def _writing_kernel(name: str, op: Any) -> Callable[..., None]:
    """Autograd kernel of an op that writes into its arguments, which carry no gradient."""
    place = "out=" if "out" in written_by(op) else "a call"

    def kernel(*args: Any, **kwargs: Any) -> None:
        arguments = named_arguments(op, args, kwargs)
        _refuse_tangents(name, arguments.values())
        refuse_gradients(name, arguments, place)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args, **kwargs)

    return kernel


def _changing_kernel(op: Any) -> Callable[..., None]:
    """Kernel that tells autograd which tensors an op writes into."""
    names = written_by(op)

    def kernel(*args: Any, **kwargs: Any) -> None:
        arguments = named_arguments(op, args, kwargs)
        written = [arguments[name] for name in names if arguments[name] is not None]
        torch.autograd.graph.increment_version(written)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return op(*args, **kwargs)

    return kernel


def register_refusals(functional: Iterable[str], writing: Mapping[str, str]) -> None:
    """Register the autograd kernels of ops, and the op that raises.

    Parameters
    ----------
    functional : iterable of str
        Ops that return new tensors.
    writing : mapping of str to str
        Ops that write into their arguments, and what sentences call them.
    """
    refusal = add_op_namespace_prefix("refuse_backward")
    torch.library.define(
        refusal, "(Tensor grad, SymInt[] sizes, ScalarType dtype, str op) -> Tensor"
    )
    torch.library.impl(refusal, "CompositeExplicitAutograd", _refuse_backward)
    torch.library.register_fake(refusal, _refuse_backward_fake)
    for name in functional:
        torch.library.impl(add_op_namespace_prefix(name), "Autograd", _kernel(name))
    for registered, name in writing.items():
        op = overload(registered)
        full_name = add_op_namespace_prefix(registered)
        torch.library.impl(full_name, "Autograd", _writing_kernel(name, op))
        torch.library.impl(full_name, "ADInplaceOrView", _changing_kernel(op))
