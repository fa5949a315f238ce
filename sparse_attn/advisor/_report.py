"""One self-contained HTML page of what a search found: sentences, pictures, tables, the policy."""

from __future__ import annotations

import html
from os import PathLike
from pathlib import Path

from .._checks import check_kind
from .._drawing import image_html
from ._findings import Findings
from ._picture import draw_findings

__all__ = ["body", "page"]

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       color: #1c2530; }
h1, h2 { line-height: 1.2; } img { max-width: 100%; }
pre { background: #f4f6f8; padding: 1rem; overflow-x: auto; font-size: 13px; }
.verdict { border-left: 4px solid #1f7a4d; padding: .4rem 1rem; background: #f1f8f4; }
.verdict.missed { border-color: #b3401f; background: #fbf2ee; }
"""


def body(found: Findings) -> str:
    """Return the outcome, pictures and tables as HTML, also for notebooks."""
    figure = draw_findings(found)
    from matplotlib import pyplot

    picture = image_html(figure, "quality over cost; candidates by layer and key head")
    pyplot.close(figure)
    verdict = "verdict" if found.kept else "verdict missed"
    sentences = "".join(f"<p>{html.escape(line)}</p>" for line in found.summary().splitlines())
    return (
        f"<h1>{html.escape(_title(found))}</h1>"
        f"<p>Asked: {html.escape(found.figure)} of {found.keep:.1%}. The search took "
        f"{found.seconds / 60:.1f} minutes on {found.length} positions.</p>"
        f"<div class='{verdict}'>{sentences}</div>"
        f"<h2>What was tried, and what each key head does</h2>"
        f"{picture}"
        f"<h2>Figures</h2><pre>{html.escape(found.table())}</pre>"
        f"<h2>The policy</h2><pre>{html.escape(str(found.policy))}</pre>"
    )


def page(path: str | PathLike[str], found: Findings) -> None:
    """Write the page."""
    check_kind("Advice.report", "path", path, (str, PathLike), "a path")
    Path(path).write_text(
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>{html.escape(_title(found))}</title><style>{_STYLE}</style></head><body>"
        f"{body(found)}</body></html>\n",
        encoding="utf-8",
    )


def _title(found: Findings) -> str:
    return f"Sparse attention for {found.model}"
