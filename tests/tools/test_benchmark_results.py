"""What benchmarks make of their times: floors, stored runs, summaries and pictures."""

import json
from dataclasses import replace

import pytest

from benchmarks import crossover, landscape, report, suites, summary
from benchmarks.bars import BEST_PEER, Bar, Verdict, judge
from benchmarks.floors import BARS
from benchmarks.peers import PEERS
from benchmarks.runner import GroupResult, Row, _row
from benchmarks.store import Run, Store, load


def _rows(**milliseconds):
    rows = [
        Row(name, "ours", {"head_dim": 16}, name, rounds_ms=[ms] * 3, ms=ms, visited_tflops=6 / ms)
        for name, ms in milliseconds.items()
    ]
    return GroupResult("g", "", 0.0, rows)


@pytest.mark.parametrize(
    "measure, at_most, floor, held",
    [
        ("speed", False, 1.5, True),
        ("speed", False, 1.51, True),
        ("speed", False, 1.54, False),
        ("cost", True, 0.67, True),
        ("cost", True, 0.6, False),
        ("rate", False, 1.5, True),
        ("pair cost", True, 0.6, False),
        ("us", True, 2000, True),
    ],
)
def test_a_bar_holds_within_two_percent(measure, at_most, floor, held):
    bar = Bar("g", "a", measure, floor, floor, "b", at_most)
    assert [v.held for v in judge([bar], [_rows(a=2.0, b=3.0)], {}, "cpu")] == [held]


def test_a_wrong_result_holds_no_bar():
    group = _rows(a=2.0, b=3.0)
    group.rows[0].error, group.rows[0].error_limit = 1.0, 0.5
    assert judge([Bar("g", "a", "speed", 1.0, 1.0, "b")], [group], {}, "cpu")[0].held is False


def test_every_bar_finds_its_entries():
    groups = {g.name: g for suite in suites.SUITES.values() for g in suite()}
    for bar in BARS:
        group = groups[bar.group]
        names = [entry.name for entry in group.entries]
        peers = [entry.name for entry in group.entries if entry.via in PEERS]
        assert bar.subject in names
        assert peers if bar.against == BEST_PEER else (bar.against or bar.subject) in names
        assert bar.method in ("", *group.methods)
        assert len(set(names)) == len(names)


def _peers(**milliseconds):
    group = _rows(ours=2.0, **milliseconds)
    for row in group.rows[1:]:
        row.via = row.name
    return group


def test_the_best_peer_is_the_fastest_that_took_part():
    bar = Bar("g", "ours", "speed", 1.0, 1.0, BEST_PEER)
    group = _peers(cudnn=3.0, flash=2.5, fa3=1.0)
    group.rows[3].failure = "not installed"
    verdict = judge([bar], [group], {}, "cpu")[0]
    assert verdict == Verdict(bar, 1.25, True, "flash; missing: fa3")
    for row in group.rows[1:]:
        row.failure = "not installed"
    verdict = judge([bar], [group], {}, "cpu")[0]
    assert verdict == Verdict(bar, None, None, "missing: cudnn, flash, fa3")
    group.rows[0].failure = "not run: time (x)"
    verdict = judge([bar], [group], {}, "cpu")[0]
    assert verdict == Verdict(bar, None, None, "ours: not run: time (x)")


def test_a_bar_is_judged_by_its_own_method():
    group = _rows(a=2.0, b=3.0)
    for row, ms in zip(group.rows, (4.0, 5.0), strict=True):
        row.other_rounds_ms = {"burst": [ms] * 3}
    bars = [Bar("g", "a", m, 1.0, 1.0, "b", method="burst") for m in ("speed", "TFLOP/s")]
    assert [v.figure for v in judge(bars, [group], {}, "cpu")] == [1.25, 6 / 4]


def test_a_peer_that_is_not_installed_is_told_as_missing():
    bar = Bar("g", "a", "speed", 1.0, 1.0, "b")
    group = _rows(a=2.0, b=3.0)
    group.rows[1].failure = "Unavailable: flash-attn 3 is not installed (x)"
    assert report.mark(judge([bar], [group], {}, "cpu")[0]) == "peer missing"


def _run_of(results, digests="tree"):
    machine = {"digests": digests, "date": "today", "processor": "cpu"}
    return Run("quick", machine, {}, 2, results, [Verdict(BARS[0], 1.0, False, "")])


def test_an_interrupted_run_is_resumed_on_the_same_tree_alone(tmp_path):
    path = tmp_path / "quick-cpu.json"
    done, cut = _rows(a=2.0, b=3.0), replace(_rows(a=2.0), name="cut")
    cut.rows[0].failure = "not run: time (x)"
    Store(path, "tree").save(_run_of([done, cut]))
    assert list(Store(path, "tree", resume=True).finished) == ["g"]
    assert Store(path, "tree", resume=True).finished["g"] == done
    assert not Store(path, "other", resume=True).finished
    assert not Store(path, "tree").finished
    assert load(path).verdicts == [Verdict(BARS[0], 1.0, False, "")]


def test_an_earlier_run_on_the_same_tree_is_kept_once(tmp_path):
    path = tmp_path / "quick-cpu.json"
    Store(path, "tree").save(_run_of([]))
    again = Store(path, "tree")
    for _ in range(3):
        again.save(_run_of([]))
    assert len(json.loads(path.read_text())["earlier_runs"]) == 1
    fresh = Store(path, "other")
    fresh.save(_run_of([], "other"))
    assert not json.loads(path.read_text())["earlier_runs"]


def test_the_summary_names_every_floor_of_its_suites(tmp_path):
    run = _run_of([])
    run.machine["torch"] = "2"
    Store(tmp_path / "decode-gpu.json", "tree").save(run)
    assert summary.write(tmp_path, "gpu") == "floors: 8 not judged, of 8"
    page = (tmp_path / "bars-gpu.md").read_text()
    assert page.count("not judged: not in the run") == 8


def test_the_picture_marks_what_lies_behind_the_best_peer(tmp_path):
    entries = suites.groups_of("sweep", "cuda")[3].entries[:3]
    rows = [_row(entry) for entry in entries]
    for row, ms in zip(rows, (2.0, 1.8, 1.9), strict=True):
        row.rounds_ms, row.ms = [ms] * 3, ms
    low, fine = (GroupResult(name, "head dims", 32.0, rows) for name in ("low", "fine"))
    fine.rows = [replace(rows[0], rounds_ms=[1.0] * 3, ms=1.0), *rows[1:]]
    assert [point.name for point in landscape.points_behind([low, fine])] == ["low"]
    assert [(point.ratio, point.peer) for point in landscape.points([low])] == [(0.9, "cudnn")]
    run = _run_of([low, fine])
    run.machine |= {"torch": "2", "threads": 1}
    report.write(run, tmp_path / "sweep-cpu.json")
    page = (tmp_path / "sweep-cpu.md").read_text()
    assert "## Points under 0.95" in page and "| low | 0.90 | cudnn |" in page
    assert "| fine |" not in page


def test_the_crossover_lies_between_losing_and_winning():
    assert crossover.crossing({1024: 0.5, 4096: 2.0}) == pytest.approx(2048)
    assert crossover.crossing({1024: 1.5, 4096: 2.0}) == 1024
    assert crossover.crossing({1024: 0.9, 2048: 1.5, 4096: 0.9}) is None


def test_the_policys_length_is_twice_the_reach():
    assert crossover.policy_length({"variant": "band", "left": 511, "right": 0}) == 1024
