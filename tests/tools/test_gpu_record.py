"""The record of a GPU run: what is read from a sanitizer's log, and when a tool has passed."""

import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import fuzz, sanitizers

ROOT = Path(__file__).resolve().parents[2]
READ = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void kernel<(int)128, float>(Params, (anonymous namespace)::T)+0x1f0 in k.cu:9
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f12
=========
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void kernel<(int)128, float>(Params, (anonymous namespace)::T)+0x1f0 in k.cu:9
=========     by thread (1,0,0) in block (0,0,0)
=========     Address 0x7f16
=========
========= ERROR SUMMARY: 7 errors
========= ERROR SUMMARY: 5 errors were not printed. Use --print-limit option to adjust
"""
RACE = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at loader(Params)+0x570 in sample.cu:9
=========     and Read access at consumer(Params)+0x600 in sample.cu:15 [508 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
TESTS = "=== 3 passed in 1.00s ===\n"


def test_equal_reports_are_counted_once():
    assert sanitizers.findings(READ) == [
        {
            "message": "Uninitialized __global__ memory read of size 4 bytes",
            "at": "void kernel<(int)128, float>+0x1f0",
            "count": 2,
        }
    ]


def test_a_race_names_both_sides():
    assert sanitizers.findings(RACE) == [
        {
            "message": "Error: Race reported between Write access and Read access",
            "at": "loader+0x570 / consumer+0x600",
            "count": 1,
        }
    ]


@pytest.mark.parametrize(
    "log, tests, exit_status, status, errors",
    [
        (CLEAN, TESTS, 0, "passed", 0),
        (CLEAN, "=== 1 failed, 2 passed in 1.00s ===", 1, "failed", 0),
        (READ, TESTS, 0, "failed", 7),
        (RACE, TESTS, 99, "failed", 1),
        ("", TESTS, 0, "failed", 0),
        (CLEAN, "..", None, "failed", 0),
    ],
    ids=["clean", "tests-fail", "uninitialised", "race", "no-log", "no-end"],
)
def test_a_tool_passes_only_with_a_clean_summary(log, tests, exit_status, status, errors):
    found = sanitizers.read(log, tests, exit_status)
    assert (found["status"], found["errors"]) == (status, errors)


def test_a_run_that_skipped_all_tests_says_so():
    skipped = "33 skipped, 2567 deselected in 50.00s\n"
    assert sanitizers.read(CLEAN, skipped, 0)["tests"] == skipped.strip()


def test_a_command_is_ended_with_its_children(tmp_path):
    alive = tmp_path / "alive"
    command = ["sh", "-c", f"(sleep 2; touch {alive}) & wait"]
    assert sanitizers._within(0.3, command) is None
    assert sanitizers._within(5, ["sh", "-c", "exit 7"]) == 7
    time.sleep(2.2)
    assert not alive.exists()


def test_a_tool_that_does_not_run_is_not_passed():
    refused = sanitizers.read("========= Error: Device not supported\n", "", 1)
    assert refused == {"status": "not available", "why": "Error: Device not supported"}


def test_one_engines_failure_is_the_tools():
    passed = sanitizers.read(CLEAN, TESTS, 0) | {"engine": "naive", "seconds": 2.0}
    failed = sanitizers.read(READ, TESTS, 0) | {"engine": "hopper", "seconds": 3.0}
    both = sanitizers.merged([passed, failed])
    assert (both["status"], both["errors"], both["seconds"]) == ("failed", 7, 3.0)
    assert [finding["engine"] for finding in both["findings"]] == ["hopper"]
    assert sanitizers.merged([passed, passed])["status"] == "passed"


def test_random_cases_meet_each_head_dim_of_hoppers_kernels():
    table = (ROOT / "csrc/cuda/hopper/table.h").read_text()
    kernels = [int(n) for n in re.search(r"kHeadDims\[\] = \{(.*?)\}", table)[1].split(",")]
    met = {min(n for n in kernels if n >= head_dim) for head_dim in fuzz.HEAD_DIMS}
    assert met == set(kernels)
    assert str(list(fuzz.HEAD_DIMS)) in (ROOT / "tests/semantics/test_fuzz.py").read_text()


def test_random_cases_of_hopper_have_the_time_for_thousands(monkeypatch):
    seconds = {}

    def run(command, **_):
        engine = command[command.index("--engine") + 1] if "--engine" in command else ""
        (given,) = (word for word in command if word.startswith("--fuzz-seconds="))
        seconds[engine] = float(given.partition("=")[2])
        return SimpleNamespace(returncode=pytest.ExitCode.NO_TESTS_COLLECTED)

    monkeypatch.setattr(fuzz.subprocess, "run", run)
    found = fuzz.run()
    assert found["exit_status"] == 0
    assert seconds["hopper"] == found["seconds_of_each"]["hopper"] == 4 * fuzz.SECONDS
    assert seconds["portable"] == found["seconds_of_each"]["portable"] == fuzz.SECONDS
