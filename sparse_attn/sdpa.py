"""`patch_sdpa`: a policy for models that call ``F.scaled_dot_product_attention`` themselves.

While the model's ``forward`` runs, a torch function mode meets every such call: calls with as many
queries as keys are layers, numbered in their order; all others (cross attention, decode with a
cache of the model's own) stay torch's. What is left, and why, is kept and said once.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from ._checks import check_kind, is_causal_bias, kind_of, refuse
from ._module_names import ask_about_sides, has_policy
from ._observe import attend_in
from ._warn import warn_once
from .patterns import Pattern
from .policy import Policy, as_policy

__all__ = ["PatchedSDPA", "is_patched", "patch_sdpa"]

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


class _Mode(TorchFunctionMode):
    """Turns SDPA's calls into ours, for one forward of the model."""

    def __init__(self, patch: PatchedSDPA) -> None:
        super().__init__()
        self.patch = patch
        self.layer = 0
        self.heads = 0  # key heads, the most of any layer
        self.refused: set[int] = set()  # layers that no engine serves

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not scaled_dot_product_attention:
            return func(*args, **kwargs)
        call = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        reason = _left(call)
        if reason is None:
            layer, self.layer = self.layer, self.layer + 1
            self.heads = max(self.heads, call["key"].shape[-3])
            try:
                return _attend(self.patch.policy, layer, call)
            except (ValueError, NotImplementedError) as error:
                self.refused.add(layer)
                reason = str(error)
        self.patch._leave(reason)
        return func(*args, **kwargs)


class _Forward:
    """What stands in for a model's forward; a copy of the model takes a copy of it along."""

    def __init__(self, patch: PatchedSDPA) -> None:
        self.__setstate__({"patch": patch})

    def __getstate__(self) -> dict[str, Any]:
        return {"patch": self.patch}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.patch: PatchedSDPA = state["patch"]
        # A graph of torch.compile that ends inside the mode would lose it.
        self._run = torch.compiler.disable(self.patch._run)

    @property
    def __wrapped__(self) -> Any:
        """The model's own forward, whose signature this has."""
        return self.patch._forward()

    @property
    def __code__(self) -> Any:
        """Where a forward is written, as torch.export asks of it."""
        return type(self).__call__.__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)


class PatchedSDPA:
    """A model whose SDPA calls follow a policy, until `restore` or the end of the ``with`` block.

    Attributes
    ----------
    model : nn.Module
    policy : Policy
    layers : int or None
        Calls that were numbered in the last forward, None before the first.
    left : dict of str to int
        Reasons for which calls stayed torch's, with their number.

    Examples
    --------
    >>> import torch, sparse_attn as sa
    >>> class Attend(torch.nn.Module):
    ...     def forward(self, x):
    ...         return torch.nn.functional.scaled_dot_product_attention(x, x, x)
    >>> model = Attend()
    >>> with sa.patch_sdpa(model, sa.Band(7)) as patched:
    ...     out = model(torch.randn(1, 2, 64, 16))
    >>> patched.layers, dict(patched.left)
    (1, {})
    """

    def __init__(self, model: nn.Module, policy: Policy) -> None:
        self.model, self.policy = model, policy
        self.layers: int | None = None
        self.left: Counter[str] = Counter()
        self._refused: set[int] = set()
        self._own = vars(model).get("forward")
        self._patched = _Forward(self)
        model.forward = self._patched

    def __repr__(self) -> str:
        """Return what is patched, by which pattern, and what the last forward had of it."""
        name, pattern = type(self.model).__name__, self.policy.pattern
        return f"PatchedSDPA({name}, {pattern}, layers={self.layers}, left={dict(self.left)})"

    def restore(self) -> None:
        """Give the model its own attention back; a model that has it stays as it is.

        Examples
        --------
        >>> import torch, sparse_attn as sa
        >>> model = torch.nn.Identity()
        >>> patched = sa.patch_sdpa(model, sa.Band(7))
        >>> patched.restore()
        >>> "forward" in vars(model)
        False
        """
        if vars(self.model).get("forward") is not self._patched:
            return
        if self._own is None:
            del self.model.forward
        else:
            self.model.forward = self._own

    def _forward(self) -> Any:
        """Return the model's own forward."""
        return type(self.model).forward.__get__(self.model) if self._own is None else self._own

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        with _Mode(self) as mode:
            result = self._forward()(*args, **kwargs)
        self.layers, self._refused = mode.layer, mode.refused
        name = type(self.model).__name__
        if mode.layer:  # a decode with a cache of the model's own has none
            self.policy.check_model(mode.layer, mode.heads, name)
        elif not self.left:
            warn_once(
                f"calls of {name}",
                f"sparse_attn.patch_sdpa: {name}: expected calls of F.scaled_dot_product_attention "
                "in its forward, got none: the policy changes nothing",
            )
        return result

    def _leave(self, reason: str) -> None:
        if reason not in self.left:
            name = type(self.model).__name__
            warnings.warn(f"sparse_attn.patch_sdpa: {name}: left to torch: {reason}", stacklevel=2)
        self.left[reason] += 1

    def __enter__(self) -> PatchedSDPA:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()


def patch_sdpa(model: nn.Module, policy: Policy | Pattern) -> PatchedSDPA:
    """Run a model's own calls of ``F.scaled_dot_product_attention`` under a policy.

    Calls with as many queries as keys are the layers, numbered from 0 in the order of a forward;
    others (cross attention, a cache of the model's own) stay torch's. So do calls with dropout and
    those that no engine serves: `left` counts them by reason, and a warning says each reason once.
    A forward without such a call warns too.

    Parameters
    ----------
    model : nn.Module
        Its ``forward`` is wrapped, nothing else changes; a transformers model has
        ``integrations.transformers.apply``, ``nn.MultiheadAttention`` has `swap_attention`.
    policy : Policy or Pattern
        A bare pattern runs in every call, whatever its length.

    Returns
    -------
    PatchedSDPA
        Undone by ``restore()``, or at the end of a ``with`` block. A copy of the model is patched
        too, by ``copied.forward.patch``.

    Raises
    ------
    TypeError
        No module, or one of ``torch.jit``; neither a policy nor a pattern.
    ValueError
        A model that is patched already, or has a policy of `apply`. In the forward: a policy for
        another number of layers or key heads (the most of any layer).

    Examples
    --------
    >>> import torch, sparse_attn as sa
    >>> class Attend(torch.nn.Module):
    ...     def forward(self, x):
    ...         return torch.nn.functional.scaled_dot_product_attention(x, x, x)
    >>> model, x = Attend(), torch.randn(1, 2, 64, 16)
    >>> with sa.patch_sdpa(model, sa.Band(7)) as patched:
    ...     out = model(x)
    >>> torch.equal(out, sa.band_attention(x, x, x, 7)), patched.layers
    (True, 1)
    """
    check_kind("patch_sdpa", "model", model, nn.Module, "an nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        got = f"{kind_of(model)} of torch.jit, whose calls are in its graph"
        raise TypeError(f"sparse_attn.patch_sdpa: expected model to be an nn.Module, got {got}")
    chosen = as_policy(policy)
    if is_patched(model):
        got = f"{type(model).__name__}; model.forward.patch.restore() undoes the first patch"
        raise refuse("patch_sdpa", "a model that is not patched", got)
    if has_policy(model):
        got = f"{type(model).__name__} under one; restore it first, or patch a part without one"
        raise refuse("patch_sdpa", "a model without a policy of apply", got)
    return PatchedSDPA(model, chosen)


def is_patched(model: nn.Module) -> bool:
    """Whether `patch_sdpa` wrapped the model's forward."""
    return isinstance(vars(model).get("forward"), _Forward)


def _left(call: dict[str, Any]) -> str | None:
    """Say why a call stays torch's; None for a layer."""
    query, key = call["query"], call["key"]
    if call.get("dropout_p"):
        return f"dropout_p={call['dropout_p']}"
    if query.is_nested:  # some have no shape to ask for
        return "nested tensors"
    for tensor in (query, key):
        if tensor.dim() != 4:
            return f"tensors of {tensor.dim()} dimensions, expected (B, H, S, D)"
    if query.shape[-2] != key.shape[-2]:
        return "calls whose numbers of queries and keys differ (cross attention, a cache)"
    return None


def _attend(policy: Policy, layer: int, call: dict[str, Any]) -> torch.Tensor:
    query, key = call["query"], call["key"]
    length, scale, mask = query.shape[-2], call.get("scale"), call.get("attn_mask")
    by_bias = is_causal_bias(mask)  # with as many queries as keys both of torch's are the same
    is_causal = by_bias or bool(call.get("is_causal", False))
    pattern = policy.choose(layer, length, length)
    if mask is None and not is_causal:
        ask_about_sides(f"sparse_attn.patch_sdpa: layer {layer}", pattern, length)
    return attend_in(
        layer,
        query,
        key,
        call["value"],
        pattern,
        attn_mask=None if by_bias else mask,
        is_causal=is_causal,
        scale=None if scale is None else float(scale),  # torch takes a tensor of one number too
    )
