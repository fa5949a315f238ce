"""The report: a compact table for the terminal, and a Markdown page with plots and insights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from . import findings, insights, landscape, plots
from .bars import MEASURES, Bar, Verdict
from .runner import GroupResult, Row, is_wrong
from .store import Run


class Cells(NamedTuple):
    """A row of the report, as text; a row that failed has its name alone."""

    name: str
    ms: str = ""
    tflops: str = ""  # of the visited pairs
    share: str = ""
    megabytes: str = ""
    error: str = ""
    limit: str = ""


def table(run: Run) -> str:
    """Return the run as fixed-width text: every row, then the floors; of random calls, tables."""
    lines = [line for line in (findings.sentence(run), *_random_tables(run)) if line]
    for result in _listed(run):
        lines.append(f"\n{result.name}  (noise {result.noise:.1%})")
        cells = [_cells(row) for row in result.rows]
        width = max(len(c.name) for c in cells)
        for row, c in zip(result.rows, cells, strict=True):
            if row.failure:
                lines.append(f"  {c.name:<{width}}  {row.failure}")
            else:
                lines.append(
                    f"  {c.name:<{width}} {c.ms:>10} ms {c.tflops:>8} TF {c.share:>6}"
                    f" {c.megabytes:>9}  error {c.error} of {c.limit}"
                )
    if run.verdicts:
        lines.append("\nfloors")
        lines += [f"  {mark(v):<9} {_bar_text(v)}" for v in run.verdicts]
    return "\n".join(lines)


def write(run: Run, path: Path) -> None:
    """Write the Markdown page beside the JSON file, with its plots."""
    pictures = plots.draw(run, path)
    parts = [_head(run)]
    if run.verdicts:
        parts.append(_verdict_table(run.verdicts))
    parts += [f"![{title}]({name})\n" for title, name in pictures]
    text = insights.sentences(run)
    if text:
        parts.append("## What it shows\n\n" + "\n".join(f"* {line}" for line in text) + "\n")
    behind = landscape.points_behind(run.results)
    if behind:
        parts.append(_behind_table(behind))
    if run.crossovers:
        parts.append(_crossover_table(run))
    parts += _random_tables(run)
    if listed := _listed(run):
        parts += ["## Every row\n", *(_group_table(result) for result in listed)]
    path.with_suffix(".md").write_text("\n".join(parts))


def _listed(run: Run) -> list[GroupResult]:
    """Return the groups that are shown row by row: random calls are too many."""
    return [result for result in run.results if not findings.is_random(result)]


def _random_tables(run: Run) -> list[str]:
    found = findings.tables(run.results, run.ceilings)
    return [f"## {table.title}\n\n" + markdown(table.head, table.rows) for table in found]


def _head(run: Run) -> str:
    machine = run.machine
    place = [f"{run.device_name}", f"torch {machine['torch']}"]
    if "driver" in machine:
        place += [f"driver {machine['driver']}", f"cuDNN {machine['cudnn']}"]
    else:
        place.append(f"{machine['threads']} threads")
    ceiling = ", ".join(_ceiling(name, value) for name, value in run.ceilings.items())
    return (
        f"# Benchmark suite `{run.suite}`\n\n"
        f"{', '.join(place)}; {machine['date']}; {run.seconds / 60:.1f} minutes, {run.rounds} "
        f"shuffled rounds, medians; median noise {run.noise():.1%}.\n\n"
        f"Ceilings in the same run: {ceiling}.\n\n"
        "Visited TFLOP/s count 4 x head dim per allowed (query, key) pair and head. Share is of "
        "the matrix product (decode: of a read-only sum). Memory is the peak beyond the inputs, "
        "output included. Error is the greatest difference from float64 on sampled rows of the "
        "very call that was timed; its limit is twice the error of same-dtype math attention plus "
        "rounding.\n"
    )


def _ceiling(name: str, value: float) -> str:
    kind, _, dtype = name.partition("/")
    if kind == "tflops":
        return f"matrix product in {dtype} {value:.3g} TFLOP/s"
    return f"{'L2' if kind.startswith('l2') else 'memory'} read by a sum {value:.3g} TB/s"


def _verdict_table(verdicts: Sequence[Verdict]) -> str:
    rows = []
    for v in verdicts:
        bar, sign = v.bar, "at most" if v.bar.at_most else "at least"
        figure = "" if v.figure is None else f"{v.figure:.3g}"
        rows.append(
            (
                bar.group,
                bar.subject,
                measure_text(bar),
                figure,
                f"{sign} {bar.floor:g}",
                f"{bar.goal:g}",
                mark(v) + (f": {v.why}" if v.why else ""),
            )
        )
    head = ("group", "entry", "figure is", "figure", "floor", "goal", "")
    return "## Floors\n\n" + markdown(head, rows)


def _behind_table(points: Sequence[landscape.Point]) -> str:
    rows = [(p.name, f"{p.ratio:.2f}", p.peer, f"{p.ms:.4g}", p.engine) for p in points]
    head = ("point", "best peer's time / ours", "the peer", "our ms", "our engine")
    limit = f"under {landscape.MARKED:g}"
    return f"## Points {limit}\n\n" + markdown(head, rows)


def _crossover_table(run: Run) -> str:
    lengths = sorted({n for c in run.crossovers for n in c.speedups})
    head = ("pattern", "pays from", "Policy's dense_below", *map(str, lengths), "the default is")
    rows = []
    for c in run.crossovers:
        pays = "not on this curve" if c.length is None else f"{c.length:.0f}"
        if c.length == lengths[0]:
            pays = f"{lengths[0]} or less"
        policy = "-" if c.policy_length is None else str(c.policy_length)
        speeds = [f"{c.speedups[n]:.2f}x" if n in c.speedups else "" for n in lengths]
        rows.append((c.label, pays, policy, *speeds, c.verdict))
    return (
        "## Crossover with dense attention\n\nTime of our own dense causal attention over the "
        "pattern's, by length.\n\n" + markdown(head, rows)
    )


def _group_table(result: GroupResult) -> str:
    rows = []
    for row in result.rows:
        cells = _cells(row)
        if row.failure:
            rows.append((cells.name, row.label, row.failure, *[""] * 6))
        else:
            setup = "" if row.setup_ms is None else f"{row.setup_ms:.1f}"
            rows.append((cells.name, row.label, *cells[1:], setup))
    head = (
        "entry",
        "case",
        "ms",
        "visited TFLOP/s",
        "share",
        "memory MB",
        "error",
        "limit",
        "mask built in ms",
    )
    return f"### {result.name}\n\nNoise {result.noise:.1%}.\n\n" + markdown(head, rows)


def _cells(row: Row) -> Cells:
    name = f"{row.name} [{row.engine}]" if row.engine else row.name
    name += "" if row.captured else " (burst of plain calls)"
    if row.failure:
        return Cells(name)
    error = "" if row.error is None else f"{row.error:.1e}"
    limit = "" if row.error_limit is None else f"{row.error_limit:.1e}"
    if is_wrong(row):
        error += " WRONG"
    attends = row.error is not None
    return Cells(
        name,
        f"{row.ms:.4g}",
        f"{row.visited_tflops:.3g}" if attends else "",
        f"{row.share:.0%}" if attends else "",
        f"{row.peak_bytes / 1e6:.1f}",
        error,
        limit,
    )


def mark(v: Verdict) -> str:
    """Return a verdict's word."""
    if v.held is None:
        return "peer missing" if "not installed" in v.why else "not judged"
    if not v.held:
        return "NOT HELD"
    reached = v.figure is not None and (
        v.figure <= v.bar.goal if v.bar.at_most else v.figure >= v.bar.goal
    )
    return "goal" if reached else "held"


def _bar_text(v: Verdict) -> str:
    bar = v.bar
    figure = v.why if v.figure is None else f"{v.figure:.3g}"
    sign = "<=" if bar.at_most else ">="
    return f"{bar.group} | {bar.subject}: {measure_text(bar)} = {figure} ({sign} {bar.floor:g})"


def measure_text(bar: Bar) -> str:
    """Return what a bar's figure is, in words."""
    text = MEASURES[bar.measure][0].format(against=bar.against)
    return f"{text}, in bursts" if bar.method == "burst" else text


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
