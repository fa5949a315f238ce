"""What the figures say, in sentences that are computed from them."""

from __future__ import annotations

from collections.abc import Iterator

from .findings import sentence
from .runner import GroupResult, Row
from .store import Run
from .timing import ratio


def sentences(run: Run) -> list[str]:
    """Return one sentence a finding, for the curves that the run has."""
    return [
        *_fusion(run),
        *_memory(run),
        *_peers(run),
        *_patterns(run),
        *_break_even(run),
        *_accuracy(run),
        *_merged(run),
        *_reserved(run),
        *filter(None, [sentence(run)]),
    ]


def _points(run: Run, sweep: str) -> list[GroupResult]:
    return sorted((r for r in run.results if r.sweep == sweep), key=lambda r: r.x)


def _fusion(run: Run) -> Iterator[str]:
    """Tiling and fusion: the naive engine beside the fused one."""
    both = [(p, p.row("naive"), p.row("dense")) for p in _points(run, "length")]
    pairs = [(p, n, d) for p, n, d in both if n is not None and d is not None]
    if not pairs:
        return
    point, naive, dense = pairs[-1]
    first, small, small_dense = pairs[0]
    yield (
        f"Tiling and fusion: at {int(point.x)} tokens dense attention in one fused pass takes "
        f"{_mb(dense)} beyond its inputs where the naive engine takes {_mb(naive)}, and is "
        f"{ratio(naive.rounds_ms, dense.rounds_ms):.1f}x as fast; at {int(first.x)} tokens it is "
        f"{ratio(small.rounds_ms, small_dense.rounds_ms):.1f}x as fast."
    )


def _memory(run: Run) -> Iterator[str]:
    """Tell what each variant allocates at the longest length, its output included."""
    points = _points(run, "length")
    if not points:
        return
    rows = [r for r in points[-1].rows if r.via == "ours" and not r.failure]
    if rows:
        each = ", ".join(f"{row.name} {_mb(row)}" for row in rows)
        yield f"Memory beyond the inputs at {int(points[-1].x)} tokens: {each}."


def _peers(run: Run) -> Iterator[str]:
    """Our dense attention beside each peer's along the lengths."""
    points = _points(run, "length")
    names = dict.fromkeys(r.name for p in points for r in p.rows if _is_dense_peer(r))
    for name in names:
        both = [(int(p.x), p.row("dense"), p.row(name)) for p in points]
        speed = {n: ratio(b.rounds_ms, a.rounds_ms) for n, a, b in both if a and b}
        if speed:
            low, high = (choose(speed, key=speed.__getitem__) for choose in (min, max))
            yield (
                f"Dense attention beside {name}: from {speed[low]:.2f}x as fast (at {low} tokens) "
                f"to {speed[high]:.2f}x (at {high})."
            )


def _is_dense_peer(row: Row) -> bool:
    return row.via in ("cudnn", "flash", "sdpa") and row.case["spec"]["variant"] == "fused"


def _patterns(run: Run) -> Iterator[str]:
    """Where each pattern pays, and how much at the longest length."""
    points = _points(run, "length")
    for crossover in run.crossovers:
        lengths = sorted(crossover.speedups)
        last = lengths[-1]
        row = next((p.row(crossover.pattern) for p in points if p.x == last), None)
        if row is None:
            continue
        promised = _promised(points, crossover.pattern, last)
        speed = crossover.speedups[last]
        length = crossover.length
        pays = "does not pay" if length is None else f"pays from about {length:.0f} tokens on"
        yield (
            f"{crossover.label}: {pays}; at {last} tokens it is {speed:.3g}x as fast as dense, and "
            f"its share of the pairs promises {promised:.1f}x."
        )


def _promised(points: list[GroupResult], name: str, length: int) -> float:
    point = next(p for p in points if p.x == length)
    row, dense = point.row(name), point.row("dense")
    assert row is not None and dense is not None
    return dense.density / row.density


def _break_even(run: Run) -> Iterator[str]:
    """Tell the greatest density at which each pattern is no slower than dense."""
    best: dict[str, float] = {}
    points = _points(run, "density")
    for point in points:
        dense = point.row("dense")
        for row in point.rows:
            if dense is None or row.failure or row.via != "ours" or row is dense:
                continue
            best.setdefault(row.name, 0.0)
            if ratio(row.rounds_ms, dense.rounds_ms) <= 1:
                best[row.name] = max(best[row.name], row.density)
    if best:
        each = ", ".join(f"{name} " + (f"{d:.0%}" if d else "none") for name, d in best.items())
        length = points[0].rows[0].case["length"]
        yield (
            f"Break-even at {length} tokens, the greatest measured share of pairs at which a "
            f"pattern is no slower than dense: {each}."
        )


def _accuracy(run: Run) -> Iterator[str]:
    """Which pattern keeps most of dense attention at the sparsest point."""
    points = [p for p in _points(run, "density") if p.x <= 0.1]
    if not points:
        return
    point = points[-1]
    rows = [
        r
        for r in point.rows
        if r.to_dense is not None and r.via == "ours" and r.name != "dense" and not r.failure
    ]
    each = ", ".join(
        f"{r.name} {r.to_dense:.2f}" for r in sorted(rows, key=lambda r: r.to_dense or 0)
    )
    yield (
        f"Accuracy at {point.x:.0%} of the pairs, as relative distance from dense attention on "
        f"synthetic inputs with locality and sinks: {each}. What a pattern keeps in a model "
        "depends on the model; of one: [these patterns](quality-report-patterns-cpu-amd-epyc.md)."
    )


def _merged(run: Run) -> Iterator[str]:
    """Global tokens fused with the band beside two calls merged by lse."""
    for result in run.results:
        fused, merged, band = (result.row(name) for name in ("fused", "merged", "band"))
        if fused is not None and merged is not None and band is not None:
            yield (
                f"Global tokens ({fused.label}): fused in the band's pass they cost "
                f"{ratio(fused.rounds_ms, band.rounds_ms):.2f}x the band alone, as two calls "
                f"merged by lse {ratio(merged.rounds_ms, band.rounds_ms):.2f}x."
            )


def _reserved(run: Run) -> Iterator[str]:
    """Reserved memory over many calls."""
    if run.reserved is not None:
        grew = run.reserved["grew_bytes"] / 2**20
        yield (
            f"Reserved memory grew by {grew:.1f} MiB over {run.reserved['calls']} calls of mixed "
            "lengths, after one pass over the lengths."
        )


def _mb(row: Row) -> str:
    return f"{row.peak_bytes / 2**20:.0f} MiB"
