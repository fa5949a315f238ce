"""How benchmarks run: turns, time budgets, peers that fail, and whole suites in small."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import suites
from benchmarks.__main__ import main
from benchmarks.budget import Budget
from benchmarks.cases import Case, Entry, Group, tiny
from benchmarks.masks import (
    Band,
    Blocks,
    Dilated,
    Full,
)
from benchmarks.memory import peak_bytes, reserved_over_calls
from benchmarks.precompile import precompile
from benchmarks.runner import Runner, sentence
from benchmarks.timing import Sample, Timer, interleaved

CPU = torch.device("cpu")
SMALL = Case(Full(), 96, heads=2, head_dim=16, dtype="float32")


@pytest.fixture
def known_ceilings(monkeypatch):
    """Rates of this machine that are not measured once more: the quick suite's run does so."""
    rates = {f"tflops/{dtype}": 0.1 for dtype in ("float32", "float16", "bfloat16")}
    monkeypatch.setattr("benchmarks.__main__.ceilings", lambda timer: rates)


@pytest.mark.usefixtures("known_ceilings")
@pytest.mark.parametrize("suite", ["cliffs", "serving", "selection", "sweep"])
def test_suites_for_a_gpu_run_small_on_the_cpu(suite, tmp_path):
    groups = suites.groups_of(suite, "cuda")
    only = {"cliffs": "17 queries, 4K keys, 8", "sweep": "64 x 256"}.get(suite, groups[0].name)
    arguments = ["--tiny", "--device", "cpu", "--rounds", "1", "--milliseconds", "0.1"]
    arguments += ["--without", "flex", "--only", only, "--output", str(tmp_path)]
    assert main([suite, *arguments]) == 0
    found = json.loads(next(tmp_path.glob(f"{suite}-*-tiny.json")).read_text())
    assert not found["verdicts"] and not list(tmp_path.glob("bars-*"))
    row = found["results"][0]["rows"][0]
    assert not row["failure"] and row["case"]["length"] <= 384


def test_curves_of_small_cases_have_their_lengths():
    curve = [tiny(group) for group in suites.groups_of("report", "cpu") if group.sweep == "length"]
    assert curve and all(point.x == point.entries[0].case.length for point in curve)


REFUSED = {
    "no calls": (
        ["random", "--calls", "0"],
        "--calls: expected a whole number of at least 1, got 0",
    ),
    "calls under none": (
        ["random", "--calls", "-3"],
        "expected a whole number of at least 1, got -3",
    ),
    "no number": (["random", "--calls", "few"], "expected a whole number of at least 1, got few"),
    "no rounds": (
        ["quick", "--rounds", "0"],
        "--rounds: expected a whole number of at least 1, got 0",
    ),
    "minutes": (["quick", "--minutes", "-1"], "--minutes: expected a number of at least 0, got -1"),
    "no end": (["quick", "--minutes", "inf"], "expected a number of at least 0, got inf"),
    "milliseconds": (["quick", "--milliseconds", "nan"], "a number of at least 0, got nan"),
    "no group": (["quick", "cpu", "--only", "nonsense"], "in the name of a group, got nonsense"),
    "call not drawn": (["random", "--calls", "2", "--only", "call 2 of"], "got call 2 of"),
    "no peer": (["quick", "--without", "foo"], "--without: invalid choice: 'foo'"),
    "no suite": (["fast"], "expected suites among quick, "),
    "no GPU": (["quick", "--device", "cuda"], "expected a GPU for --device cuda, got none"),
    "suite for a GPU": (["quick", "dense"], "expected a GPU or --tiny for the suite dense, got "),
}


@pytest.mark.parametrize(("arguments", "told"), REFUSED.values(), ids=REFUSED)
def test_wrong_arguments_are_one_sentence_before_anything_runs(
    arguments, told, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("benchmarks.__main__.ceilings", lambda timer: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--output", str(tmp_path / "results")])
    said = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and told in said and said.startswith("python -m benchmarks: error")
    assert not (tmp_path / "results").exists()


@pytest.mark.usefixtures("known_ceilings")
def test_a_suite_without_the_asked_group_is_left_out(tmp_path):
    quickly = ["--rounds", "1", "--milliseconds", "0", "--output", str(tmp_path)]
    assert main(["cpu", "quick", "--device", "cpu", "--only", "global tokens", *quickly]) == 0
    assert [path.name.partition("-")[0] for path in tmp_path.glob("*.json")] == ["quick"]


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


TOLD = {
    "source": ("at /home/me/flash-attn_2/api.cpp:848: no", "at api.cpp:848: no"),
    "start": ("/opt/x/libcuda.so.1 is missing", "libcuda.so.1 is missing"),
    "quoted": ("open '/tmp/a+b@1/c.json' and \"/var/d.txt\"", "open 'c.json' and \"d.txt\""),
    "several": ("/a/b.py, (/c/d.py) =/e/f.py", "b.py, (d.py) =f.py"),
    "folder": ("wrote /tmp/somebody/", "wrote "),
    "shapes": ("64/128 heads, s/cap, 1 / 2, a/b/c.py", "64/128 heads, s/cap, 1 / 2, a/b/c.py"),
    "address": ("see https://example.org/docs/x.html", "see https://example.org/docs/x.html"),
    "lines": ("\n\n  first /x/y.py \nsecond", "first y.py"),
    "nothing": ("  \n ", "no message"),
}


@pytest.mark.parametrize(("said", "told"), TOLD.values(), ids=TOLD)
def test_a_failure_is_one_line_without_folders(said, told):
    assert sentence(RuntimeError(said)) == f"RuntimeError: {told}".rstrip()


def test_a_failure_names_its_kind_and_is_no_longer_than_a_row_holds():
    assert sentence(KeyError("/home/me/x.py")) == "KeyError: 'x.py'"
    assert len(sentence(ValueError("/a/b/c.py " + "word " * 99))) == 300


def test_a_failing_entry_names_no_folder(monkeypatch):
    def fails(*_):
        raise RuntimeError("/home/me/peer/api.cpp:3: unsupported\nTraceback: /home/me")

    monkeypatch.setattr("benchmarks.runner.contender", fails)
    result = _runner(seconds=60).run(Group("g", (Entry("sdpa", SMALL, "sdpa"),)))
    assert result.rows[0].failure == "RuntimeError: api.cpp:3: unsupported"


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
