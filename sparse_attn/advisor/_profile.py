"""`profile`: what attention costs in a model, by length and layer, and what sparsity can gain.

A forward is timed whole, and with a copy in place of every attention call: the difference is
attention's. Both take turns, and the share is the median of the rounds, so that a machine that is
slow for a while slows both. Layers and patterns are timed on the tensors of a forward, one layer at
a time. Nothing stays in the model.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from .._binding import bound
from .._checks import check_kind, refuse
from .._observe import Attended, replacing, watching
from .._progress import Progress
from ..functional import sparse_attention
from ..patterns import Full, Pattern
from ..policy import Policy
from ..quality._calls import as_inputs, call_model, evaluating
from ..quality._named import DENSE_NAME, named_policies
from ._candidates import named
from ._crossover import crossover
from ._first_call import first_call
from ._profiled import AtLength, Profile
from ._times import at_length, checked_lengths, in_turns, is_text, length_of

__all__ = ["profile"]

OWNER = "profile"
#: Seconds for the rounds of a length's forwards, and of a layer's calls; three are timed anyway.
_FORWARDS, _CALLS = 3.0, 0.2
#: A median's standard error of many normal numbers, over their median deviation and by root n.
_MEDIAN_ERROR = 1.4826 * math.sqrt(math.pi / 2)


class _Layers:
    """Times dense attention and every pattern on the tensors of each layer."""

    def __init__(self, found: Mapping[str, Policy | Pattern]) -> None:
        self.found = found
        self.layers: dict[int, float] = {}
        self.patterns = dict.fromkeys((name for name in found if name != DENSE_NAME), 0.0)
        self.is_causal = False
        self.seen: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, call: Attended) -> None:
        """Time a layer's call; layers with a window of their own keep it."""
        tensors = call.query, call.key, call.value
        self.seen = call.query[:, :, :1], call.key[:, :, :1]
        self.is_causal = call.is_causal
        calls = {}
        for name, candidate in self.found.items():
            if call.windowed:
                judged = call.pattern
            elif isinstance(candidate, Policy):
                judged = candidate.choose(call.layer, call.query.shape[2], call.key.shape[2])
            else:
                judged = candidate
            calls[name] = partial(sparse_attention, *tensors, judged, **call.common)
        taken = in_turns(list(calls.values()), _CALLS)
        for name, seconds in zip(calls, map(statistics.median, taken), strict=True):
            if name == DENSE_NAME:
                self.layers[call.layer] = self.layers.get(call.layer, 0.0) + seconds
            else:
                self.patterns[name] += seconds


def profile(
    model: nn.Module,
    inputs: Any,
    lengths: Any = None,
    *,
    patterns: Any = None,
    progress: bool = True,
) -> Profile:
    """Measure attention's share of a model's time, and where sparse patterns begin to pay.

    Parameters
    ----------
    model : nn.Module
        A transformers model, one with ``nn.MultiheadAttention``, or one that calls
        ``F.scaled_dot_product_attention``; nothing stays in it.
    inputs : Tensor or mapping
        Token ids, or the keyword arguments of a call, tensors ``(batch, length, ...)``; of several
        inputs the first counts.
    lengths : list of int, optional
        Positions to measure at: tensors of the text's length are cut, or repeated. By default a
        quarter and half of its length, and its length. Images are measured as they are.
    patterns : Pattern or Policy, list or mapping of these, optional
        What is timed beside dense attention; by default one of each kind that the advisor tries.
    progress : bool
        Show a progress bar where tqdm is installed.

    Returns
    -------
    Profile
        ``print`` shows the table and what it means; ``.rows``, ``.crossover(name)``.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        Arguments of a wrong kind; inputs or lengths that the model refuses, with what it says.

    Examples
    --------
    >>> import sparse_attn as sa, torch
    >>> layer = torch.nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    >>> measured = sa.profile(model, {"src": torch.randn(1, 256, 64)}, [256], progress=False)
    >>> 0 <= measured.rows[0].share <= 1
    True
    """
    check_kind(OWNER, "model", model, nn.Module, "an nn.Module")
    check_kind(OWNER, "progress", progress, bool, "a bool")
    call = as_inputs(OWNER, inputs)[0]
    own = length_of(OWNER, call)
    asked = [] if lengths is None else checked_lengths(OWNER, lengths)
    with at_length(OWNER, model, call, min(own, *asked) if asked else own) as shortest:
        first = first_call(OWNER, model, shortest)
    if is_text(OWNER, call):
        lengths = asked or sorted({max(1, own // 4), max(1, own // 2), own})
    else:
        lengths = first.only_length(OWNER, asked or None)
    found: dict[str, Policy | Pattern] = {}
    if patterns is None:
        found |= _usual(named(OWNER, None, max(lengths), "time", first.is_causal))
    else:
        judged = named_policies(OWNER, patterns, "patterns", "pattern")
        found |= {name: one for name, one in judged.items() if one != Full()}
        for one in judged.values():
            with bound(OWNER, model, one):  # refuses a policy for another shape
                pass
    found[DENSE_NAME] = Full()
    rows = []
    layers = _Layers(found)
    with torch.no_grad(), evaluating(model), Progress(2 * len(lengths), progress) as bar:
        for length in lengths:
            bar.step(f"{length} positions", 0)
            layers = _Layers(found)
            with at_length(OWNER, model, call, length) as resized:
                rows.append(_at(model, resized, length, layers, bar))
        bar.step("crossovers", 0)
        pays_from = _pays_from(layers)
    return Profile(tuple(rows), type(model).__name__, pays_from, layers.is_causal)


def _pays_from(layers: _Layers) -> dict[str, int | None]:
    """Return crossovers with the heads of the layer that was seen last."""
    found = {}
    for name, pattern in layers.found.items():
        if isinstance(pattern, Policy) or pattern == Full() or layers.seen is None:
            continue
        with suppress(NotImplementedError):
            found[name] = crossover(pattern, *layers.seen, layers.is_causal)
    return found


def _usual(found: dict[str, Pattern]) -> dict[str, Pattern]:
    """Return the first candidate of each kind, and dense attention last."""
    first = {type(pattern): name for name, pattern in reversed(found.items())}
    return {name: pattern for name, pattern in found.items() if name in first.values()}


def _at(
    model: nn.Module, call: dict[str, Any], length: int, layers: _Layers, bar: Progress
) -> AtLength:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    run = partial(call_model, OWNER, model, call)

    def run_without() -> None:
        with replacing(_copy):
            run()

    with bound(OWNER, model, Full()):
        whole, without = in_turns([run, run_without], _FORWARDS)
    ratios = [own / all_of_it for own, all_of_it in zip(without, whole, strict=True)]
    ratio = statistics.median(ratios)
    bar.step(f"{length} positions")
    peak = None
    with bound(OWNER, model, Full()):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            run()
            peak = torch.cuda.max_memory_allocated(device) - before
        with watching(layers):
            run()
    if not layers.layers:
        raise refuse(OWNER, "a model with attention that a policy reaches", "none")
    bar.step(f"{length} positions")
    seconds = statistics.median(whole)
    noise = _error(ratios)
    return AtLength(length, seconds, ratio * seconds, layers.layers, layers.patterns, peak, noise)


def _error(numbers: list[float]) -> float:
    """Return the standard error of the median of three numbers or more.

    Few numbers are often closer together than their kind. The last factor makes up for it: two
    errors then hold 91 % of the medians of three normal numbers, and 94 to 96 % of those of more.
    """
    count, median = len(numbers), statistics.median(numbers)
    apart = statistics.median(abs(number - median) for number in numbers)
    return _MEDIAN_ERROR * apart / math.sqrt(count) * (count + 2) / (count - 2)


def _copy(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Stand in for attention: an output of its shape, from a copy."""
    if query.shape[-1] == value.shape[-1]:
        return query.clone()
    return query[..., :1].expand(*query.shape[:3], value.shape[-1]).clone()
