"""A model's calls: what may be given as inputs, what the model raises at them, their time."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from .._binding import is_transformers_model
from .._checks import Number, check_kind, kind_of, refuse
from ._figures import Output, output_of

#: What models raise at inputs that they do not take.
_RAISED = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

__all__ = ["as_inputs", "call_model", "evaluating", "shapes", "stopwatch"]


def as_inputs(owner: str, inputs: Any, name: str = "inputs") -> list[dict[str, Any]]:
    """Return the keyword arguments of the model's calls; error messages name them `name`."""
    if isinstance(inputs, torch.Tensor):
        if inputs.dim() < 2:
            got = f"shape {tuple(inputs.shape)}; ids of one text go in as ids[None]"
            raise refuse(owner, f"{name} of shape (batch, length)", got)
        return as_inputs(owner, {"input_ids": inputs}, name)
    if isinstance(inputs, Mapping):
        if any(isinstance(value, torch.Tensor) and value.is_meta for value in inputs.values()):
            raise refuse(owner, f"{name} with contents", "meta tensors")
        ids = inputs.get("input_ids")
        if ids is not None and not isinstance(ids, torch.Tensor):
            got = f"{kind_of(ids)}; a tokenizer makes tensors with return_tensors='pt'"
            raise TypeError(f"sparse_attn.{owner}: expected input_ids to be a tensor, got {got}")
        return [dict(inputs)]
    what = "a tensor of token ids, a mapping of the model's arguments, or a list of these"
    check_kind(owner, name, inputs, Iterable, what)
    if isinstance(inputs, str):
        got = "str; a tokenizer makes ids of it: tokenizer(text, return_tensors='pt')"
        raise TypeError(f"sparse_attn.{owner}: expected {name} to be {what}, got {got}")
    parts = list(inputs)
    if any(isinstance(part, Number) for part in parts):
        got = f"{kind_of(inputs)} of numbers; torch.tensor makes ids of them"
        raise TypeError(f"sparse_attn.{owner}: expected {name} to be {what}, got {got}")
    _check_ids(owner, name, parts)
    calls = [call for part in parts for call in as_inputs(owner, part, name)]
    if not calls:
        raise refuse(owner, name, "none")
    return calls


def _check_ids(owner: str, name: str, parts: list[Any]) -> None:
    """Refuse a mask beside the ids that it belongs to: tensors of a list are texts."""
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    tensors = [part for part in tensors if not part.is_floating_point() and part.numel()]
    for mask in tensors:
        alike = [ids for ids in tensors if ids is not mask and ids.shape == mask.shape]
        if alike and mask.min() >= 0 and mask.max() <= 1 < max(ids.max() for ids in alike):
            got = "a mask of 0 and 1; {'input_ids': ids, 'attention_mask': mask} has both"
            raise refuse(owner, f"{name} that are token ids, each of texts of its own", got)


def call_model(owner: str, module: nn.Module, inputs: dict[str, Any]) -> Output:
    """Return the model's output; inputs go to its device. What the model raises is named."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    if device.type == "meta":
        raise refuse(owner, "a model whose parameters have contents", "meta tensors")
    moved = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}
    try:
        for name, value in moved.items():
            if hasattr(value, "get_seq_length"):  # a cache of transformers, which a call fills
                moved[name] = deepcopy(value)
        if list(moved) == ["input_ids"] and not _takes_ids(module):
            return output_of(module, module(moved["input_ids"]))  # its argument may have any name
        return output_of(module, module(**moved))
    except _RAISED as error:
        if isinstance(error, torch.OutOfMemoryError) or _is_ours(error):
            raise
        _check_fits(owner, module, moved)
        said = " ".join(str(error).split())
        got = f"{type(error).__name__} of {type(module).__name__}: {said:.200}"
        raise refuse(owner, f"inputs that the model takes ({shapes(moved)})", got) from error


def _takes_ids(module: nn.Module) -> bool:
    """Whether a model takes token ids as ``input_ids``, or nothing without a name."""
    if hasattr(module, "config"):
        return True
    try:
        parameters = inspect.signature(module.forward).parameters
    except ValueError:  # a traced module's names are in its graph
        return False
    named = {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}
    return "input_ids" in parameters or {own.kind for own in parameters.values()} <= named


def _check_fits(owner: str, module: nn.Module, inputs: dict[str, Any]) -> None:
    """Say what a model that raised is known not to take: more positions, another's arguments."""
    name = type(module).__name__
    limit = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    lengths = [v.shape[1] for v in inputs.values() if isinstance(v, torch.Tensor) and v.dim() > 1]
    if isinstance(limit, int) and lengths and lengths[0] > limit:
        what = f"inputs of at most {limit} positions, as many as {name} has"
        raise refuse(owner, what, lengths[0])
    main = getattr(module, "main_input_name", "input_ids")
    if main not in inputs and list(inputs) == ["input_ids"]:
        got = f"a tensor of shape {tuple(inputs['input_ids'].shape)} as input_ids"
        raise refuse(owner, f"inputs of {name} by name, such as {{{main!r}: tensor}}", got)
    inner = [path for path, part in module.named_modules() if path and is_transformers_model(part)]
    if inner and not is_transformers_model(module):
        got = f"{name}, which holds one: give that, model.get_submodule({inner[0]!r})"
        raise refuse(owner, f"a model that takes {shapes(inputs)}", got)


def _is_ours(error: Exception) -> bool:
    return str(error).startswith("sparse_attn")


def shapes(inputs: dict[str, Any]) -> str:
    """Say what inputs are, as sentences write it."""
    return ", ".join(
        f"{name} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else name
        for name, value in inputs.items()
    )


def stopwatch() -> float:
    """Return the time, in seconds, when all that was launched is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Run in evaluation mode inside."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
