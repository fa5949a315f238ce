"""All floors on one page: every bar, its figure in its suite's last run, held or not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from .bars import Bar, Verdict
from .floors import BARS
from .report import mark, markdown, measure_text
from .store import Run, load
from .suites import SUITES, groups_of


def write(folder: Path, machine: str) -> str:
    """Write ``bars-<machine>.md`` from the JSON files beside it; return a line of counts."""
    runs = {}
    for suite in SUITES:
        path = folder / f"{suite}-{machine}.json"
        if path.exists():
            runs[suite] = load(path)
    rows, marks = [], Counter[str]()
    for suite, bar in _bars():
        if suite not in runs:
            continue
        verdict = _verdict(runs[suite], bar)
        marks[mark(verdict)] += 1
        sign = "at most" if bar.at_most else "at least"
        figure = "" if verdict.figure is None else f"{verdict.figure:.3g}"
        outcome = mark(verdict) + (f": {verdict.why}" if verdict.why else "")
        rows.append(
            (
                suite,
                bar.group,
                bar.subject,
                measure_text(bar),
                f"{sign} {bar.floor:g}",
                f"{bar.goal:g}",
                figure,
                outcome,
            )
        )
    if not rows:
        return "no floor is judged by these suites"
    counts = ", ".join(f"{number} {name}" for name, number in marks.items())
    places = "\n".join(f"* `{suite}`: {_place(run)}" for suite, run in runs.items())
    head = ("suite", "group", "entry", "figure is", "floor", "goal", "measured", "")
    (folder / f"bars-{machine}.md").write_text(
        "# Floors\n\nEvery floor in the last run of its suite; a figure is the median over the "
        "rounds, and a floor holds within 2 %. `goal` is a floor whose goal was reached too.\n\n"
        f"{places}\n\n{counts}, of {len(rows)}.\n\n" + markdown(head, rows)
    )
    return f"floors: {counts}, of {len(rows)}"


def _bars() -> list[tuple[str, Bar]]:
    suite_of = {group.name: name for name in SUITES for group in groups_of(name, "cuda")}
    return [(suite_of[bar.group], bar) for bar in BARS]


def _verdict(run: Run, bar: Bar) -> Verdict:
    found = [verdict for verdict in run.verdicts if verdict.bar == bar]
    return found[0] if found else Verdict(bar, None, None, "not in the run")


def _place(run: Run) -> str:
    software = f"torch {run.machine['torch']}"
    return f"{run.device_name}, {software}, {run.machine['date']}, {run.rounds} rounds"
