"""The C++ tests (``tests/cpp/*_test.cpp``), built as a user would and with sanitizers."""

import functools
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "tests" / "cpp"
WARNINGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}"]
BUILDS = {
    "optimised": ["-O2"],
    "sanitized": ["-O0", "-fsanitize=undefined,address", "-fno-sanitize-recover=all"],
}
#: Programs whose loops take longer than a compiler does to make them fast.
LONG = ("deal_test", "pattern_test", "small_plan_test")


def compiler() -> str:
    """Return a C++ compiler, or skip: CXX, the one Python was built with, the system's own."""
    named = [os.environ.get("CXX"), sysconfig.get_config_var("CXX"), "c++", "g++", "clang++"]
    for name in filter(None, named):
        path = shutil.which(name.split()[0])
        if path is not None:
            return path
    pytest.skip("no C++ compiler found")


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@functools.cache
def links(build: str) -> bool:
    """Whether the compiler makes programs of that build."""
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "empty.cpp"
        empty.write_text("int main() {}\n")
        command = [compiler(), *BUILDS[build], str(empty), "-o", str(empty.with_suffix(""))]
        return run(command).returncode == 0


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("name", sorted(path.stem for path in SOURCES.glob("*_test.cpp")))
def test_cpp(name: str, build: str, tmp_path: Path) -> None:
    binary = tmp_path / name
    if not links(build):
        pytest.skip(f"the compiler cannot link a {build} program")
    source = str(SOURCES / f"{name}.cpp")
    flags = [*BUILDS[build], *(["-O1"] if build == "sanitized" and name in LONG else [])]
    built = run([compiler(), *WARNINGS, *flags, source, "-o", str(binary)])
    assert built.returncode == 0, built.stderr
    tested = run([str(binary)])
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert re.search(r"^[1-9]\d* passed, 0 failed$", tested.stdout, re.MULTILINE), tested.stdout


@pytest.mark.parametrize("debug", [True, False], ids=["debug", "release"])
def test_debug_build_reports_malformed_lists(debug: bool, tmp_path: Path) -> None:
    binary = tmp_path / "pattern_test"
    define = ["-DSPARSE_ATTN_DEBUG"] if debug else []
    source = str(SOURCES / "pattern_test.cpp")
    built = run([compiler(), *WARNINGS, *define, source, "-o", str(binary)])
    assert built.returncode == 0, built.stderr
    printed = run([str(binary), "0"]).stdout
    for report in ("clamps the count -5", "skips the entry -1", "skips the entry 2147483647"):
        assert (f"sparse_attn: block list: {report}\n" in printed) == debug


def test_pattern_compiles_for_the_device(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc not found")
    flags = ["-std=c++17", "-ptx", "-arch=compute_80", "-Werror", "all-warnings"]
    source = str(SOURCES / "pattern_kernel.cu")
    built = run([nvcc, *flags, f"-I{ROOT / 'csrc'}", source, "-o", str(tmp_path / "kernel.ptx")])
    assert built.returncode == 0, built.stderr
