"""`advise`: profile a model's heads, choose a pattern for each, check, validate."""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch
from torch import nn

from .._checks import Number, check_choice, check_kind, check_share, refuse
from ..quality._calls import as_inputs, evaluating
from ._advice import Advice
from ._candidates import named
from ._first_call import first_call
from ._memory import Memory
from ._run import OWNER, Run
from ._times import checked_lengths, is_text, length_of

__all__ = ["advise"]

#: Tokens that each half of a text needs, to search on one and validate on the other.
_LEAST_TOKENS = 64
#: What a tokenizer returns: tensors with a number for each token.
_BY_TOKEN = {"input_ids", "attention_mask", "token_type_ids"}


def advise(
    model: nn.Module,
    inputs: Any,
    keep: float = 0.95,
    *,
    validate: Any = None,
    patterns: Any = None,
    lengths: Any = None,
    by: str = "pairs",
    minutes: float | None = None,
    resume: str | PathLike[str] | None = None,
    progress: bool = True,
) -> Advice:
    """Find a policy by layer and key head that keeps the model's answers at the least cost.

    1. The model runs once; every candidate is compared with dense attention on the queries, keys
       and values of each layer, by key head.
    2. Key heads are weighed by what one candidate in each of them alone does to the model's output;
       layers, where there is less time.
    3. Candidates are chosen by cost and weighted error; the price of error is bisected until the
       least cost is found at which the model's output on `inputs` keeps what was asked, and at
       which its KL promises as much on other text: the same KL changes fewer tokens of easy text.
    4. The choice is judged on other text. Where it keeps too little there, what was missing is
       added to what is asked (or, where the other text lost several times as much, half the loss
       that would do is asked) and the search goes on, twice; then the sparse choice that kept most
       follows. The advice names how many were judged.

    Costs are pairs, the same on every machine, or the time that attention is predicted to take:
    visited tiles, by rates that are measured once on a device and kept. Both are reported for all
    that was tried. Nothing is random: without `minutes`, equal inputs (and rates) give equal
    policies.

    Parameters
    ----------
    model : nn.Module
        A transformers model, one with ``nn.MultiheadAttention``, or one that calls
        ``F.scaled_dot_product_attention``. It is left as it was.
    inputs : Tensor, mapping, or list of these
        Token ids, or the keyword arguments of a call, tensors ``(batch, length, ...)``: the text
        that the search may see.
    keep : float
        Share of the positions whose most likely token stays that of dense attention; the outputs'
        mean cosine for models without tokens. Above 0, up to 1.
    validate : as `inputs`, optional
        Text that the search does not see. By default the last of several inputs, half of the
        texts of one batch with an ``attention_mask``, or the second half of its tokens.
    patterns : list or mapping of Pattern, optional
        Candidates; by default bands with sinks (of an encoder with a global first token), a strided
        pattern and block top-k.
    lengths : list of int, optional
        Lengths at which the model is timed, dense and under the policy; by default that of the
        text. Images are timed as they are.
    by : {"pairs", "time"}
        The cost: pairs visited, or the predicted time on this device.
    minutes : float, optional
        Stages are cut short so that the search takes about this long.
    resume : path, optional
        A file that keeps what was measured: a search of the same model, inputs and patterns that
        was cut off goes on from it. The file of another search is refused.
    progress : bool
        Show a progress bar, with the time left, where tqdm is installed.

    Returns
    -------
    Advice
        With ``.policy``, ``.kept`` (whether the validation kept `keep`; otherwise the policy is the
        sparse choice that kept most), ``.table()``, ``.plot()``, ``.report(path)`` and
        ``.save(path)``.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        Arguments of a wrong kind; a model whose attention no policy reaches.

    Examples
    --------
    >>> import sparse_attn as sa, torch, transformers
    >>> config = transformers.LlamaConfig(
    ...     hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    ...     vocab_size=64,
    ... )
    >>> model = transformers.LlamaForCausalLM(config).eval()
    >>> ids = torch.randint(0, 64, (1, 256))
    >>> advice = sa.advise(model, ids, keep=0.5, patterns=[sa.Band((31, 0))], progress=False)
    >>> advice.kept
    True

    Notes
    -----
    Related: the offline search of MInference (Jiang et al. 2024), by head on local errors;
    SpargeAttn's tuning (Zhang et al. 2025), by relative L1. Neither checks the model's output.
    """
    check_kind(OWNER, "model", model, nn.Module, "an nn.Module")
    check_share(OWNER, "keep", keep)
    check_choice(OWNER, "by", by, ("pairs", "time"))
    if minutes is not None:
        check_kind(OWNER, "minutes", minutes, Number, "a float or None")
        if not minutes > 0:
            raise refuse(OWNER, "minutes above 0", minutes)
    check_kind(OWNER, "progress", progress, bool, "a bool")
    check_kind(OWNER, "resume", resume, (str, PathLike, type(None)), "a path or None")
    calls, other = _split(as_inputs(OWNER, inputs), validate)
    length = length_of(OWNER, calls[0])
    asked = None if lengths is None else checked_lengths(OWNER, lengths)
    first = first_call(OWNER, model, calls[0])
    if not is_text(OWNER, calls[0]):
        (length,) = asked = first.only_length(OWNER, asked)
    found = named(OWNER, patterns, length, by, first.is_causal)
    memory = Memory(resume, model, calls, found)
    run = Run(model, calls, other, found, float(keep), by, minutes, memory)
    with torch.no_grad(), evaluating(model):
        return run.advice(length, asked or [length], progress)


def _split(
    calls: list[dict[str, Any]], validate: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the search's inputs and those of the validation."""
    if validate is not None:
        other = as_inputs(OWNER, validate, "validate")
        for call in other:
            length_of(OWNER, call, "validate")  # refuses what has none
        return calls, other
    if len(calls) > 1:
        return calls[:-1], calls[-1:]
    halves = _halves(calls[0])
    return (halves[:1], halves[1:]) if halves else (calls, [])


def _halves(call: dict[str, Any]) -> list[dict[str, Any]]:
    """Cut an input in two: the texts of a batch that has a mask, else the tokens; or not at all."""
    length = length_of(OWNER, call)
    shapes = {getattr(value, "shape", None) for value in call.values()}
    if not set(call) <= _BY_TOKEN or len(shapes) > 1:
        return []
    texts, tokens = slice(None), torch.arange(length, device="cpu")
    if "attention_mask" in call:
        seen = call["attention_mask"].cpu() != 0
        texts = seen.any(1).nonzero()[:, 0]  # what is padding alone is no text
        if len(texts) > 1:
            return [{n: v[part] for n, v in call.items()} for part in texts.tensor_split(2)]
        tokens = seen.any(0).nonzero()[:, 0]
    if len(tokens) < 2 * _LEAST_TOKENS:
        return []
    return [{n: v[texts][:, part] for n, v in call.items()} for part in tokens.tensor_split(2)]
