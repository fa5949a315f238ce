"""`model`: what policies cost a real model, measured on its own output.

Each input runs under the model's own dense attention and under every policy; only the outputs of
one input are held at a time. Perplexity alone flatters: KL and the most likely next token stand
beside it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from .._binding import bound
from .._checks import check_kind, refuse
from .._columns import aligned, written
from .._drawing import as_html
from .._observe import watching
from .._progress import Progress
from ..patterns import Full, Pattern
from ..policy import Policy
from ._calls import as_inputs, call_model, evaluating, stopwatch
from ._figures import Output, Sums, judged_by
from ._named import DENSE_NAME, named_policies
from ._pairs import Pairs
from ._picture import draw

__all__ = ["Judge", "ModelQuality", "PolicyQuality", "model"]

OWNER = "quality.model"


@dataclass(frozen=True)
class PolicyQuality:
    """What one policy keeps of the model; figures that the model's output does not have are None.

    Attributes
    ----------
    name : str
    pairs : float
        Visited pairs over allowed pairs, over all layers, heads and inputs; NaN where they are not
        seen: of texts packed by ``cu_seq_lens_q``, of Longformer and of BigBird's blocks.
    perplexity : float or None
        Of the next tokens; None where every layer sees tokens past a row's own, and of an
        encoder-decoder without ``decoder_input_ids``.
    top1 : float or None
        Share of the positions whose most likely token is that of dense attention.
    kl : float or None
        Mean KL(dense || policy) of the distributions over tokens.
    rel_l1, cosine : float
        Of the outputs themselves: ``sum |own - dense| / sum |dense|``, mean cosine by position.
    seconds : float or None
        Of the model's whole forward over all inputs, when it was timed.
    standard_error : float
        Of `top1` (of `cosine` where there are no tokens), by the spread between 16 pieces.

    Examples
    --------
    >>> import sparse_attn as sa, torch
    >>> layer = torch.nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    >>> inputs = {"src": torch.randn(1, 64, 64)}
    >>> row = sa.quality.model(model, inputs, {"band": sa.Band(15)}, progress=False)["band"]
    >>> row.pairs, row.top1, 0 < row.cosine < 1
    (0.42578125, None, True)
    """

    name: str
    pairs: float
    perplexity: float | None
    top1: float | None
    kl: float | None
    rel_l1: float
    cosine: float
    seconds: float | None
    standard_error: float = 0.0


@dataclass(frozen=True)
class ModelQuality:
    """The figures of all policies; the first row is the model's own dense attention.

    Attributes
    ----------
    rows : tuple of PolicyQuality
    positions : int
        Positions that were judged.

    Examples
    --------
    >>> import sparse_attn as sa, torch
    >>> layer = torch.nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    >>> inputs = {"src": torch.randn(1, 64, 64)}
    >>> found = sa.quality.model(model, inputs, {"band": sa.Band(15)}, progress=False)
    >>> found["band"].pairs < found["dense"].pairs == 1
    True
    """

    rows: tuple[PolicyQuality, ...]
    positions: int

    def __getitem__(self, name: str) -> PolicyQuality:
        for row in self.rows:
            if row.name == name:
                return row
        names = ", ".join(row.name for row in self.rows)
        raise KeyError(f"sparse_attn.{OWNER}: expected the name of a row ({names}), got {name!r}")

    def table(self) -> str:
        """Return the figures as fixed-width text, a line for each policy.

        Examples
        --------
        >>> import sparse_attn as sa, torch
        >>> layer = torch.nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
        >>> inputs = {"src": torch.randn(1, 64, 64)}
        >>> found = sa.quality.model(model, inputs, {"band": sa.Band(15)}, progress=False)
        >>> found.table().split()[:3]
        ['policy', 'pairs', 'perplexity']
        """
        head = ("policy", "pairs", "perplexity", "top-1", "KL", "cosine", "seconds")
        dense = self.rows[0]
        seconds = written([row.seconds for row in self.rows])
        rows = zip(self.rows, seconds, strict=True)
        cells = [head, *((*_cells(row, dense), taken) for row, taken in rows)]
        return aligned(cells, left=1)

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        """Return the figures for notebooks: the table, and quality over pairs."""
        return as_html(self.table(), lambda ax: self.plot(ax), width=6)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain numbers, for a file.

        Examples
        --------
        >>> import sparse_attn as sa, torch
        >>> layer = torch.nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
        >>> inputs = {"src": torch.randn(1, 64, 64)}
        >>> found = sa.quality.model(model, inputs, {"band": sa.Band(15)}, progress=False)
        >>> [row["name"] for row in found.to_dict()["rows"]]
        ['dense', 'band']
        """
        return {"positions": self.positions, "rows": [asdict(row) for row in self.rows]}

    def plot(self, ax: Any = None) -> Any:
        """Draw quality over pairs: KL and top-1 where there are tokens, else the outputs' error.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default a new figure.

        Returns
        -------
        matplotlib.axes.Axes

        Raises
        ------
        ImportError
            Without matplotlib.

        Examples
        --------
        >>> import sparse_attn as sa, torch
        >>> layer = torch.nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
        >>> inputs = {"src": torch.randn(1, 64, 64)}
        >>> found = sa.quality.model(model, inputs, {"band": sa.Band(15)}, progress=False)
        >>> found.plot().figure.savefig("quality.png")  # doctest: +SKIP
        """
        return draw(self.rows[1:], ax)


def _cells(row: PolicyQuality, dense: PolicyQuality) -> tuple[str, ...]:
    perplexity = top1 = kl = ""
    if row.perplexity is not None and dense.perplexity is not None:
        perplexity = f"{row.perplexity:.2f}"
        if row is not dense:
            perplexity += f" ({row.perplexity / dense.perplexity - 1:+.1%})"
    if row.top1 is not None and row.kl is not None:
        top1, kl = f"{row.top1:.1%}", f"{row.kl:.4f}"
    return (
        row.name,
        "" if math.isnan(row.pairs) else f"{row.pairs:.1%}",
        perplexity,
        top1,
        kl,
        f"{row.cosine:.4f}",
    )


@torch.no_grad()
def model(
    model: nn.Module, inputs: Any, policies: Any, *, timed: bool = True, progress: bool = True
) -> ModelQuality:
    """Measure what policies cost a model on its own output, beside its own dense attention.

    Parameters
    ----------
    model : nn.Module
        A transformers model, one with ``nn.MultiheadAttention``, or one that
        calls ``F.scaled_dot_product_attention``. It is left as it was; a policy that it has is set
        aside meanwhile.
    inputs : Tensor, mapping, or list of these
        Token ids, or the keyword arguments of a call. Positions that ``attention_mask``, or the
        ``src_key_padding_mask`` of torch's modules, says are padding do not count. Of an
        encoder-decoder ``decoder_input_ids`` and ``decoder_attention_mask`` are meant, or its
        ``labels``, of which it has no next token. Hidden states of a model without a head
        (``AutoModel``) are judged by their cosine; perplexity, top-1 and KL are those of one with a
        head, such as ``AutoModelForCausalLM``.
    policies : Policy or Pattern, list or mapping of these
        Judged by name; those of a list are named by their pattern, or numbered policies. Whole
        texts run, so a policy's `decode` has no part in its figures; where that is a pattern, a
        warning says so.
    timed : bool
        Run each call once more for its time alone; the first counts pairs.
    progress : bool
        Show a progress bar where tqdm is installed.

    Returns
    -------
    ModelQuality
        A row for dense attention and one for each policy: pairs, perplexity, top-1 agreement, KL,
        time; with ``.table()`` and ``.plot()``.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        Arguments of a wrong kind; a policy that does not fit the model; a call that no engine
        serves. Under `patch_sdpa` such calls stay dense and count as that; where all do, or there
        are none, the model is refused.

    Examples
    --------
    >>> import sparse_attn as sa, torch, transformers
    >>> config = transformers.LlamaConfig(
    ...     hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    ...     vocab_size=64,
    ... )
    >>> model = transformers.LlamaForCausalLM(config).eval()
    >>> ids = torch.randint(0, 64, (1, 128))
    >>> kept = sa.quality.model(model, ids, {"band": sa.Band((31, 0), sinks=4)}, progress=False)
    >>> [row.name for row in kept.rows], round(kept["band"].pairs, 2)
    (['dense', 'band'], 0.48)
    """
    check_kind(OWNER, "model", model, nn.Module, "an nn.Module")
    check_kind(OWNER, "timed", timed, bool, "a bool")
    check_kind(OWNER, "progress", progress, bool, "a bool")
    judge = Judge(OWNER, model, as_inputs(OWNER, inputs))
    judged = named_policies(OWNER, policies)
    for name, policy in judged.items():
        if isinstance(policy, Policy) and policy.decode not in (None, Full(), policy.pattern):
            warnings.warn(
                f"sparse_attn.{OWNER}: whole texts run, so the figures of {name!r} say nothing of "
                f"its decode={policy.decode}",
                stacklevel=3,  # past the decorator
            )
    steps = len(judge.calls) * (1 + len(judged)) * (1 + timed)
    with Progress(steps, progress) as bar:
        rows = judge.rows({DENSE_NAME: None, **judged}, timed=timed, step=bar.step)
    return ModelQuality(tuple(rows), judge.positions)


class Judge:
    """A model and inputs, on which policies are judged beside the model's own attention.

    Parameters
    ----------
    owner : str
        The public function, for error messages.
    module : nn.Module
    calls : list of dict
        Keyword arguments of the model's calls.
    hold : bool
        Keep the outputs of dense attention between calls of `rows`.
    """

    def __init__(
        self, owner: str, module: nn.Module, calls: list[dict[str, Any]], hold: bool = False
    ) -> None:
        self.owner, self.module, self.calls = owner, module, calls
        self.positions = 0
        self._dense: list[Output] = []
        self._hold = hold

    @torch.no_grad()
    def rows(
        self,
        judged: Mapping[str, Policy | Pattern | None],
        *,
        timed: bool = False,
        counted: bool = True,
        step: Callable[..., None] = lambda name, steps=1: None,
    ) -> list[PolicyQuality]:
        """Return a row for each policy; None stands for the model's own attention.

        Parameters
        ----------
        judged : mapping
        timed : bool
            Run each call again for its time.
        counted : bool
            Count pairs; they are NaN otherwise.
        step : callable
            Called after each of the model's calls.
        """
        sums = {name: Sums() for name in judged}
        pairs = {name: Pairs() for name in judged}
        seconds = dict.fromkeys(judged, 0.0)
        with evaluating(self.module):
            for number, call in enumerate(self.calls):
                dense = self._dense_output(number)
                for name, policy in judged.items():
                    step(name, 0)
                    with bound(self.owner, self.module, policy) as patch:
                        out = dense
                        if policy is not None:
                            with watching(pairs[name]) if counted else nullcontext():
                                out = call_model(self.owner, self.module, call)
                            pairs[name].end_forward(patch)
                        sums[name].add(out, dense, *judged_by(self.module, call))
                        if math.isnan(sums[name].size):
                            what = "a model whose own output holds numbers"
                            raise refuse(self.owner, what, "NaN; a wider dtype may mend it")
                        step(name)
                        if timed:
                            began = stopwatch()
                            call_model(self.owner, self.module, call)
                            seconds[name] += stopwatch() - began
                            step(name)
        for name, seen in pairs.items():
            if counted:
                seen.check_served(self.owner, self.module, name)
        self.positions = max((total.rows for total in sums.values()), default=0)
        if sums and not self.positions:
            raise refuse(self.owner, "inputs with a token that is not padding", "padding alone")
        taken = seconds if timed else dict.fromkeys(judged)
        rows = [_row(name, sums[name], pairs[name].share(counted), taken[name]) for name in judged]
        ahead = set[bool]().union(*(seen.ahead for seen in pairs.values()))
        if ahead == {True} and not hasattr(self.module, "can_generate"):
            return [replace(row, perplexity=None) for row in rows]  # of no next token
        return rows

    def _dense_output(self, number: int) -> Output:
        if number < len(self._dense):
            return self._dense[number]
        with bound(self.owner, self.module, None):
            dense = call_model(self.owner, self.module, self.calls[number])
        if self._hold:
            self._dense.append(dense)
        return dense


def _row(name: str, sums: Sums, pairs: float, seconds: float | None) -> PolicyQuality:
    judged = sums.judged or None
    return PolicyQuality(
        name=name,
        pairs=pairs,
        perplexity=sums.perplexity(),
        top1=judged and sums.same / judged,
        kl=judged and max(0.0, sums.kl / judged),  # rounding alone makes it less
        rel_l1=sums.error / sums.size if sums.size else 0.0,
        cosine=sums.cosine / max(1, sums.rows),
        seconds=seconds,
        standard_error=sums.standard_error(),
    )
