"""The part ``older`` of the recorded GPU run: what it runs on and how it counts."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import older_code

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_1[portable]"/>
<testcase classname="tests.test_a" name="test_2[naive]"><properties/></testcase>
<testcase classname="tests.test_a" name="test_3[portable]"><skipped/></testcase>
<testcase classname="tests.test_b" name="test_4"><failure message="wrong"/></testcase>
<testcase classname="tests.test_b" name="test_5"><error message="setup"/></testcase>
</testsuite></testsuites>"""


def test_outcomes_of_a_report(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert older_code.outcomes(report) == {
        "counts": {"passed": 2, "skipped": 1, "failed": 1, "errors": 1},
        "failures": ["tests.test_b::test_4", "tests.test_b::test_5"],
    }


def test_takes_the_given_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_ATTN_OLDER", str(tmp_path / "given"))
    monkeypatch.setattr(older_code, "STAGED", tmp_path / "staged")
    for level in older_code.LEVELS:
        (tmp_path / "given" / level).mkdir(parents=True)
        (tmp_path / "given" / level / "_C_cuda.so").write_text(level)
    for level in older_code.LEVELS:
        tree = older_code.stage(level)
        assert (tree / "sparse_attn" / "_C_cuda.so").read_text() == level
        assert (tree / "tests" / "conftest.py").exists()


def test_the_suites_of_the_levels_say_that_they_share_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def noted(command: list[str], **_: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(older_code.subprocess, "run", noted)
    (tmp_path / "sparse_attn").mkdir()
    (tmp_path / "sparse_attn" / "_C_cuda.so").write_text("75-virtual")
    assert older_code.run_tests(tmp_path, ["-x"])["exit_status"] == 0
    assert commands[0][-1] == "-x" and "--shared-device" in commands[0]
