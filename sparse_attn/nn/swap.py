"""`swap_attention`: the ``torch.nn.MultiheadAttention`` of a model replaced, in place, and back."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import TypeVar

from torch import nn

from .._checks import check_kind, refuse
from .._module_names import CROSS_ATTENTION, calls_attention_functions, has_policy, named_by
from .._warn import warn_once
from ..patterns import Full, Pattern
from ..policy import Policy, as_policy
from ._served import unserved_module
from .multihead import SparseMultiheadAttention

__all__ = ["NESTED", "restore_attention", "swap_attention", "undo_swap"]

#: Where an encoder keeps whether it used nested tensors before the swap.
NESTED = "_nested_before_swap"
AnyModule = TypeVar("AnyModule", bound=nn.Module)

#: ``multihead_attn`` is that of ``nn.TransformerDecoderLayer``.
_CROSS = re.compile(rf"{CROSS_ATTENTION}|multihead_attn$", re.IGNORECASE)


def _dense_of(module: nn.Module) -> nn.MultiheadAttention | None:
    """Return a module's dense form, None where it is neither dense nor a twin of one."""
    if isinstance(module, SparseMultiheadAttention):
        return module.dense()
    return module if isinstance(module, nn.MultiheadAttention) else None


def swap_attention(
    model: AnyModule, policy: Policy | Pattern, only: str | Sequence[str] | None = None
) -> AnyModule:
    """Replace every ``nn.MultiheadAttention`` of a model, in place.

    Modules are numbered in module order, which makes their number in the policy; they share the
    parameters of those they replace. Cross attention (``multihead_attn`` of
    ``nn.TransformerDecoderLayer``, and names with "cross" or "encoder_attn") gives queries and keys
    no common positions: it runs ``Full()`` and is not numbered. Of other names, such as a head that
    pools by a query of its own, it is left out by `only`; a layer whose calls have other numbers of
    queries than of keys warns once, as does a transformers model that has other attention too, if
    neither `only` nor a policy of ``integrations.transformers.apply`` shows that this is known. A
    model that was swapped may be swapped again, to another policy; `restore_attention` undoes it.

    Parameters
    ----------
    model : nn.Module
        Holds the modules, also in ``nn.TransformerEncoder`` and ``nn.TransformerDecoder``.
    policy : Policy or Pattern
        A bare pattern runs in every call, whatever its length.
    only : str or sequence of str, optional
        Names of the modules to replace, such as ``"encoder.layers.*"`` (as `fnmatch` has it); the
        policy numbers these alone, and the others stay as they are.

    Returns
    -------
    nn.Module
        `model`; its twin when it is itself an ``nn.MultiheadAttention``.

    Raises
    ------
    TypeError, ValueError
        No model; no module to replace, or a policy that does not fit their number.
    NotImplementedError
        A module that is not served (an option, a dtype), by name; the model is then unchanged.

    Examples
    --------
    >>> import sparse_attn as sa, torch
    >>> layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, num_layers=5).eval()
    >>> model = sa.swap_attention(model, sa.Policy.dense_on_top(sa.Band(16), num_layers=5))
    """
    check_kind("swap_attention", "model", model, nn.Module, "an nn.Module")
    chosen = as_policy(policy)
    there = _attentions(model)
    what = f"nn.MultiheadAttention in {type(model).__name__}"
    if not there:
        raise refuse(
            "swap_attention",
            what,
            "none; transformers models take sparse_attn.integrations.transformers.apply, modules "
            "that call torch's SDPA take sparse_attn.patch_sdpa",
        )
    paths = named_by("swap_attention", what, only, list(there))
    found = [(path, there[path]) for path in paths]
    layers = {id(module) for path, module in found if not _CROSS.search(path)}
    heads = {module.num_heads for _, module in found if id(module) in layers}
    same = heads.pop() if len(heads) == 1 else None
    chosen.check_model(len(layers), same, type(model).__name__)
    twins: dict[int, SparseMultiheadAttention] = {}
    number = 0
    for path, module in found:
        if id(module) in twins:
            continue
        cross = id(module) not in layers
        reason = unserved_module(module)
        if reason:
            place = f"{path}: " if path else ""
            raise NotImplementedError(f"sparse_attn.swap_attention: {place}{reason}")
        own = (Full(), None) if cross else (chosen, number)
        twins[id(module)] = SparseMultiheadAttention.from_dense(module, *own)
        number += not cross
    if found[0][0] == "":
        return twins[id(found[0][1])]  # type: ignore[return-value]
    for path, module in found:
        model.set_submodule(path, twins[id(module)])
    for part in model.modules():
        if isinstance(part, nn.TransformerEncoder):
            # Its nested tensors are for the fused path alone.
            vars(part).setdefault(NESTED, part.use_nested_tensor)
            part.use_nested_tensor = False
    if only is None:
        _ask_about_others(model, len(twins))
    return model


def _ask_about_others(model: nn.Module, swapped: int) -> None:
    """Warn once where a model has attention of transformers too, which no swap reaches."""
    others = sum(map(calls_attention_functions, model.modules()))
    if others and not has_policy(model):
        name = type(model).__name__
        warn_once(
            f"swap in {name}",
            f"sparse_attn.swap_attention: {name}: swaps {swapped} nn.MultiheadAttention alone; "
            f"{others} attention modules of transformers there take "
            "sparse_attn.integrations.transformers.apply",
        )


def _attentions(model: nn.Module) -> dict[str, nn.MultiheadAttention]:
    """Return the dense modules, and those of twins, by path."""
    modules = model.named_modules(remove_duplicate=False)
    dense = {path: _dense_of(module) for path, module in modules}
    return {path: module for path, module in dense.items() if module is not None}


def restore_attention(model: AnyModule) -> AnyModule:
    """Undo `swap_attention`, in place: the model has its own modules again, with its parameters.

    Parameters
    ----------
    model : nn.Module
        Modules that were not swapped stay as they are; a warning says so where none was.

    Returns
    -------
    nn.Module
        `model`; its dense form when it is itself a twin.

    Raises
    ------
    TypeError
        No model.

    Examples
    --------
    >>> import sparse_attn as sa, torch
    >>> layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
    >>> model = sa.swap_attention(layer, sa.Band(16))
    >>> type(sa.restore_attention(model).self_attn).__name__
    'MultiheadAttention'
    """
    check_kind("restore_attention", "model", model, nn.Module, "an nn.Module")
    own = _dense_of(model)
    if own is not None and own is not model:
        return own  # type: ignore[return-value]
    if not undo_swap(model):
        warnings.warn(
            "sparse_attn.restore_attention: expected a model that swap_attention changed, got "
            f"{type(model).__name__} without such a module: nothing changes",
            stacklevel=2,
        )
    return model


def undo_swap(model: nn.Module) -> bool:
    """Undo `swap_attention` inside a model; return whether there was anything to undo."""
    found = False
    for path, module in list(model.named_modules(remove_duplicate=False)):
        dense = _dense_of(module)
        if dense is not None and dense is not module:
            model.set_submodule(path, dense)
            found = True
    for part in model.modules():
        if isinstance(part, nn.TransformerEncoder) and NESTED in vars(part):
            part.use_nested_tensor = vars(part).pop(NESTED)
    return found
