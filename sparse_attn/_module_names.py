"""A model's modules: those that `only` names, those of cross attention, by name or lengths.

And its heads, their number and their size, encoders under a pattern of decoders, attention of
transformers, and whether it has a policy.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from ._checks import check_kind, refuse
from ._policy_parts import widened
from ._warn import warn_once
from .patterns import Band, Pattern

__all__ = [
    "CROSS_ATTENTION",
    "LAYER",
    "ask_about_keys",
    "ask_about_sides",
    "calls_attention_functions",
    "has_policy",
    "head_dim_of",
    "key_heads_of",
    "named_by",
]

#: The attribute of a module that a policy of `apply` is bound to, which holds its `Layer`.
LAYER = "_sparse_attn"

#: Names that a sentence lists.
_SHOWN = 3

#: What models call the size of their query heads; that of latent attention comes first.
_HEAD_DIMS = ("qk_head_dim", "head_dim", "attention_head_size", "head_size")

#: Matches the paths of cross attention, as models of many families call it.
CROSS_ATTENTION = r"cross|encoder_attn|encdec|encoder_decoder|token_to_image"


def named_by(owner: str, what: str, only: Any, there: Sequence[str]) -> Sequence[str]:
    """Return those of the paths `there`, of `what`, that are asked for; None asks for all.

    Raises
    ------
    ValueError
        A name that matches none of them.
    """
    if only is None:
        return there
    check_kind(owner, "only", only, Sequence, "a name or a sequence of names")
    names = [only] if isinstance(only, str) else only
    for name in names:
        check_kind(owner, "each of only", name, str, "a name")
    unknown = [name for name in names if not any(fnmatchcase(path, name) for path in there)]
    if unknown or not names:
        asked = only if isinstance(only, str) else unknown
        shown = [path or "'' (the model itself)" for path in there[:_SHOWN]]
        listed = ", ".join(shown + ["..."] * (len(there) > _SHOWN))
        got = f"none; it has {len(there)}: {listed}"
        raise refuse(owner, f"{what} under the names {asked!r}", got)
    return [path for path in there if any(fnmatchcase(path, name) for name in names)]


def ask_about_keys(what: str, pattern: Pattern, seq_q: int, seq_kv: int, function: str) -> None:
    """Warn once where a pattern runs between two lengths: a cache, or cross attention."""
    if torch.compiler.is_compiling() or seq_q == seq_kv or widened(pattern) == pattern:
        return
    warn_once(
        "cross attention",
        f"{what} runs {pattern} with {seq_q} queries and {seq_kv} keys, as if the queries were the "
        "last tokens of the keys; is this cross attention? Then leave it out, by only= of "
        f"{function}",
    )


def ask_about_sides(what: str, pattern: Pattern, seq_q: int) -> None:
    """Warn once where a layer that looks both ways, an encoder's, runs a pattern that does not."""
    if torch.compiler.is_compiling() or seq_q == 1:
        return
    if all(map(_looks_back, pattern._head_patterns)):
        warn_once(
            "looks back",
            f"{what} runs {pattern}, whose window never looks ahead, in a model that does, as "
            "encoders do; is this meant? One of two sides, such as Band(64), looks both ways",
        )


def _looks_back(pattern: Pattern) -> bool:
    """Whether a pattern's own definition leaves out the keys after the query's."""
    dense = widened(pattern)
    return isinstance(dense, Band) and dense.sides[1] == 0


def calls_attention_functions(module: nn.Module) -> bool:
    """Whether a module's forward attends by an attention function of transformers."""
    forward: Any = getattr(type(module), "forward", None)  # a scripted class has none
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def has_policy(model: nn.Module) -> bool:
    """Whether a policy of `apply` is bound to any part of a model."""
    return any(LAYER in vars(module) for module in model.modules())


def key_heads_of(config: Any) -> int | None:
    """Return the number of a model's key heads, None where its configuration does not say."""
    try:
        heads = getattr(config, "num_key_value_heads", None)
        heads = heads if heads is not None else getattr(config, "num_attention_heads", None)
    except RuntimeError:  # transformers refuses to say what differs from layer to layer
        return None
    return heads if isinstance(heads, int) else None  # a list has a number for each stage


def head_dim_of(module: nn.Module) -> int | None:
    """Return the size of an attention module's query heads, None where it does not say it."""
    sizes = (getattr(module, name, None) for name in _HEAD_DIMS)
    return next((size for size in sizes if isinstance(size, int)), None)
