"""The modules of the package form layers: no import leads back to where it began.

Imports inside functions and those for types alone (``TYPE_CHECKING``) count too. The root may name
every module, so of all that a module may take from it only ``__version__`` is left out.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def modules_of(package: Path) -> dict[str, Path]:
    """Return the modules of a package by dotted name; a package is its ``__init__``."""
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(name: str, path: Path, modules: Mapping[str, Path]) -> set[str]:
    """Return the modules among `modules` that one of them imports anywhere in its text."""
    parents = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    taken = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            taken |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = parents[: len(parents) + 1 - node.level] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{origin}.{alias.name}"
                if whole in modules:
                    taken.add(whole)
                elif alias.name not in ("__version__", "_info"):  # `_info` is compiled
                    taken.add(origin)
    return (taken & set(modules)) - {name}


def check_layers(package: Path) -> None:
    """Fail where an import leads back; the message names the modules of the circle."""
    modules = modules_of(package)
    graph = {name: imports_of(name, path, modules) for name, path in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(reversed(error.args[1]))) from None


def test_the_package_s_imports_form_layers() -> None:
    check_layers(ROOT / "sparse_attn")


@pytest.mark.parametrize(
    "back",
    [
        "from .upper import name",
        "def f():\n    from pack.upper import name",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import upper",
        "import pack.upper",
    ],
)
def test_a_way_back_is_found(tmp_path: Path, back: str) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("from .upper import name\n")
    (package / "upper.py").write_text("from .lower import name\n")
    (package / "lower.py").write_text("name = 1\n")
    check_layers(package)
    (package / "lower.py").write_text(f"{back}\n")
    with pytest.raises(AssertionError, match=r"pack\.lower.*pack\.upper|pack\.upper.*pack\.lower"):
        check_layers(package)
