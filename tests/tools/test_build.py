"""What is built: libraries without Python or unstable torch symbols, and nothing left out."""

import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import sparse_attn
from scripts import cmake_build

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(sparse_attn.__file__).parent
LIBRARIES = sorted(Path(sparse_attn.__path__[-1]).glob("_C*.so"), key=lambda path: path.name)

UNSTABLE = re.compile(r"\b(torch|c10|at|caffe2)::")
PYTHON = re.compile(r"^_?Py[A-Z_]")
#: Instructions that not every x86-64 has (all AVX begins with v), and who may execute them.
WIDE = re.compile(r"v(?!er[rw]\b)\w+|\w*tile\w*|tdp\w+")
OF_ONE_ISA = re.compile(r"11sparse_attn3cpu(4avx2|6avx512|3amx)")


def undefined_symbols(library: Path) -> list[str]:
    """Demangled names that the library takes from others, versions cut off."""
    command = ["nm", "--dynamic", "--undefined-only", "--demangle", str(library)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line.split(maxsplit=1)[1].split("@")[0] for line in listing.splitlines()]


def wide_functions(library: Path) -> set[str]:
    """Mangled names of functions with instructions that not every x86-64 has."""
    command = ["objdump", "--disassemble", "--no-show-raw-insn", str(library)]
    function, found = "", set()
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for line in listing.split("\n"):
        if line.endswith(">:"):
            function = line
        elif WIDE.match(line.partition("\t")[2]):
            found.add(function)
    return found


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm (binutils) is not installed")
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
class TestSymbols:
    def test_takes_only_the_stable_abi_from_torch(self, library):
        symbols = undefined_symbols(library)
        assert [s for s in symbols if UNSTABLE.search(s)] == []
        assert any(s.startswith(("aoti_torch_", "torch_")) for s in symbols)

    def test_holds_no_python(self, library):
        assert [s for s in undefined_symbols(library) if PYTHON.search(s)] == []

    def test_holds_all_of_its_own(self, library):
        assert [s for s in undefined_symbols(library) if "sparse_attn::" in s] == []

    def test_has_no_search_path(self, library):
        command = ["readelf", "--dynamic", str(library)]
        dynamic = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "RPATH" not in dynamic and "RUNPATH" not in dynamic

    def test_asks_the_processor_before_wide_instructions(self, library):
        """The linker may keep the copy of an inline function that was compiled for AVX-512."""
        found = wide_functions(library)
        assert [name for name in found if not OF_ONE_ISA.search(name)] == []
        assert bool(found) == (library.name == "_C.so" and platform.machine() == "x86_64")


def test_the_cpu_library_is_built():
    assert "_C.so" in [path.name for path in LIBRARIES]


def test_every_source_file_is_listed():
    sources = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cpp", ".cu")]
    listed = set(re.findall(r"csrc/[\w/]+\.(?:cpp|cu)\b", (ROOT / "CMakeLists.txt").read_text()))
    assert {p.relative_to(ROOT).as_posix() for p in sources} == listed


def test_the_namespace_of_the_ops_is_named_once_in_each_language():
    registering = re.compile(r"STABLE_TORCH_LIBRARY|NAMESPACE sparse_attn")
    assert {p.name for p in (ROOT / "csrc").rglob("*.*") if registering.search(p.read_text())} == {
        "namespace.h"
    }
    naming = re.compile(
        r"""torch\.ops\.sparse_attn\b(?!`)|(?:impl|define|fake|op)\(\s*f?"sparse_attn::"""
    )
    package = ROOT / "sparse_attn"
    assert [p.name for p in package.rglob("*.py") if naming.search(p.read_text())] == []
    assert re.findall(r"\bsparse_attn\b", (package / "_ops.py").read_text()) == ["sparse_attn"]


REGISTERS = "ptxas info    : Used 168 registers, used 2 barriers"
SERIALISED = "ptxas info    : (C7510) Potential Performance Loss: wgmma is serialized"
NAMED = "ptxas info    : Compiling '_GLOBAL__N__fdac7503_8_merge_cu_cbeba8f3'"
IGNORED = "ptxas info    : setmaxnreg ignored to maintain minimum register requirement"
NO_LOCAL = "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
SPILLED = "    16 bytes stack frame, 20 bytes spill stores, 20 bytes spill loads"
INDEXED = "    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"


@pytest.mark.parametrize(
    ("options", "message", "status"),
    [
        ([], REGISTERS, 0),
        ([], SERIALISED, 1),
        ([], NAMED, 0),
        ([], IGNORED, 1),
        ([], SPILLED, 0),
        (["--local-memory=0"], NO_LOCAL, 0),
        (["--local-memory=20"], SPILLED, 0),
        (["--local-memory=19"], SPILLED, 1),
        (["--local-memory=0"], INDEXED, 1),
        (["--local-memory=0"], SERIALISED, 1),
    ],
    ids=[
        "routine",
        "serialised wgmma",
        "a name like its note",
        "setmaxnreg ignored",
        "spills where they may",
        "no local memory",
        "few spills",
        "spills",
        "indexed array",
        "serialised wgmma without spills",
    ],
)
def test_slow_kernels_fail_the_build(tmp_path, options, message, status):
    program = f"import sys; print({message!r}, file=sys.stderr)"
    checked = [sys.executable, str(ROOT / "cmake" / "nvcc_checked.py"), *options]
    compiler = [sys.executable, "-c", program, "-o", str(tmp_path / "kernel.o")]
    assert subprocess.run([*checked, *compiler], capture_output=True).returncode == status
    assert message in (tmp_path / "kernel.o.log").read_text()


def test_version_is_the_same_everywhere():
    info = pytest.importorskip("sparse_attn._info", reason="the info module is not built")
    facts = info.build_facts()
    assert facts["version"] == sparse_attn.__version__
    assert "plain" in facts["instruction_sets"]
    with suppress(PackageNotFoundError):  # not installed, run from the tree
        assert version("sparse_attn") == sparse_attn.__version__


def run_setup(*arguments, **environment):
    """Run setup.py, as pip does, and return its exit status and what it says."""
    pytest.importorskip("setuptools", minversion="77", reason="setuptools is too old")
    command = [sys.executable, str(ROOT / "setup.py"), "--quiet", *map(str, arguments)]
    result = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    return result.returncode, result.stdout + result.stderr


def test_version_stands_in_one_place():
    for name in ("pyproject.toml", "CMakeLists.txt", "setup.py"):
        assert not re.search(
            rf"\b{re.escape(sparse_attn.__version__)}\b", (ROOT / name).read_text()
        )


def test_every_python_file_is_installed_and_none_of_an_earlier_build(tmp_path):
    package = tmp_path / "sparse_attn"
    package.mkdir()
    (package / "left_by_an_earlier_build.py").touch()
    status, said = run_setup("build_py", "--build-lib", tmp_path)
    assert status == 0, said
    for pattern in ("*.py", "py.typed", "*.pyi"):
        here = {p.relative_to(ROOT) for p in (ROOT / "sparse_attn").rglob(pattern)}
        assert {p.relative_to(tmp_path) for p in package.rglob(pattern)} == here


class TestMissing:
    """What a build needs and does not find is said in one sentence."""

    @pytest.fixture
    def tools(self, tmp_path, monkeypatch):
        """A folder of empty programs that is all a build can call."""
        for name in ("cmake", "ninja", "c++"):
            (tmp_path / name).touch(mode=0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        for name in ("CXX", "CMAKE_ARGS"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        return tmp_path

    @pytest.mark.parametrize(
        ("missing", "sentence"),
        [
            ("cmake", r"sparse_attn: the build needs cmake: pip install cmake"),
            ("ninja", r"sparse_attn: the build needs ninja: pip install ninja"),
            ("c++", r"sparse_attn: the build needs a C\+\+ compiler, found none \(.*\): .*"),
        ],
    )
    def test_tool(self, tools, missing, sentence):
        cmake_build.check_tools()
        (tools / missing).unlink()
        with pytest.raises(SystemExit) as error:
            cmake_build.check_tools()
        assert re.fullmatch(sentence, error.value.code)

    def test_a_compiler_named_otherwise(self, tools, monkeypatch):
        (tools / "c++").rename(tools / "mine")
        monkeypatch.setenv("CXX", "mine -m64")
        cmake_build.check_tools()
        monkeypatch.setenv("CXX", "other")
        with pytest.raises(SystemExit, match=r"compiler, found none \(other\)"):
            cmake_build.check_tools()

    def test_pip_shows_nothing_but_the_sentence(self, tmp_path):
        for name in ("cmake", "ninja"):
            (tmp_path / name).touch(mode=0o755)
        status, said = run_setup("bdist_wheel", PATH=str(tmp_path), CXX="", CMAKE_ARGS="")
        assert status == 1
        assert len(said.splitlines()) == 1 and "the build needs a C++ compiler" in said

    def test_torch(self, tools, monkeypatch):
        monkeypatch.setattr(cmake_build, "torch_folder", lambda: None)
        with pytest.raises(SystemExit, match=r"^sparse_attn: the build needs torch >= 2\.10,"):
            cmake_build.build(tools)

    def test_an_older_torch_is_passed_over(self, tmp_path, monkeypatch):
        for name in ("2.9.1", "1.13.0", "2.10.0+cpu"):
            (tmp_path / name / "torch").mkdir(parents=True)
            (tmp_path / name / "torch" / "version.py").write_text(f"__version__ = '{name}'\n")
        found = sorted(map(str, tmp_path.iterdir()), reverse=True)
        monkeypatch.setattr(sys, "path", [*found, *sys.path])
        assert cmake_build.torch_folder() == tmp_path / "2.10.0+cpu" / "torch"

    def test_a_failing_compiler(self, tools, monkeypatch):
        def fail(command, check):
            raise subprocess.CalledProcessError(1, command)

        monkeypatch.setattr(subprocess, "run", fail)
        with pytest.raises(SystemExit, match=r"^sparse_attn: the build failed, its output above"):
            cmake_build.build(tools)

    def test_pybind11(self, tools, monkeypatch, capsys):
        monkeypatch.setattr(subprocess, "run", lambda command, check: None)
        cmake_build.build(tools)
        assert re.fullmatch(
            r"sparse_attn: built without its info module, which needs pybind11 .*: "
            r"build facts and the tiles that patterns visit are missing, all else works\n",
            capsys.readouterr().out,
        )
        (tools / "_info.abi.so").touch()
        cmake_build.build(tools)
        assert capsys.readouterr().out == ""


def test_works_without_the_info_module():
    script = """
        import sys
        sys.modules["sparse_attn._info"] = None  # importing it now fails
        import torch
        import sparse_attn
        query = torch.randn(1, 1, 4, 8)
        print(sparse_attn.fused_attention(query, query, query).shape)
        print(sparse_attn.can_use(query, query, query).engine)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    result = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    shape, engine = result.stdout.splitlines()
    assert shape == "torch.Size([1, 1, 4, 8])"
    assert engine == "tiled"


def test_the_gpu_suite_starts_without_the_info_module():
    script = "import sys; sys.modules['sparse_attn._info'] = None; import scripts.run_gpu_suite"
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
