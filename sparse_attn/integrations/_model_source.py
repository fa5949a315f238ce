"""What a model's source says about its attention, read once for a class.

Two questions about a configuration decide which mask a model can be given: whether its attention
modules call attention functions at all, and whether they or their layers compute with the mask
before they do (sparse indexers, dynamic masks, a position bias that is added to it), so that an
interval in place of a mask would be misread. Asked by the mask function. Four more are about an
attention module: whether it appends keys that are not of its text, among which no pattern has a
place, whether its causal flag counts where it has no mask, whether it is a decoder's, and whether
its model makes masks of its own.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, masking_utils
from transformers.models.auto.modeling_auto import MODEL_MAPPING

#: Classes that may compute with the mask of their attention.
_GIVEN_MASKS = re.compile("Attention|Indexer|TransformerLayer")
#: Methods that run under eager attention alone.
_EAGER_ONLY = ("_upcast_and_reordered_attn",)

__all__ = [
    "appends_keys",
    "calls_attention",
    "makes_masks",
    "reads_flag",
    "reads_mask",
    "refuse_model",
    "takes_cache",
]


def refuse_model(name: str) -> ValueError:
    """Make the error of a model that does not call attention functions."""
    ours = re.match("(Longformer|BigBird)(?!Pegasus)", name)
    other = "or give it to sparse_attn.patch_sdpa if it calls torch's SDPA itself"
    apply = "load it with its own attention and call sparse_attn.integrations.transformers.apply"
    return ValueError(
        f"sparse_attn: expected a model that calls transformers' attention functions, got {name}; "
        + (f"{apply}(model)" if ours else f"keep its own attention, {other}")
    )


@torch.compiler.assume_constant_result
def calls_attention(config: type) -> bool:
    """Whether the models of a configuration class call attention functions."""
    return _calls_attention(config)


@torch.compiler.assume_constant_result
def reads_mask(config: type) -> bool:
    """Whether models beside a configuration class compute with the mask of their attention."""
    return _reads_mask(config)


@torch.compiler.assume_constant_result
def appends_keys(module: type[nn.Module]) -> bool:
    """Whether attention modules of a class append keys to those of their text.

    DeepSeek V4 appends summaries, T5Gemma 2 the keys of its encoder.
    """
    return _appends_keys(module.forward)


@torch.compiler.assume_constant_result
def makes_masks(module: type[nn.Module]) -> bool:
    """Whether the models beside attention modules of a class make their masks themselves.

    Pixtral's vision tower does, which keeps the images of a call apart.
    """
    members = vars(sys.modules[module.__module__]).values()
    return all(getattr(member, "__module__", None) != masking_utils.__name__ for member in members)


@torch.compiler.assume_constant_result
def reads_flag(module: type[nn.Module]) -> bool:
    """Whether the causal flag of attention modules of a class counts where they have no mask.

    torch's SDPA reads it, eager attention does not, which is all that BridgeTower's models have.
    """
    return _reads_flag(module.__module__)


@torch.compiler.assume_constant_result
def takes_cache(module: type[nn.Module]) -> bool:
    """Whether attention modules of a class are given a cache of keys, as those of decoders are."""
    return _takes_cache(module.forward)


@lru_cache
def _calls_attention(config: type) -> bool:
    if config not in MODEL_MAPPING:
        return True
    models = MODEL_MAPPING[config]
    models = models if isinstance(models, (tuple, list)) else (models,)
    return all(model._can_set_attn_implementation() for model in models)


@lru_cache
def _reads_mask(config: type) -> bool:
    return any(map(_computes_with_masks, _files_of(config)))


def _files_of(config: type) -> list[str]:
    """Name the modules of Python that models of a configuration class are in."""
    package = config.__module__.replace(".configuration_", ".modeling_")
    beside = [name for name in list(sys.modules) if name.startswith(f"{package}_")]
    parts = [name for name in beside if any(m.config_class is config for m in _models_in(name))]
    return parts or [package]  # the text model of BLIP has a module of its own


def _computes_with_masks(file: str) -> bool:
    module = sys.modules.get(file)
    try:
        tree = ast.parse(inspect.getsource(module)) if module is not None else ast.Module([], [])
    except (OSError, TypeError):
        return False
    anywhere = (_adds_bias_to_mask, _joins_masks, _looks_for_padding)
    return any(asks(node) for node in ast.walk(tree) for asks in anywhere) or any(
        _computes_with_mask(node)
        for parent in tree.body
        if isinstance(parent, ast.ClassDef) and _GIVEN_MASKS.search(parent.name)
        for method in parent.body
        if getattr(method, "name", None) not in _EAGER_ONLY
        for node in ast.walk(method)
    )


@lru_cache
def _reads_flag(file: str) -> bool:
    models = _models_in(file)
    return not models or any(model._supports_sdpa for model in models)


def _models_in(file: str) -> list[Any]:
    """List the models that a module of Python defines."""
    return [
        kind
        for kind in vars(sys.modules[file]).values()
        if inspect.isclass(kind) and issubclass(kind, PreTrainedModel) and kind.__module__ == file
    ]


@lru_cache
def _appends_keys(forward: Callable[..., object]) -> bool:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, TypeError):
        return False
    return any(map(_lengthens_keys, ast.walk(tree)))


@lru_cache
def _takes_cache(forward: Callable[..., object]) -> bool:
    # Named `cache` from transformers 5.24 on.
    return not {"cache", "past_key_values"}.isdisjoint(inspect.signature(forward).parameters)


def _lengthens_keys(node: ast.AST) -> bool:
    """Whether a node is torch.cat of keys and something after them, along the length."""
    if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.cat"):
        return False
    parts, along = node.args[0], [ast.unparse(keyword.value) for keyword in node.keywords]
    first = parts.elts[0] if isinstance(parts, (ast.List, ast.Tuple)) and parts.elts else None
    named = isinstance(first, ast.Name) and re.fullmatch("kv?|(keys?|kv)(_states)?", first.id)
    return bool(named) and along in (["2"], ["-2"])


def _adds_bias_to_mask(node: ast.AST) -> bool:
    """Whether a node adds a bias to a mask, which BEiT's layers do before they attend.

    Outside of attention other arithmetic with masks is that of tokens and images.
    """
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)):
        return False
    names = [side.id for side in (node.left, node.right) if isinstance(side, ast.Name)]
    return any(name.endswith("bias") for name in names) and any(
        name.endswith("mask") for name in names
    )


def _joins_masks(node: ast.AST) -> bool:
    """Whether a node is torch.cat of masks by kind of layer, as in T5Gemma 2's decoder."""
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func) == "torch.cat"
        and any(
            isinstance(part, ast.Subscript)
            and isinstance(part.slice, ast.Constant)
            and str(part.slice.value).endswith("_attention")
            and "mask" in ast.unparse(part.value)
            for part in getattr(node.args[0], "elts", ())
        )
    )


def _looks_for_padding(node: ast.AST) -> bool:
    """Whether a node is torch.all of a mask's rows, as in the convolutions of LASR's encoder."""
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func) == "torch.all"
        and any(keyword.arg == "dim" for keyword in node.keywords)
        and any(
            isinstance(part, ast.Name) and part.id == "attention_mask" for part in ast.walk(node)
        )
    )


def _computes_with_mask(node: ast.AST) -> bool:
    """Whether a node is an operation on a variable of that meaning; handing it on is none."""
    if isinstance(node, ast.BinOp):
        operands: list[ast.expr] = [node.left, node.right]
    elif isinstance(node, (ast.Subscript, ast.Attribute)):
        operands = [node.value]
    elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("torch.", "F.", "nn.")):
        operands = [*node.args, *(keyword.value for keyword in node.keywords)]
    else:
        return False
    return any(
        isinstance(operand, ast.Name) and operand.id.endswith("mask") for operand in operands
    )
