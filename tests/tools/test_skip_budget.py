"""The budget of skips fails a run that skips for new reasons, or more often than it may."""

import json
from pathlib import Path

import pytest
from engines import Attend
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import Serving
from skip_budget import BUDGET, over_budget

import sparse_attn as sa

pytest_plugins = ["pytester"]
ROOT = Path(__file__).resolve().parents[2]
CONFTEST = ROOT / "tests" / "conftest.py"
MASKS = ("hopper", "Skipped: sparse_attn::band: not served: hopper takes no attn_mask")


def test_skips_within_the_budget_pass():
    assert over_budget("cuda", [MASKS, ("", "Skipped: needs two CUDA devices")]) == []
    assert over_budget("cpu", [("tiled", "no CUDA device")] * 5000) == []


def test_a_reason_that_is_not_listed_fails():
    sentences = over_budget("cuda", [("hopper", "hopper takes no head dim 128")])
    assert sentences == ["hopper has no budget for the reason: hopper takes no head dim 128"]


def test_a_reason_of_another_engine_fails():
    assert over_budget("cuda", [("portable", MASKS[1])])
    assert over_budget("cpu", [("tiled", MASKS[1])])


def test_every_reason_on_a_gpu_has_a_number_that_the_recorded_run_keeps():
    assert None not in BUDGET["cuda"].values()
    record = json.loads((ROOT / "benchmarks/results/gpu_suite.json").read_text())
    kinds = record["tests"]["skips"]
    skips = [(kind["engine"], kind["reason"]) for kind in kinds for _ in range(kind["count"])]
    assert skips and over_budget("cuda", skips) == []


@pytest.mark.parametrize("calls", [Attend, Serving])
def test_a_refused_case_of_a_property_is_drawn_again(calls, monkeypatch):
    """A skip would end the property, and a return would count the case."""
    ran = []

    def refuses_odd(number, **_):
        if number % 2:
            raise NotImplementedError("not served: odd")
        ran.append(number)

    monkeypatch.setattr(sa, "sparse_attention", lambda q, k, v, number, **_: refuses_odd(number))

    @settings(max_examples=20, database=None)
    @given(number=st.integers(0, 100))
    def check(number):
        if calls is Attend:
            Attend("cuda", "small")(number, None, None, None)
        else:
            Serving("cuda", "small")(refuses_odd, number)

    try:
        check()
    except pytest.skip.Exception:
        pytest.fail("the property ended")
    assert len(ran) == 20


def test_too_many_skips_fail():
    most = BUDGET["cuda"]["hopper", "takes no attn_mask"]
    assert over_budget("cuda", [MASKS] * most) == []
    assert f"{most + 1} times" in over_budget("cuda", [MASKS] * (most + 1))[0]


def test_missing_memory_is_within_the_budget_of_a_shared_device_alone():
    skips = [("portable", "Skipped: needs 40 GiB of free device memory")] * 3
    assert "no budget" in over_budget("cuda", skips)[0]
    assert over_budget("cuda", skips, shared=True) == []
    assert over_budget("cuda", skips * 100, shared=True)
    assert over_budget("cuda", [("portable", MASKS[1])], shared=True)


@pytest.fixture
def run_that_skips(pytester, pytestconfig):
    """Run two tests, of which one is skipped, in this process: a new one loads torch first."""
    suite = pytestconfig.pluginmanager.get_plugin(str(CONFTEST))
    assert suite is not None

    def run(reason, *options):
        pytester.makepyfile(
            f"import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip({reason!r})\n"
        )
        result = pytester.runpytest_inprocess(*options, plugins=[suite])
        result.assert_outcomes(passed=1, skipped=1)
        return result

    return run


def test_a_run_beside_another_suite_says_so(run_that_skips):
    reason = "needs 40 GiB of free device memory"
    assert run_that_skips(reason, "--device", "cuda").ret == 1
    assert run_that_skips(reason, "--device", "cuda", "--shared-device").ret == 0


def test_a_run_over_the_budget_fails(run_that_skips):
    run = run_that_skips("tired")
    assert run.ret == 1
    assert "a test has no budget for the reason: Skipped: tired" in run.stdout.str()


def test_an_engine_that_the_device_has_not_is_refused(pytester, pytestconfig):
    suite = pytestconfig.pluginmanager.get_plugin(str(CONFTEST))
    pytester.makepyfile("def test_a(): pass\n")
    result = pytester.runpytest_inprocess("--engine", "tiled,hopper", plugins=[suite])
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "expected engines among tiled, naive, got hopper" in result.stderr.str()


def test_no_random_cases_are_refused(pytester, pytestconfig):
    suite = pytestconfig.pluginmanager.get_plugin(str(CONFTEST))
    result = pytester.runpytest_inprocess("--fuzz-examples", "0", plugins=[suite])
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "--fuzz-examples: expected at least 1, got 0" in result.stderr.str()
