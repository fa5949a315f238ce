"""Try one wheel with every Python and torch at hand, ``make versions``; prints a table.

Each pair gets an environment of its own under build/versions, the wheel from dist/ and a selection
of the suite, which runs on what was installed, not on the source folder. Options go into
``VERSIONS``: ``--python`` and ``--torch`` choose, ``--keep`` leaves the environments for the next
time (several GB each); pip takes indexes from ``PIP_INDEX_URL`` as everywhere.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .digests import ROOT

FOLDER = ROOT / "build" / "versions"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
NEEDS = ("numpy", "pytest", "expecttest", "hypothesis")
SELECTION = (
    "tests/semantics/test_functional.py",
    "tests/semantics/test_errors.py",
    "tests/torch/test_ops.py",
    "tests/torch/test_autocast.py",
    "tests/models/test_nn.py",
)
# Versions, and where the package was imported from.
PROBE = (
    "import platform, torch, sparse_attn; "
    "print(platform.python_version(), torch.__version__, sparse_attn.__file__)"
)
HEADER = "| Python | torch | tests |\n|---|---|---|"


def succeeds(command: list[str]) -> bool:
    """Run a command quietly and return whether it succeeded."""
    return subprocess.run(command, capture_output=True).returncode == 0


def interpreter(version: str) -> str | None:
    """Return a Python of this version that can make environments: of pyenv, or on the path."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [str(path) for path in sorted(pyenv.glob(f"{version}*/bin/python"))]
    candidates = [*found, shutil.which(f"python{version}")]
    usable = (p for p in candidates if p and succeeds([p, "-c", "import venv, ensurepip"]))
    return next(usable, None)


def row(python: str, torch: str, wheel: Path, keep: bool) -> str:
    """Return the table's row of one pair."""
    program = interpreter(python)
    if program is None:
        return f"| {python} | {torch} | no interpreter |"
    folder = FOLDER / f"{python}-torch{torch}"
    inside = str(folder / "bin" / "python")
    pip = [inside, "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    try:
        if not Path(inside).exists():
            subprocess.run([program, "-m", "venv", str(folder)], check=True)
        if not succeeds([*pip, f"torch=={torch}.*", *NEEDS]):
            return f"| {python} | {torch} | pip finds no torch {torch} |"
        subprocess.run([*pip, "--no-deps", "--force-reinstall", str(wheel)], check=True)
        probed = subprocess.run([inside, "-c", PROBE], cwd=folder, capture_output=True, text=True)
        if probed.returncode != 0:
            return f"| {python} | {torch} | does not import: {probed.stderr.splitlines()[-1]} |"
        found_python, found_torch, file = probed.stdout.split()
        if not file.startswith(str(folder)):
            return f"| {found_python} | {found_torch} | imports {file} |"
        return f"| {found_python} | {found_torch} | {suite(inside, folder)} |"
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def suite(python: str, folder: Path) -> str:
    """Run the selection with the installed package and return pytest's last line."""
    tests = [str(ROOT / name) for name in SELECTION]
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "pythonpath="]
    command += ["-c", str(ROOT / "pyproject.toml"), *tests]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    last = result.stdout.splitlines()[-1] if result.stdout else result.stderr.splitlines()[-1]
    return last.strip("= ")


def main(arguments: list[str] | None = None) -> None:
    """Try the pairs that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--python", nargs="+", default=PYTHONS, help="such as 3.12")
    parser.add_argument("--torch", nargs="+", default=TORCHES, help="such as 2.14")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    options = parser.parse_args(arguments)
    wheels = sorted((ROOT / "dist").glob("*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        sys.exit("sparse_attn: no wheel in dist/: run make wheel")
    print(HEADER)
    for python in options.python:
        for torch in options.torch:
            print(row(python, torch, wheels[-1], options.keep), flush=True)


if __name__ == "__main__":
    main()
