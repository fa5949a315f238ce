"""`bound`: a policy on any model for the time of a ``with`` block, whatever its attention.

A transformers model, or one that holds one under a policy, takes `apply`; one with
``nn.MultiheadAttention`` takes `swap_attention`, any other `patch_sdpa`. A policy that the model
has is set aside, so that judging one never judges another; afterwards the model is as it was. Used
by ``quality.model`` and the advisor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from ._checks import check_kind, refuse
from ._module_names import LAYER, has_policy
from .nn import SparseMultiheadAttention, swap_attention
from .nn.swap import NESTED, undo_swap
from .patterns import Pattern
from .policy import Policy
from .sdpa import is_patched, patch_sdpa

__all__ = ["bound", "is_transformers_model"]


def is_transformers_model(model: nn.Module) -> bool:
    """Whether a model is of transformers, which is not imported for the question."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def _is_multihead(module: nn.Module) -> bool:
    return isinstance(module, (nn.MultiheadAttention, SparseMultiheadAttention))


@contextmanager
def bound(owner: str, model: nn.Module, policy: Policy | Pattern | None) -> Iterator[Any]:
    """Run `model` under `policy` inside, a `PatchedSDPA` where that does it; None is its own."""
    check_kind(owner, "model", model, nn.Module, "an nn.Module")
    if _is_multihead(model):
        raise refuse(owner, "a model that holds its attention", "an nn.MultiheadAttention itself")
    with _unpatched(model):
        if is_transformers_model(model) or has_policy(model):
            context: Any = _applied(model, policy)
        elif any(_is_multihead(module) for module in model.modules()):
            context = _swapped(model, policy)
        else:
            context = nullcontext() if policy is None else patch_sdpa(model, policy)
        with context as made:
            yield made


@contextmanager
def _unpatched(model: nn.Module) -> Iterator[None]:
    """Take every patch of `patch_sdpa` off inside, those of parts too."""
    patched = [(part, vars(part)["forward"]) for part in model.modules() if is_patched(part)]
    for _, forward in patched:
        forward.patch.restore()
    try:
        yield
    finally:
        for part, forward in patched:
            part.forward = forward


@contextmanager
def _applied(model: Any, policy: Policy | Pattern | None) -> Iterator[None]:
    from .integrations import transformers

    names = {LAYER, transformers.BEFORE}
    states = [
        (module, type(module), {name: vars(module)[name] for name in names & set(vars(module))})
        for module in model.modules()
    ]
    chosen = transformers.implementations(model)
    transformers.undo(model)
    try:
        if policy is not None:
            transformers.apply(model, policy)
        yield
    finally:
        transformers.undo(model)
        for module, kind, held in states:
            module.__class__ = kind
            vars(module).update(held)
        transformers.set_implementations(chosen)


@contextmanager
def _swapped(model: nn.Module, policy: Policy | Pattern | None) -> Iterator[None]:
    found = [
        (path, module)
        for path, module in model.named_modules(remove_duplicate=False)
        if _is_multihead(module)
    ]
    encoders = [m for m in model.modules() if isinstance(m, nn.TransformerEncoder)]
    nested = [(encoder.use_nested_tensor, vars(encoder).get(NESTED)) for encoder in encoders]
    undo_swap(model)
    try:
        if policy is not None:
            swap_attention(model, policy)
        yield
    finally:
        for path, module in found:
            model.set_submodule(path, module)
        for encoder, (now, before) in zip(encoders, nested, strict=True):
            encoder.use_nested_tensor = now
            vars(encoder).pop(NESTED, None)
            if before is not None:
                setattr(encoder, NESTED, before)
