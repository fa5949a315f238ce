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
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from .._binding import bound
from .._checks import check_choice, check_kind, refuse
from .._columns import aligned, written
from .._drawing import as_html
from .._observe import Attended, replacing, watching
from .._progress import Progress
from ..functional import sparse_attention
from ..patterns import Full, Pattern
from ..policy import Policy
from ..quality._calls import as_inputs, call_model, evaluating
from ..quality._named import DENSE_NAME, named_policies
from ._candidates import named
from ._causal import is_causal_in
from ._crossover import crossover
from ._times import checked_lengths, in_turns, length_of, resized

__all__ = ["Profile", "profile"]

OWNER = "profile"
#: Seconds for the rounds of a length's forwards, and of a layer's calls; three are timed anyway.
_FORWARDS, _CALLS = 3.0, 0.2
#: A median's standard error of many normal numbers, over their median deviation and by root n.
_MEDIAN_ERROR = 1.4826 * math.sqrt(math.pi / 2)
#: Speed-ups below this are not worth a pattern.
_WORTH = 1.1


@dataclass(frozen=True)
class AtLength:
    """Times at one length, in seconds.

    Attributes
    ----------
    length : int
    whole, without : float
        The model's forward, and the same with attention replaced by a copy. Both take turns: the
        medians of the rounds' times, and of their ratios.
    layers : dict of int to float
        Dense attention alone, by layer: all calls of a layer together.
    patterns : dict of str to float
        Every pattern in place of dense attention, all layers together.
    peak_bytes : int or None
        Most memory of the forward beyond what was held before it; None on the CPU.
    noise : float
        Standard error of the share, by how far the rounds are from their median.
    """

    length: int
    whole: float
    without: float
    layers: dict[int, float]
    patterns: dict[str, float]
    peak_bytes: int | None
    noise: float = 0.0

    @property
    def share(self) -> float:
        """Attention's share of the forward."""
        return max(0.0, 1 - self.without / self.whole)

    @property
    def within_noise(self) -> bool:
        """Whether the rounds do not tell `share` from 0."""
        return self.share <= 2 * self.noise


@dataclass(frozen=True)
class Profile:
    """What `profile` measured, a row for each length.

    Attributes
    ----------
    rows : tuple of AtLength
    model : str
        The model's class.
    pays_from : dict of str to int or None
        By pattern: the least length from which on it is faster than dense attention on this device,
        with the model's heads; None where it is not at any length that was tried. Measured once on
        random tensors and kept in a file; patterns that depend on the data are left out.
    is_causal : bool
        Whether the model's calls are; those of `pays_from` are alike.
    """

    rows: tuple[AtLength, ...]
    model: str
    pays_from: dict[str, int | None] = field(default_factory=dict)
    is_causal: bool = True

    def crossover(self, name: str) -> int | None:
        """Return the least measured length from which on a pattern is faster than dense.

        Raises
        ------
        ValueError
            A name that no row has.
        """
        check_choice("Profile.crossover", "name", name, list(self.rows[0].patterns))
        found = None
        for row in sorted(self.rows, key=lambda row: -row.length):
            if row.patterns[name] >= sum(row.layers.values()):
                break
            found = row.length
        return found

    def table(self) -> str:
        """Return the figures as fixed-width text."""
        names = list(self.rows[0].patterns)
        head = ["length", "forward s", "attention", "dense s", *(f"{name} s" for name in names)]
        lengths = [str(row.length) for row in self.rows]
        shares = [f"{row.share:.0%} ± {_percent(row.noise)}" for row in self.rows]
        whole = written([row.whole for row in self.rows])
        dense = written([sum(row.layers.values()) for row in self.rows])
        sparse = [written([row.patterns[name] for row in self.rows]) for name in names]
        lines = [head, *zip(lengths, whole, shares, dense, *sparse, strict=True)]
        return aligned(lines, left=0)

    def summary(self) -> str:
        """Return what it means, in sentences."""
        longest = max(self.rows, key=lambda row: row.length)
        lines = [*_verdict(longest)]
        for name in longest.patterns:
            length = self.crossover(name)
            if length is None:
                lines.append(f"{name}: not faster than dense at the longest of these lengths.")
            else:
                times = sum(longest.layers.values()) / longest.patterns[name]
                lines.append(
                    f"{name}: faster than dense attention from {length} positions on, {times:.2f} "
                    f"times as fast at {longest.length}."
                )
        for name, length in self.pays_from.items():
            found = "at no length that was tried" if length is None else f"from {length} keys on"
            kind = "causal" if self.is_causal else "not causal"
            lines.append(f"{name} alone, {kind}, on this device: faster than dense {found}.")
        if longest.peak_bytes is not None:
            lines.append(f"Peak memory of that forward: {longest.peak_bytes / 2**20:.0f} MiB.")
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.table()}\n\n{self.summary()}"

    def _repr_html_(self) -> str:
        """Return the figures for notebooks."""
        return as_html(str(self))


def _verdict(row: AtLength) -> list[str]:
    """Say what attention's share allows, and whether that is worth a pattern."""
    share, noise = f"{row.share:.0%}", _percent(row.noise)
    # Of a share that is within noise, what it may still be.
    most = 1 / max(1e-9, 1 - row.share - (2 * row.noise if row.within_noise else 0))
    takes = f"At {row.length} positions attention takes {share} of the forward"
    if row.within_noise:
        takes += f", which is within the noise of the measurement ({noise})"
        if most >= _WORTH:
            return [f"{takes}: measure longer texts, or on a quieter machine."]
    lines = [f"{takes}: no attention, however fast, makes it more than {most:.2f} times as fast."]
    if most < _WORTH:
        lines.append(
            "Sparse attention is not worth it at these lengths, even where it is faster than dense."
        )
    return lines


class _Layers:
    """Times dense attention and every pattern on the tensors of each layer."""

    def __init__(self, found: Mapping[str, Policy | Pattern]) -> None:
        self.found = found
        self.layers: dict[int, float] = {}
        self.patterns = dict.fromkeys((name for name in found if name != DENSE_NAME), 0.0)
        self.is_causal = False
        self.seen: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, call: Attended) -> None:
        """Time a layer's call; layers with a pattern of their own keep it."""
        tensors = call.query, call.key, call.value
        self.seen = call.query[:, :, :1], call.key[:, :, :1]
        self.is_causal = bool(call.common.get("is_causal"))
        calls = {}
        for name, candidate in self.found.items():
            if call.pattern != Full():
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
        Token ids, or the keyword arguments of a call; of several inputs the first counts.
    lengths : list of int, optional
        Positions to measure at: the input is cut, or repeated. By default a quarter and half of
        its length, and its length.
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
    call = as_inputs(OWNER, inputs)[0]
    own = length_of(OWNER, call)
    if lengths is None:
        lengths = sorted({max(1, own // 4), max(1, own // 2), own})
    lengths = checked_lengths(OWNER, lengths)
    found: dict[str, Policy | Pattern] = {}
    if patterns is None:
        is_causal = is_causal_in(OWNER, model, resized(call, min(lengths)))
        found |= _usual(named(OWNER, None, max(lengths), "time", is_causal))
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
            rows.append(_at(model, resized(call, length), length, layers, bar))
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


def _percent(noise: float) -> str:
    """Write an error in whole percents, which is never none."""
    return f"{max(noise, 0.01):.0%}"


def _copy(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Stand in for attention: an output of its shape, from a copy."""
    if query.shape[-1] == value.shape[-1]:
        return query.clone()
    return query[..., :1].expand(*query.shape[:3], value.shape[-1]).clone()
