"""The suite of random calls: how they are drawn, and what its report finds."""

import json
import re
import shlex
from dataclasses import replace

import pytest

from benchmarks import findings, runner
from benchmarks.__main__ import main
from benchmarks.cases import LAYOUTS, OPTIONS, Case, Entry
from benchmarks.draws import KINDS, LIMITS, PLAIN, RANDOM, draws
from benchmarks.masks import Full, TopK
from benchmarks.runner import GroupResult, Row
from benchmarks.store import Run
from benchmarks.timing import Sample, Timer

SMALL = Case(Full(), 1000, queries=1, heads=8, kv_heads=2, head_dim=64)


@pytest.mark.parametrize("device", LIMITS)
def test_a_seed_and_a_number_give_one_call(device):
    calls = draws(device, 7, 40)
    assert draws(device, 7, 20) == calls[:20]
    other = draws(device, 8, 40)
    assert not {c.entries for c in calls} & {c.entries for c in other}
    assert not {c.name for c in calls} & {c.name for c in other}


@pytest.mark.parametrize("device", LIMITS)
def test_calls_stay_within_the_limits_and_reach_every_kind(device):
    limits, groups = LIMITS[device], draws(device, 0, 1000)
    cases = [group.entries[0].case for group in groups]
    for case in cases:
        pairs = case.batch * case.heads * case.rows * case.length
        assert pairs * case.head_dim <= limits.products and case.rows <= case.length
        if case.option == "head bias":
            assert case.heads * case.rows * case.length <= limits.numbers
    assert {group.sweep.removeprefix(RANDOM) for group in groups} == {PLAIN, *KINDS}
    assert {case.option for case in cases} == {"", *OPTIONS}
    assert {case.layout for case in cases} == {*LAYOUTS}
    assert {case.dtype for case in cases} == {*limits.dtypes}
    for group in groups[::2]:
        case = group.entries[0].case
        assert case.spec == Full() and not (case.option or case.softcap)
        assert not case.causal or case.rows == case.length  # SDPA aligns it alike


@pytest.fixture(autouse=True)
def known_ceilings(monkeypatch):
    rates = {f"tflops/{dtype}": 0.1 for dtype in LIMITS["cpu"].dtypes}
    monkeypatch.setattr("benchmarks.__main__.ceilings", lambda timer: rates)


def _run(folder, *arguments):
    arguments = ("--rounds", "2", "--milliseconds", "0.1", "--output", str(folder), *arguments)
    status = main(["random", "--device", "cpu", "--seed", "3", *arguments])
    found = json.loads(next(folder.glob("random-*.json")).read_text())
    return status, found["results"], next(folder.glob("random-*.md")).read_text()


def test_a_call_runs_again_alone(tmp_path):
    status, results, page = _run(tmp_path / "all", "--calls", "4")
    assert status == 0 and len(results) == 4
    assert "4 random calls of seed 3: 2 plain, 2 with a pattern or an option" in page
    assert "wrong results: 0, kinds of failures: 0" in page
    status, again, _ = _run(tmp_path / "one", "--calls", "4", "--only", "call 1 of")
    assert [row["case"] for row in again[0]["rows"]] == [row["case"] for row in results[1]["rows"]]
    assert len(again) == 1 and not again[0]["rows"][0]["failure"]


def test_the_printed_command_runs_a_call_again_beside_the_results(tmp_path):
    page = _run(tmp_path, "--calls", "4")[2]
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    command = shlex.split(re.findall("`python -m benchmarks (.*?)`", page)[0])
    assert command[-1] == "call 0 of"
    command[-1] = "call 3 of"
    quickly = ["--rounds", "2", "--milliseconds", "0.1", "--output", str(tmp_path)]
    assert main([*command, *quickly]) == 0
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before.items() <= after.items()
    again = [json.loads(after[name]) for name in after.keys() - before if name.endswith(".json")]
    assert [[group["name"] for group in run["results"]] for run in again] == [["call 3 of seed 3"]]


@pytest.mark.parametrize("device", LIMITS)
def test_the_printed_command_draws_on_the_same_device_far_enough(device):
    drawn = [replace(_result(PLAIN, ours=1.0), x=x) for x in (3, 1499, 7)]
    run = Run("random", {"device": device}, {}, 2, drawn, [])
    told = f"random --device {device} --seed 0 --calls 1500 --only "
    assert told in findings.sentence(run)


def test_a_run_ends_with_its_time(tmp_path):
    _, results, page = _run(tmp_path, "--minutes", "0")
    assert not results and "random calls" not in page


def test_a_slow_and_a_wrong_call_show_in_the_report(tmp_path, monkeypatch):
    slow, wrong, refused = (group.entries[0].case for group in draws("cpu", 3, 4)[:3])
    build = runner.contender

    def disturbed(via, case, inputs):
        made = build(via, case, inputs)
        if via == "ours" and case == slow:
            return replace(made, call=lambda: [made.call() for _ in range(40)][-1])
        if via == "ours" and case == wrong:
            return replace(made, call=lambda: made.call() + 1)
        if via == "ours" and case == refused:
            raise NotImplementedError("expected less")
        return made

    monkeypatch.setattr(runner, "contender", disturbed)
    status, _, page = _run(tmp_path, "--calls", "3")
    assert status == 1
    parts = dict(part.partition("\n")[::2] for part in page.split("## "))
    beside_peers = parts["Slowest beside the best peer"].strip().splitlines()[2:]
    assert len(beside_peers) == 1 and "call 0 of seed 3" in beside_peers[0]
    assert float(beside_peers[0].split("|")[1]) < 0.5
    assert "| ours |" in parts["Wrong results"] and "call 1 of seed 3" in parts["Wrong results"]
    assert "call 1" not in parts["Slowest beside the model"]
    assert "NotImplementedError: expected less | 1 |" in parts["Calls of ours that failed"]


def _disturb(monkeypatch, **changes):
    """Make calls of ``via`` return another result, by what is added to it."""
    build = runner.contender

    def disturbed(via, case, inputs):
        made = build(via, case, inputs)
        return replace(made, call=lambda: made.call() + changes.get(via, 0))

    monkeypatch.setattr(runner, "contender", disturbed)


def test_calls_count_without_a_peer(tmp_path, monkeypatch):
    _disturb(monkeypatch, ours=1)
    status, _, page = _run(tmp_path, "--calls", "2", "--without", "sdpa")
    assert status == 1 and "2 random calls of seed 3: 1 plain" in page
    assert "wrong results: 3" in page and page.count("| ours | ") == 2
    monkeypatch.undo()
    _, _, page = _run(tmp_path, "--calls", "2", "--without", "sdpa")
    assert "| plain | the model | 1 |" in page and "| plain | the best peer |" not in page


def test_a_wrong_result_shows_where_its_timing_was_cut(tmp_path, monkeypatch):
    _disturb(monkeypatch, ours=1)
    monkeypatch.setattr(Timer, "sample", lambda self, *_: Sample(lambda: 1.0, 3600.0))
    status, _, page = _run(tmp_path, "--calls", "1")
    assert status == 1 and "wrong results: 1, kinds of failures: 0" in page
    assert "## Wrong results\n" in page


def test_a_wrong_peer_stands_apart_and_ends_no_run(tmp_path, monkeypatch):
    _disturb(monkeypatch, sdpa=1)
    status, _, page = _run(tmp_path, "--calls", "1")
    assert status == 0 and "wrong results: 0" in page
    assert "## Wrong results of peers\n" in page and "## Wrong results\n" not in page


def _result(kind, **milliseconds):
    rows = [
        Row(name, name, {}, name, engine="tiled", rounds_ms=[ms] * 3, ms=ms)
        for name, ms in milliseconds.items()
    ]
    return GroupResult(
        f"call {milliseconds['ours']:g} of seed 0", RANDOM + kind, 0, rows, noise=0.03
    )


def test_tables_rank_the_slowest_first(monkeypatch):
    monkeypatch.setattr(findings, "model_ms", lambda *_: 1.0)
    drawn = [_result(PLAIN, ours=float(n), cudnn=2.0, flash=4.0) for n in range(1, 6)]
    drawn += [_result("band", ours=6.0, dense=3.0), replace(drawn[0], sweep="sizes")]
    quantiles, peers, dense, model = findings.tables(drawn, {})
    assert quantiles.rows[0][:6] == (PLAIN, findings.PEER, "5", "0.40", "0.42", "0.50")
    assert quantiles.rows[0][6] == "0.67"  # the median
    assert [row[-1] for row in peers.rows] == [f"call {n} of seed 0" for n in (5, 4, 3, 2, 1)]
    assert [row[:4] for row in dense.rows] == [("0.50", "3%", "dense 3", "6")]
    assert len(model.rows) == 6 and model.rows[0][:4] == ("0.17", "3%", "1", "6")


@pytest.mark.parametrize(
    "case, ceilings, want",
    [
        (SMALL, {"tflops/bfloat16": 1e-3}, 0.02 + 2.048),
        (SMALL, {"tflops/bfloat16": 1e3, "read_tb_s": 1e-3}, 0.006 + 2 * 2 * 64 * 2008 / 1e6),
        (
            replace(SMALL, option="head bias"),
            {"tflops/bfloat16": 1e3, "read_tb_s": 1e-3},
            0.006 + (2 * 2 * 64 * 2008 + 2 * 8 * 1000) / 1e6,
        ),
        (replace(SMALL, spec=TopK(10)), {"tflops/bfloat16": 1e-3}, 0.02 + 0.02048 + 1.024),
    ],
    ids=["products", "bytes", "bytes of a mask", "top-k ranks all keys"],
)
def test_the_model_counts_products_or_bytes_and_a_start(case, ceilings, want):
    row, dense = (runner._row(Entry("", c)) for c in (case, replace(case, spec=Full())))
    keys = case.spec.k if isinstance(case.spec, TopK) else case.length
    for made, pairs in ((row, keys), (dense, case.length)):
        made.ms, made.density = 5.0, pairs / case.length
        made.visited_tflops = 4 * 64 * 8 * pairs / 5.0 / 1e9
    assert findings.model_ms(row, dense, ceilings) == pytest.approx(want)
