"""`Advice`: what a search found, drawn, as a page and as a file."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

import torch

from .._drawing import as_html
from ._findings import Findings, Tried
from ._picture import draw_findings
from ._report import body, page

__all__ = ["Advice", "Tried"]


@dataclass(frozen=True, eq=False, repr=False)
class Advice(Findings):
    """What `advise` found.

    Attributes
    ----------
    policy : Policy
    keep : float
        What was asked.
    by : {"pairs", "time"}
        The cost that the search made small.
    kept : bool
        Whether the policy kept it: on the validation text, or without one on the calibration text.
    figure : str
        What `keep` counts: top-1 agreement, or cosine.
    tried : tuple of Tried
        Choices judged on the calibration text, by pairs.
    validation : tuple of PolicyQuality
        Dense attention, then the choices judged on other text, the last of them the policy; empty
        without such a text.
    times : dict of int to (float, float)
        By length: seconds of a forward, dense (this package's kernels) and under the policy.
    choice : dict of (layer, key head) to str
        The candidate of each.
    skipped : tuple of int
        Layers that were left as they are.
    unmeasured : tuple of int
        Layers that stay dense, since `minutes` left no time to measure candidates in them.
    model : str
        The model's class.
    length : int
        Positions of the calibration text.
    dense_kept : float
        What dense attention by this package's kernels keeps of the calibration text: less than all
        only by rounding.
    seconds : float
        Of the search.

    Examples
    --------
    >>> import sparse_attn as sa, torch
    >>> layer = torch.nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    >>> texts = [{"src": torch.randn(1, 256, 64)} for _ in range(2)]
    >>> advice = sa.advise(model, texts, 0.5, patterns=[sa.Band(31)], progress=False)
    >>> advice.kept, round(advice.pairs, 3)
    (True, 0.231)
    """

    def plot(self) -> Any:
        """Draw quality over cost of all that was tried, and the map of layers by heads.

        Returns
        -------
        matplotlib.figure.Figure

        Raises
        ------
        ImportError
            Without matplotlib.

        Examples
        --------
        >>> import sparse_attn as sa, torch
        >>> layer = torch.nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
        >>> texts = [{"src": torch.randn(1, 256, 64)} for _ in range(2)]
        >>> advice = sa.advise(model, texts, 0.5, patterns=[sa.Band(31)], progress=False)
        >>> advice.plot().savefig("advice.png")  # doctest: +SKIP
        """
        return draw_findings(self)

    def _repr_html_(self) -> str:
        """Return outcome, pictures and tables for notebooks; text alone without matplotlib."""
        try:
            return body(self)
        except ImportError:
            return as_html(str(self))

    def report(self, path: str | PathLike[str]) -> None:
        """Write one self-contained HTML page: outcome, pictures, tables, the policy.

        Parameters
        ----------
        path : path
            Written over where it exists.

        Raises
        ------
        TypeError, ImportError, OSError
            No path; without matplotlib; a file that cannot be written.

        Examples
        --------
        >>> import sparse_attn as sa, torch
        >>> layer = torch.nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
        >>> texts = [{"src": torch.randn(1, 256, 64)} for _ in range(2)]
        >>> advice = sa.advise(model, texts, 0.5, patterns=[sa.Band(31)], progress=False)
        >>> advice.report("advice.html")  # doctest: +SKIP
        """
        page(path, self)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the policy with its figures to a JSON file, which `Policy.load` reads.

        Parameters
        ----------
        path : path
            Written over where it exists.

        Raises
        ------
        TypeError, ValueError, OSError
            As `Policy.save`.

        Examples
        --------
        >>> import pathlib, tempfile, sparse_attn as sa, torch
        >>> layer = torch.nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
        >>> texts = [{"src": torch.randn(1, 256, 64)} for _ in range(2)]
        >>> advice = sa.advise(model, texts, 0.5, patterns=[sa.Band(31)], progress=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     advice.save(pathlib.Path(folder, "policy.json"))
        ...     sa.Policy.load(pathlib.Path(folder, "policy.json")) == advice.policy
        True
        """
        from .. import __version__

        about = {
            "model": self.model,
            "keep": self.keep,
            "by": self.by,
            "kept": self.kept,
            "figure": self.figure,
            "length": self.length,
            "pairs": self.pairs,
            "validation": [asdict(row) for row in self.validation],
            "tried": [asdict(row) for row in self.tried],
            "times": {str(length): list(pair) for length, pair in self.times.items()},
            "versions": {
                "sparse_attn": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }
        self.policy.save(path, about)
