"""`swap_attention`: every ``torch.nn.MultiheadAttention`` of a model replaced, in place."""

from __future__ import annotations

import re
from typing import TypeVar

from torch import nn

from .._checks import check_kind, refuse
from ..patterns import Full, Pattern
from ..policy import Policy, as_policy
from .multihead import SparseMultiheadAttention, unserved_module

__all__ = ["swap_attention"]

AnyModule = TypeVar("AnyModule", bound=nn.Module)

_CROSS = re.compile(r"cross|multihead_attn$|encoder_attn|encdec|encoder_decoder", re.IGNORECASE)


def swap_attention(model: AnyModule, policy: Policy | Pattern) -> AnyModule:
    """Replace every ``nn.MultiheadAttention`` of a model, in place.

    Modules are numbered in module order, which makes their number in the policy; they share the
    parameters of those they replace. Cross attention (``multihead_attn`` of
    ``nn.TransformerDecoderLayer``, and names with "cross" or "encoder_attn") gives queries and keys
    no common positions: it runs ``Full()`` and is not numbered.

    Parameters
    ----------
    model : nn.Module
        Holds the modules, also in ``nn.TransformerEncoder`` and ``nn.TransformerDecoder``.
    policy : Policy or Pattern
        A bare pattern runs in every call, whatever its length.

    Returns
    -------
    nn.Module
        `model`; its twin when it is itself an ``nn.MultiheadAttention``.

    Raises
    ------
    TypeError, ValueError
        No model; no module to replace, or a policy that does not fit their number.
    NotImplementedError
        A module that is not served, by name; the model is then unchanged.

    Examples
    --------
    >>> import sparse_attn as sa, torch
    >>> layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, num_layers=5).eval()
    >>> model = sa.swap_attention(model, sa.Policy.dense_on_top(sa.Band(16), num_layers=5))
    """
    check_kind("swap_attention", "model", model, nn.Module, "an nn.Module")
    chosen = as_policy(policy)
    found = [
        (path, module)
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.MultiheadAttention)
    ]
    if not found:
        raise refuse("swap_attention", f"nn.MultiheadAttention in {type(model).__name__}", "none")
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
        twin = SparseMultiheadAttention.from_dense(module, Full() if cross else chosen, number)
        twins[id(module)] = twin
        number += not cross
    if found[0][0] == "":
        return twins[id(model)]  # type: ignore[return-value]
    for path, module in found:
        model.set_submodule(path, twins[id(module)])
    for part in model.modules():
        if isinstance(part, nn.TransformerEncoder):
            # Its nested tensors are for the fused path alone.
            part.use_nested_tensor = False
    return model
