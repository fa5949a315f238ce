"""`Advice`: what a search found, drawn, as a page and as a file."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

import torch

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
    """

    def plot(self) -> Any:
        """Draw quality over cost of all that was tried, and the map of layers by heads.

        Returns
        -------
        matplotlib.figure.Figure
        """
        return draw_findings(self)

    def _repr_html_(self) -> str:
        """Return the advice for notebooks: outcome, pictures, tables."""
        return body(self)

    def report(self, path: str | PathLike[str]) -> None:
        """Write one self-contained HTML page: outcome, pictures, tables, the policy."""
        page(path, self)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the policy with its figures to a JSON file, which `Policy.load` reads."""
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
