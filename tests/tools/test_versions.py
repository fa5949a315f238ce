"""make versions: what is tried, and what the table says of a pair that cannot be."""

import sys

import pytest

from scripts import versions


@pytest.fixture
def pythons(tmp_path, monkeypatch):
    """Programs on the path, some of which cannot make an environment."""
    for name, status in (("python3.12", 0), ("python3.13", 1)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setattr(versions, "FOLDER", tmp_path / "versions")
    return tmp_path


def test_takes_interpreters_that_can_make_environments(pythons):
    assert versions.interpreter("3.12") == str(pythons / "python3.12")
    assert versions.interpreter("3.13") is None and versions.interpreter("3.14") is None
    own = pythons / "pyenv" / "versions" / "3.14.1" / "bin"
    own.mkdir(parents=True)
    (own / "python").symlink_to(pythons / "python3.12")
    assert versions.interpreter("3.14") == str(own / "python")


def test_pairs_that_cannot_be_tried_say_why(pythons):
    wheel = pythons / "any.whl"
    assert versions.row("3.14", "2.15", wheel, keep=False) == "| 3.14 | 2.15 | no interpreter |"
    inside = versions.FOLDER / "3.12-torch9.9" / "bin"
    inside.mkdir(parents=True)
    (inside / "python").symlink_to(pythons / "python3.13")  # pip fails
    assert (
        versions.row("3.12", "9.9", wheel, keep=True) == "| 3.12 | 9.9 | pip finds no torch 9.9 |"
    )
    assert inside.exists()
    versions.row("3.12", "9.9", wheel, keep=False)
    assert not inside.exists()


PROBED = {
    "another-copy": ("echo 3.12.1 9.9.0 /a/b.py", "| 3.12.1 | 9.9.0 | imports /a/b.py |"),
    "no-import": ("echo At: >&2; echo no >&2; exit 1", "| 3.12 | 9.9 | does not import: no |"),
}


@pytest.mark.parametrize("answer, want", PROBED.values(), ids=PROBED)
def test_wheels_that_are_not_what_runs_say_so(pythons, answer, want):
    inside = versions.FOLDER / "3.12-torch9.9" / "bin"
    inside.mkdir(parents=True)
    (inside / "python").write_text(f'#!/bin/sh\n[ "$1" = -m ] || {{ {answer}; }}\n')  # pip works
    (inside / "python").chmod(0o755)
    assert versions.row("3.12", "9.9", pythons / "any.whl", keep=False) == want


def test_the_selection_runs(tmp_path, monkeypatch):
    (tmp_path / "test_two.py").write_text("def test_a(): pass\n\ndef test_b(): assert False\n")
    monkeypatch.setattr(versions, "SELECTION", (str(tmp_path / "test_two.py"),))
    assert versions.suite(sys.executable, tmp_path).startswith("1 failed, 1 passed in ")


def test_without_a_wheel(tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="no wheel in dist/: run make wheel"):
        versions.main([])
