"""The benchmark harness itself: counts, references, floors and failures."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks import crossover, landscape, report, suites, summary, sweeps
from benchmarks.__main__ import main
from benchmarks.accuracy import Reference, allowed_rows
from benchmarks.bars import BEST_PEER, Bar, Verdict, judge
from benchmarks.budget import Budget
from benchmarks.cases import Case, Entry, Group, Inputs
from benchmarks.floors import BARS
from benchmarks.masks import (
    Band,
    Blocks,
    BlockTopK,
    Dilated,
    Full,
    Scattered,
    Sketched,
    Spec,
    Strided,
    TopK,
)
from benchmarks.memory import peak_bytes, reserved_over_calls
from benchmarks.peers import PEERS, contender
from benchmarks.precompile import precompile
from benchmarks.runner import GroupResult, Row, Runner, _row
from benchmarks.store import Run, Store, load
from benchmarks.timing import Sample, Timer, interleaved

CPU = torch.device("cpu")
SMALL = Case(Full(), 96, heads=2, head_dim=16, dtype="float32")
SPECS: list[tuple[Spec, bool]] = [
    (Full(), True),
    (Full(), False),
    (Band(7, 3), False),
    (Band(7, 3), True),
    (Band(None, 0, sinks=3), False),
    (Band(9, 0, sinks=20), True),
    (Band(5, 5, global_tokens=11), False),
    (Band(5, 0, global_tokens=11), True),
    (Dilated(4, 2, 3), False),
    (Dilated(4, 2, 3), True),
    (Strided(5, 8), True),
    (Blocks(16, 32, 0.4), False),
    (Blocks(16, 16, 0.3), True),
    (Blocks(32, 16, 0.3), True),
    (Blocks(16, 16, 0.5, per="one"), False),
    (Scattered(9, (3, 50, 95)), False),
    (Scattered(9, (3, 50, 95)), True),
]


@pytest.mark.parametrize("spec, causal", SPECS, ids=lambda x: getattr(x, "label", str(x)))
def test_pairs_count_what_the_predicate_allows(spec, causal):
    case = replace(SMALL, spec=spec, causal=causal)
    inputs = Inputs(case, CPU)
    rows = torch.arange(case.rows)
    allowed = [allowed_rows(case, inputs, 0, head, rows) for head in range(case.heads)]
    assert inputs.pairs(case) == int(torch.stack(allowed).sum())


def test_the_pattern_handed_to_the_package_is_the_one_counted():
    for spec, causal in SPECS:
        if not isinstance(spec, Blocks):
            case = replace(SMALL, spec=spec, causal=causal)
            theirs = spec.pattern(None).mask(case.rows, case.length, is_causal=causal)
            mine = allowed_rows(case, Inputs(case, CPU), 0, 0, torch.arange(case.rows))
            assert torch.equal(theirs, mine), spec.label


def test_a_wrong_row_is_found():
    inputs = Inputs(SMALL, CPU)
    reference = Reference(SMALL, inputs)
    out = torch.nn.functional.scaled_dot_product_attention(inputs.query, inputs.key, inputs.value)
    assert reference.compare(out).holds
    out[-1, -1, -1] += 1e-4
    assert not reference.compare(out).holds
    out[-1, -1, -1] = torch.nan
    assert not reference.compare(out).holds


def test_topk_leaves_out_rows_without_a_clear_choice():
    case = replace(SMALL, spec=TopK(4))
    inputs = Inputs(case, CPU)
    inputs.key[0, 0] = inputs.key[0, 0, :1]  # every key of the first head scores alike
    assert [problem.head for problem in Reference(case, inputs).problems] == [1]


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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_groups_of_all_suites_have_names_of_their_own(device):
    names = [group.name for suite in suites.NAMES for group in suites.groups_of(suite, device)]
    assert [name for name, times in Counter(names).items() if times > 1] == ["global tokens"]


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


STORAGE = {
    "paged/16": {"lengths": (5, 70, 33)},
    "packed": {"lengths": (5, 70, 33)},
    "joined": {},
    "joined pages/32": {},
    "8 bits": {"coarse": True},
    "8 bits/16": {"coarse": True},
}


@pytest.mark.parametrize("queries", [None, 1])
@pytest.mark.parametrize("via", STORAGE)
def test_keys_in_other_places_give_the_same_attention(via, queries):
    case = replace(SMALL, length=70, batch=3, causal=True, dtype="bfloat16", queries=queries)
    case = replace(case, heads=4, kv_heads=2, **STORAGE[via])
    if via.startswith("paged") and queries is None:
        case = replace(case, queries=5)
    inputs = Inputs(case, CPU)
    made = contender(via, case, inputs)
    assert made.engine == "tiled"
    reference = Reference(case, inputs)
    out = made.arrange(made.call())
    assert reference.compare(out).holds
    out[-1, -1, 0] += 0.1
    assert not reference.compare(out).holds


@pytest.mark.parametrize(
    "change",
    [
        {"softcap": 1.0},
        {"mask": "bias"},
        {"mask": "padding"},
        {"spec": Sketched(16, 64), "queries": 1, "length": 384},
        {"spec": BlockTopK(16, selector="mixed", mass=0.5, settings=()), "causal": True},
        {"queries": 200},
    ],
    ids=str,
)
def test_the_reference_knows_what_changes_scores(change):
    case = replace(SMALL, batch=2, **change)
    inputs = Inputs(case, CPU)
    reference = Reference(case, inputs)
    out = contender("ours", case, inputs).call()
    assert reference.compare(out).holds
    plain = replace(case, softcap=0.0, mask="", spec=Full(), causal=False)
    if plain != case:
        assert not reference.compare(contender("ours", plain, Inputs(plain, CPU)).call()).holds
    rows = torch.arange(case.rows)
    seen = [
        allowed_rows(case, inputs, b, h, rows) for b in range(case.batch) for h in range(case.heads)
    ]
    assert inputs.pairs(case) == int(torch.stack(seen).sum())


def test_uneven_lists_have_the_pairs_of_even_ones():
    even = Blocks(16, 16, 0.2)
    masks = [
        spec.block_mask((32, 32), 4096, 4096, True, CPU, 0)
        for spec in (even, replace(even, spread=20.0))
    ]
    pairs = [even.pairs(mask, 4096, 4096, True) for mask in masks]
    assert 0.97 < pairs[1] / pairs[0] < 1.03
    by_head = masks[1].sum((0, 2, 3)).double()
    assert 15 < by_head[-1] / by_head[0] < 21
    rows = masks[1].sum((0, 1, 3))[64:]
    assert rows[1::2].sum() > 1.8 * rows[::2].sum()


@pytest.mark.parametrize("suite", ["cliffs", "serving", "selection", "sweep"])
def test_suites_for_a_gpu_run_small_on_the_cpu(suite, tmp_path):
    groups = suites.groups_of(suite, "cuda")
    only = {"cliffs": "17 queries, 4K keys, 8", "sweep": "64 x 256"}.get(suite, groups[0].name)
    arguments = ["--tiny", "--device", "cpu", "--rounds", "1", "--milliseconds", "0.1"]
    arguments += ["--without", "flex", "--only", only, "--output", str(tmp_path)]
    assert main([suite, *arguments]) == 0
    found = json.loads(next(tmp_path.glob(f"{suite}-*.json")).read_text())
    row = found["results"][0]["rows"][0]
    assert not row["failure"] and row["case"]["length"] <= 384


def _runner(**settings):
    left_out = settings.pop("left_out", None)
    budget = Budget(**settings)
    found = {"tflops/float32": 1.0}
    return Runner(CPU, found, rounds=2, milliseconds=0.1, budget=budget, left_out=left_out)


def test_a_failing_peer_is_a_sentence_in_its_row():
    runner = _runner(seconds=60)
    entries = (
        Entry("sdpa", SMALL, "sdpa"),
        Entry("cudnn", SMALL, "cudnn"),
        Entry("fa3", replace(SMALL, spec=Dilated(2, 2, 2)), "fa3"),
    )
    result = runner.run(Group("g", entries))
    assert not result.rows[0].failure and len(result.rows[0].rounds_ms) == 2
    assert all("Error" in row.failure or "Unavailable" in row.failure for row in result.rows[1:])


def test_a_spent_budget_is_told():
    result = _runner(seconds=0).run(Group("g", (Entry("sdpa", SMALL, "sdpa"),)))
    assert result.rows[0].failure.startswith("not run: time") and not result.complete


def test_rounds_that_would_overrun_the_budget_are_not_begun(monkeypatch):
    monkeypatch.setattr(Timer, "sample", lambda self, *_: Sample(lambda: 1.0, 3600.0))
    result = _runner(seconds=60).run(Group("g", (Entry("sdpa", SMALL, "sdpa"),)))
    assert result.rows[0].failure.startswith("not run: time") and not result.rows[0].rounds_ms


def test_a_case_that_was_not_compiled_is_told():
    case = replace(SMALL, spec=Band(7))
    entries = (Entry("sdpa", SMALL, "sdpa"), Entry("flex", case, "flex"))
    result = _runner(seconds=60, left_out={("flex", case): "not run: time (x)"}).run(
        Group("g", entries)
    )
    assert [row.failure for row in result.rows] == ["", "not run: time (x)"]


def test_compiles_leave_time_to_the_others():
    runner = _runner(seconds=60)
    entries = (Entry("sdpa", SMALL, "sdpa"), Entry("flex", SMALL, "flex"))
    runner.compiling = 30.0
    failures = [row.failure for row in runner.run(Group("g", entries)).rows]
    assert failures[0] == "" and failures[1].startswith("not run: time (FlexAttention's compiles")


def test_compiles_end_with_their_budget():
    causal_blocks = ("flex", replace(SMALL, spec=Blocks(16, 16, 0.5), causal=True))
    said: list[str] = []
    assert precompile([causal_blocks], CPU, Budget(0.0), said.append) == {
        causal_blocks: "not run: time (its compile did not end within 0 s)"
    }
    assert precompile([causal_blocks], CPU, Budget(120.0), said.append) == {}
    assert len(said) == 3 and "Unavailable" in said[1]


def test_suites_share_a_budget_by_weight():
    whole = Budget(100.0)
    assert whole.share("a", {"a": 1, "b": 3}).seconds == pytest.approx(25, abs=1)
    assert whole.share("b", {"b": 3}).seconds == pytest.approx(100, abs=1)


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


def test_rounds_time_every_call_equally_often():
    calls: list[str] = []
    timed = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    timer = Timer(CPU)
    times = interleaved(timer.samples(timed, 0.0), rounds=5)
    assert {name: len(found) for name, found in times.items()} == {"a": 5, "b": 5}


def test_peak_memory_counts_what_lives_at_one_time():
    def call():
        a = torch.empty(1 << 20, dtype=torch.uint8)
        del a
        return torch.empty(3 << 20, dtype=torch.uint8)

    assert peak_bytes(call, CPU) == 3 << 20


def test_calls_that_reserve_memory_end_with_their_time():
    made: list[int] = []
    found = reserved_over_calls(made.append, (1, 2), CPU, calls=5)
    assert found["calls"] == 5 and len(made) == 7
    assert reserved_over_calls(made.append, (1, 2), CPU, seconds=0.0)["calls"] == 0


def test_the_crossover_lies_between_losing_and_winning():
    assert crossover.crossing({1024: 0.5, 4096: 2.0}) == pytest.approx(2048)
    assert crossover.crossing({1024: 1.5, 4096: 2.0}) == 1024
    assert crossover.crossing({1024: 0.9, 2048: 1.5, 4096: 0.9}) is None


def test_the_policys_length_is_twice_the_reach():
    assert crossover.policy_length({"variant": "band", "left": 511, "right": 0}) == 1024


def test_quick_suite_writes_its_report(tmp_path, capsys):
    assert (
        main(
            [
                "quick",
                "--device",
                "cpu",
                "--rounds",
                "2",
                "--milliseconds",
                "1",
                "--output",
                str(tmp_path),
            ]
        )
        == 0
    )
    found = json.loads(next(tmp_path.glob("quick-*.json")).read_text())
    rows = [row for group in found["results"] for row in group["rows"]]
    assert not [row["failure"] for row in rows if row["failure"]]
    assert {row["case"]["spec"]["variant"] for row in rows} == {
        "fused",
        "band",
        "dilated",
        "strided",
        "block_sparse",
        "topk",
        "block_topk",
    }
    assert found["machine"]["digests"] and found["ceilings"]
    assert "floors" not in capsys.readouterr().out
    assert (next(tmp_path.glob("quick-*.md"))).read_text().startswith("# Benchmark suite")


@pytest.mark.parametrize("density", [0.05, 0.25, 0.5, 0.9])
def test_points_of_the_sparsity_curve_have_the_share_they_are_drawn_at(density):
    group = next(g for g in sweeps.report(sweeps.CPU) if g.sweep == "density")
    case = group.entries[0].case
    for entry in sweeps._sparsity(sweeps.CPU, density).entries:
        if entry.name in ("band", "dilated"):
            counts = entry.case.spec.counts(np.arange(case.length), case.length, False)
            share = counts.sum() / case.length**2
            most = 0.5 if entry.name == "dilated" else 1.0
            assert share == pytest.approx(min(density, most), abs=0.005)


def test_every_point_of_the_report_stays_within_its_scale():
    for scale in (sweeps.GPU, sweeps.CPU):
        longest = max(
            e.case.length
            for g in sweeps.report(scale)
            for e in g.entries
            if e.via in ("naive", "math")
        )
        assert longest <= scale.longest_materialised
    assert np.all(np.diff(sweeps.GPU.lengths) > 0)


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


def test_a_peer_that_is_not_installed_is_told_as_missing():
    bar = Bar("g", "a", "speed", 1.0, 1.0, "b")
    group = _rows(a=2.0, b=3.0)
    group.rows[1].failure = "Unavailable: flash-attn 3 is not installed (x)"
    assert report.mark(judge([bar], [group], {}, "cpu")[0]) == "peer missing"
