"""What is built: libraries without Python or unstable torch symbols, and nothing left out."""

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

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(sparse_attn.__file__).parent
LIBRARIES = sorted(PACKAGE.glob("_C*.so"), key=lambda path: path.name)

UNSTABLE = re.compile(r"\b(torch|c10|at|caffe2)::")
PYTHON = re.compile(r"^_?Py[A-Z_]")


def undefined_symbols(library: Path) -> list[str]:
    """Demangled names that the library takes from others, versions cut off."""
    command = ["nm", "--dynamic", "--undefined-only", "--demangle", str(library)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line.split(maxsplit=1)[1].split("@")[0] for line in listing.splitlines()]


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


def test_the_cpu_library_is_built():
    assert "_C.so" in [path.name for path in LIBRARIES]


def test_every_source_file_is_listed():
    sources = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cpp", ".cu")]
    listed = set(re.findall(r"csrc/[\w/]+\.(?:cpp|cu)\b", (ROOT / "CMakeLists.txt").read_text()))
    assert {p.relative_to(ROOT).as_posix() for p in sources} == listed


REGISTERS = "ptxas info    : Used 168 registers, used 2 barriers"
SERIALISED = "ptxas info    : (C7510) Potential Performance Loss: wgmma is serialized"
IGNORED = "ptxas info    : setmaxnreg ignored to maintain minimum register requirement"
NO_LOCAL = "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
SPILLED = "    16 bytes stack frame, 20 bytes spill stores, 20 bytes spill loads"
INDEXED = "    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"


@pytest.mark.parametrize(
    ("options", "message", "status"),
    [
        ([], REGISTERS, 0),
        ([], SERIALISED, 1),
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


def test_works_without_the_info_module():
    script = """
        import sys
        sys.modules["sparse_attn._info"] = None  # importing it now fails
        import torch
        import sparse_attn
        query = torch.randn(1, 1, 4, 8)
        print(sparse_attn.fused_attention(query, query, query).shape)
        print(" ".join(sparse_attn.can_use(query, query, query).reasons))
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    result = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    shape, reasons = result.stdout.splitlines()
    assert shape == "torch.Size([1, 1, 4, 8])"
    assert "table is missing" in reasons
