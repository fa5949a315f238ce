"""No six lines of code stand twice: the second use of a thing moves it to where both see it."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

import sparse_attn as sa
import sparse_attn.testing

ROOT = Path(__file__).resolve().parents[2]
RUN = 6
#: Lists of files, and what opens the parts of a docstring.
LISTS = re.compile(r"#include|namespace [\w:]* ?\{|\}  // namespace")
HEADINGS = re.compile(r"-+$|(Parameters|Attributes|Returns|Raises|Examples|Notes)$")
PUBLIC = {name for place in (sa, sa.quality, sa.nn, sa.testing) for name in place.__all__}


def code_files():
    """Sources but for the functions that scripts/write_functions.py writes from one table."""
    templates = (ROOT / "scripts/templates/functional").iterdir()
    written = {ROOT / "sparse_attn/functional" / path.stem for path in templates}
    kinds = {"csrc": {".h", ".cpp", ".cuh", ".cu", ".in", ".py"}, "sparse_attn": {".py", ".pyi"}}
    for folder, suffixes in kinds.items():
        for path in sorted((ROOT / folder).rglob("*.*")):
            if path.suffix in suffixes and path not in written:
                yield path


def left_out(text):
    """Numbers of lines of imports, and of the parameters of public functions, which are given."""
    numbers = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            numbers.update(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, ast.FunctionDef) and node.name in PUBLIC:
            numbers.update(range(node.lineno, node.body[0].lineno))
    return numbers


def code_lines(path):
    """The lines that count, each with its number."""
    text = path.read_text()
    out = left_out(text) if path.suffix in (".py", ".pyi") else set()
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if line and number not in out and not LISTS.match(line) and not HEADINGS.match(line):
            yield number, line


def repeats(paths):
    """Where runs begin that stand in more than one place."""
    places = defaultdict(list)
    for path in paths:
        lines = list(code_lines(path))
        for i in range(len(lines) - RUN + 1):
            run = tuple(line for _, line in lines[i : i + RUN])
            places[run].append(f"{path.name}:{lines[i][0]}")
    return [found for found in places.values() if len(found) > 1]


def test_no_run_of_lines_stands_twice():
    assert repeats(code_files()) == []


@pytest.mark.parametrize(("lines", "found"), [(RUN, 1), (RUN - 1, 0)])
def test_a_repeated_run_is_found(tmp_path, lines, found):
    run = "\n".join(f"step_{i}()" for i in range(lines))
    (tmp_path / "a.py").write_text(f"begin()\n{run}\n")
    (tmp_path / "b.py").write_text(f"{run}\nend()\n")
    assert len(repeats([tmp_path / "a.py", tmp_path / "b.py"])) == found
