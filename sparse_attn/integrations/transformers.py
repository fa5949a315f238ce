"""Hugging Face transformers: the key ``sparse_attn`` and policies on loaded models.

``register()`` makes the key known; a model that chooses it keeps its own attention and changes only
the engine. ``apply()`` also binds a policy to the layers of a loaded model. The attention function
is in ``_attention``, the mask function in ``_masks``; Longformer and BigBird, which do not call
attention functions, get modules of their own (``_longformer``, ``_bigbird``).
"""

from __future__ import annotations

from . import _requirement  # noqa: F401, before an older transformers fails on a name

# isort: split
import re
import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from .._checks import check_kind, kind_of, serves_head_dim
from .._module_names import (
    CROSS_ATTENTION,
    LAYER,
    calls_attention_functions,
    head_dim_of,
    key_heads_of,
    named_by,
)
from ..patterns import Full, Pattern
from ..policy import Policy, as_policy
from . import _bigbird, _longformer
from ._attention import attention
from ._bigbird import BigBirdAttention, SparseBigBirdAttention
from ._layer import Layer
from ._longformer import LongformerSelfAttention, SparseLongformerSelfAttention
from ._masks import attention_mask
from ._model_source import refuse_model

__all__ = ["apply", "register", "restore"]

KEY = "sparse_attn"
#: The attribute that `apply` leaves on the parts of a model that choose an implementation: the one
#: that they had before.
BEFORE = "_before_sparse_attn"
Model = TypeVar("Model", bound=nn.Module)

#: Attention that calls no attention function; modules of these classes get forwards of ours.
_OWN = (LongformerSelfAttention, BigBirdAttention)
_CROSS = re.compile(CROSS_ATTENTION, re.IGNORECASE)


def register() -> None:
    """Register attention and mask function under the key ``"sparse_attn"``, process-wide.

    It changes nothing but the engine: a model loaded with ``attn_implementation="sparse_attn"``
    equals its own attention, with its windows, softcap and sinks. Rows without a key (padded
    queries) give zeros. A model that asks for neither function, such as DeBERTa, takes the key and
    keeps its own attention all the same; `apply` refuses it.

    Examples
    --------
    >>> import sparse_attn, transformers
    >>> sparse_attn.integrations.transformers.register()
    >>> config = transformers.LlamaConfig(
    ...     hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    ... )
    >>> config._attn_implementation = "sparse_attn"
    >>> model = transformers.LlamaModel(config)
    """
    AttentionInterface.register(KEY, attention)
    AttentionMaskInterface.register(KEY, attention_mask)


def apply(
    model: Model,
    policy: Policy | Pattern | None = None,
    only: str | Sequence[str] | None = None,
) -> Model:
    """Run a policy in the self-attention layers of a loaded model, in place.

    A layer sees the keys that its own mask, window and the policy's pattern all allow, so a dense
    layer is the model's own attention. Sinks, global tokens and strided columns count from each
    row's first token, past its left padding, also where a sliding cache has dropped keys; blocks
    lie on key positions. A pattern whose window never looks ahead makes an encoder causal, its
    dense layers too, of which a warning is given once. Layers are the self-attention modules in
    module order; cross attention, known by name, stays dense. Longformer and BigBird keep their own
    patterns: Longformer takes bands that narrow its window, BigBird only ``Full()``. Of a model
    with several towers pass the one that is meant, as ``model.language_model``. A model that has a
    policy may be given another; `restore` undoes it.

    Parameters
    ----------
    model : PreTrainedModel
        Changed in place; or a module that holds one, such as a SentenceTransformer.
    policy : Policy or Pattern, optional
        A bare pattern runs in every call, whatever its length. Default ``Full()``.
    only : str or sequence of str, optional
        Names of the self-attention modules that the policy is for, such as ``"*.layers.[0-3].*"``
        (as `fnmatch` has it); it numbers these alone. The others keep their own attention, on this
        package's kernels.

    Returns
    -------
    nn.Module
        `model`.

    Raises
    ------
    TypeError
        `model` is no transformers model, or `policy` neither policy nor pattern.
    ValueError
        The model does not call attention functions, or the policy does not fit its layers.
    NotImplementedError
        Longformer or BigBird with a pattern that is not served; a head dim that no kernel has.

    Examples
    --------
    >>> import sparse_attn as sa, transformers
    >>> config = transformers.LlamaConfig(
    ...     hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2
    ... )
    >>> model = transformers.LlamaModel(config).eval()
    >>> policy = sa.Policy.dense_on_top(sa.Band((63, 0)), num_layers=4)
    >>> model = sa.integrations.transformers.apply(model, policy)

    Source: attention functions by name, transformers' ``AttentionInterface``.
    """
    if not isinstance(model, PreTrainedModel):
        apply(_held(model), policy, only)
        return model
    chosen = as_policy(Full() if policy is None else policy)
    name = type(model).__name__
    found = _self_attention(model)
    if not found:
        raise refuse_model(name)
    paths = named_by("apply", f"self-attention of {name}", only, [path for path, _ in found])
    layers = [(path, module) for path, module in found if path in paths]
    chosen.check_model(len(layers), _key_heads(model, [module for _, module in layers]), name)
    for path, module in layers:
        _check_head_dim(path, module)
        _check_policy(path, module, chosen)
    if not all(isinstance(module, _OWN) for _, module in layers):
        _choose_key(model)
    for path, module in found:
        if path not in paths:
            _forget(module)
    for number, (path, module) in enumerate(layers):
        _bind(module, Layer(chosen, number, path))
    return model


def restore(model: Model) -> Model:
    """Undo `apply`, in place: the model attends as it did before, with the kernels that it had.

    A model that was given others since, by its ``set_attn_implementation``, keeps these.

    Parameters
    ----------
    model : PreTrainedModel
        Or a module that holds one. What has no policy stays as it is; a warning says so where
        nothing has one.

    Returns
    -------
    nn.Module
        `model`.

    Raises
    ------
    TypeError
        No module.

    Examples
    --------
    >>> import sparse_attn as sa, transformers
    >>> config = transformers.LlamaConfig(
    ...     hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    ... )
    >>> model = transformers.LlamaModel(config)
    >>> own = model.config._attn_implementation
    >>> model = sa.integrations.transformers.apply(model, sa.Band((63, 0)))
    >>> sa.integrations.transformers.restore(model).config._attn_implementation == own
    True
    """
    check_kind("restore", "model", model, nn.Module, "an nn.Module")
    if not undo(model):
        warnings.warn(
            "sparse_attn.restore: expected a model under a policy of sparse_attn.integrations."
            f"transformers.apply, got {type(model).__name__} without one: nothing changes",
            stacklevel=2,
        )
    return model


def undo(model: nn.Module) -> bool:
    """Undo `apply`; return whether there was anything to undo.

    Parts that were set to another implementation meanwhile keep it; what holds them, set first,
    would change that.
    """
    found = False
    chosen: list[tuple[Any, str]] = []
    module: Any
    for module in model.modules():
        found = found or LAYER in vars(module)
        _forget(module)
        if BEFORE in vars(module):
            before, now = vars(module).pop(BEFORE), module.config._attn_implementation
            chosen.append((module, before if now == KEY else now))
    set_implementations(chosen)
    return found or bool(chosen)


def implementations(model: nn.Module) -> list[tuple[Any, str]]:
    """List the parts of a model that choose an implementation, with their choice.

    They are the models in it, and attention modules whose configuration no model has: a copy, as
    in the decoder of ViTMAE or the frames' transformer of X-CLIP.
    """
    parts: list[Any] = list(model.modules())
    known = {id(part.config) for part in parts if isinstance(part, PreTrainedModel)}
    chosen = []
    for part in parts:
        config: Any = getattr(part, "config", None)
        alone = _is_layer(part) and hasattr(config, "_attn_implementation")
        if isinstance(part, PreTrainedModel) or (alone and id(config) not in known):
            chosen.append((part, config._attn_implementation))
    return chosen


def set_implementations(chosen: Sequence[tuple[Any, str]]) -> None:
    """Give parts of a model their implementations; what holds others comes before them."""
    for part, implementation in chosen:
        if isinstance(part, PreTrainedModel):
            part.set_attn_implementation(implementation)
        else:
            part.config._attn_implementation = implementation


def _self_attention(model: PreTrainedModel) -> list[tuple[str, Any]]:
    """List the self-attention modules with their paths, in module order."""
    return [
        (path, module)
        for path, module in model.named_modules()
        if _is_layer(module) and not _CROSS.search(f"{path}.{type(module).__name__}")
    ]


def _check_head_dim(path: str, module: Any) -> None:
    """Refuse heads of a size that no kernel has."""
    size = head_dim_of(module.self if isinstance(module, BigBirdAttention) else module)
    if size is not None and not serves_head_dim(size):
        raise NotImplementedError(
            f"sparse_attn: {path}: not served: head_dim={size}, which is no multiple of 8 up to "
            "256; no pattern changes that: keep the model's own attention"
        )


def _check_policy(path: str, module: nn.Module, policy: Policy) -> None:
    """Refuse a policy that a module with a pattern of its own does not take."""
    if isinstance(module, LongformerSelfAttention):
        _longformer.check_policy(path, policy)
    elif isinstance(module, BigBirdAttention):
        _bigbird.check_policy(path, policy)


def _bind(module: Any, layer: Layer) -> None:
    """Give a module its policy, and a forward of ours where it calls no attention function."""
    setattr(module, LAYER, layer)
    if isinstance(module, LongformerSelfAttention):
        module.__class__ = SparseLongformerSelfAttention
    elif isinstance(module, BigBirdAttention):
        module.__class__ = SparseBigBirdAttention
        module.bind()


def _forget(module: nn.Module) -> None:
    """Take a module's policy, and with it a forward of ours."""
    vars(module).pop(LAYER, None)
    module.__class__ = getattr(type(module), "_own_kind", type(module))


def _held(model: object) -> PreTrainedModel:
    """Return the transformers model that another module holds, as a SentenceTransformer does."""
    inside = list(model.named_modules()) if isinstance(model, nn.Module) else []
    paths = [path for path, module in inside if isinstance(module, PreTrainedModel)]
    tops = [path for path in paths if not any(path.startswith(f"{top}.") for top in paths)]
    if len(tops) == 1:
        return model.get_submodule(tops[0])  # type: ignore[attr-defined]
    if tops:
        got = f"{type(model).__name__} with {len(tops)}: {', '.join(tops)}"
    else:
        got = (
            f"{kind_of(model)}; models with nn.MultiheadAttention take sparse_attn.swap_attention, "
            "those that call torch's SDPA take sparse_attn.patch_sdpa"
        )
    raise TypeError(f"sparse_attn.apply: expected a transformers model, got {got}")


def _key_heads(model: PreTrainedModel, layers: Sequence[Any]) -> int | None:
    """Return the number of the layers' key heads, None where they differ or do not say it."""
    heads = {key_heads_of(getattr(module, "config", model.config)) for module in layers}
    return heads.pop() if len(heads) == 1 else None


def _is_layer(module: nn.Module) -> bool:
    """Whether a module attends: it calls attention functions, or we know it."""
    return isinstance(module, _OWN) or calls_attention_functions(module)


def _choose_key(model: PreTrainedModel) -> None:
    """Set our key in a model and its parts; refuse before anything changes."""
    chosen = implementations(model)
    for part, _ in chosen:
        if isinstance(part, PreTrainedModel) and not part._can_set_attn_implementation():
            raise refuse_model(type(part).__name__)
    register()
    for part, before in chosen:
        if before != KEY or BEFORE not in vars(part):
            vars(part)[BEFORE] = before
    model.set_attn_implementation(KEY)
    # It may leave out a part with a configuration of its own, such as a copy (T5's stacks).
    left = [part for part, _ in chosen if part.config._attn_implementation != KEY]
    set_implementations([(part, KEY) for part in left])
