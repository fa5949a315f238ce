"""The op libraries: a missing one is found in an installed copy, or named with reason and fix."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sparse_attn as sa
from scripts import digests
from sparse_attn import _load, ops

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = Path(sa.__path__[-1]) / "_C.so"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(_load, "FOLDER", tmp_path)
    monkeypatch.setattr(_load, "cuda_error", None)
    return tmp_path


def test_without_the_cpu_library(folder):
    with pytest.raises(ImportError, match=r"_C\.so was not built; build it with `pip install"):
        _load.load()


def test_with_a_broken_library(folder):
    (folder / "_C.so").write_bytes(b"no library")
    why = "(file too short|invalid ELF header)"  # the loader's own words
    with pytest.raises(ImportError, match=rf"_C\.so does not load: .*{why}; build it with"):
        _load.load()


def test_with_an_older_torch(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(ImportError, match=r"^sparse_attn: expected torch >= 2\.10, got 2\.9\.1"):
        _load.load()


@pytest.mark.parametrize(
    "cuda, reason",
    [
        (None, "has no CUDA; install a CUDA build of torch"),
        ("13.0", "was not built; install the CUDA"),
    ],
    ids=["cpu-torch", "cuda-torch"],
)
def test_without_the_cuda_library(folder, monkeypatch, cuda, reason):
    (folder / "_C.so").touch()
    monkeypatch.setattr(
        _load, "_open", lambda _, name: None if name == "_C" else f"{name}.so was not built"
    )
    monkeypatch.setattr(torch.version, "cuda", cuda)
    _load.load()
    assert reason in _load.cuda_error


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A checkout that was not built, and what it installed elsewhere."""
    checkout, site = (tmp_path_factory.mktemp(name) for name in ("checkout", "site"))
    no_libraries = shutil.ignore_patterns("*.so", "__pycache__", digests.RECORD)
    for name in ("csrc", "cmake", "scripts", "sparse_attn"):
        shutil.copytree(ROOT / name, checkout / name, ignore=no_libraries)
    shutil.copy(ROOT / "CMakeLists.txt", checkout)
    shutil.copytree(checkout / "sparse_attn", site / "sparse_attn")
    shutil.copy(LIBRARY, site / "sparse_attn")
    digests.write_record(site / "sparse_attn", digests.digest_of(digests.BUILD_SOURCES))
    return checkout, site


class TestSourceFolder:
    """Python started in a checkout finds the source folder first, whatever is installed."""

    LEAVE = "this is the source folder, build it with make or pip install -e ., or leave it"

    def test_takes_the_libraries_of_an_installed_copy(self, installed):
        checkout, site = installed
        program = (
            "import torch, sparse_attn as sa; q = torch.ones(1, 1, 4, 8); "
            "print(sa.__file__, sa.fused_attention(q, q, q).sum().item())"
        )
        result = subprocess.run(
            [sys.executable, "-c", program],
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}"},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout.split() == [str(checkout / "sparse_attn" / "__init__.py"), "32.0"]

    def test_without_an_installed_copy(self, installed, monkeypatch):
        checkout, _ = installed
        monkeypatch.setattr(_load, "FOLDER", checkout / "sparse_attn")
        monkeypatch.setattr(sys, "path", [str(checkout)])
        with pytest.raises(ImportError) as error:
            _load.load()
        assert str(error.value) == f"sparse_attn: _C.so was not built: {self.LEAVE}"

    @pytest.mark.parametrize(
        "changed",
        ["csrc/pattern.h", "sparse_attn/ops.py", "site:_C.so", "site:ops.py", "site:.built_from"],
    )
    def test_a_copy_of_other_sources_is_left_alone(self, installed, tmp_path, monkeypatch, changed):
        checkout, site = (Path(shutil.copytree(f, tmp_path / f.name)) for f in installed)
        monkeypatch.setattr(_load, "FOLDER", checkout / "sparse_attn")
        monkeypatch.syspath_prepend(site)
        copy = site / "sparse_attn"
        assert _load._installed_copy() == (copy, "")
        inside, _, name = changed.rpartition(":")
        with ((copy if inside else checkout) / name).open("ab") as file:
            file.write(b"\n ")
        if name == digests.RECORD:
            (copy / name).unlink()
        assert _load._installed_copy() == (
            None,
            f"_C.so was not built: {self.LEAVE} ({copy} was built from other sources)",
        )


def test_a_cuda_call_says_why_there_are_no_engines(monkeypatch):
    monkeypatch.setattr(_load, "cuda_error", "the reason; the fix")
    error = NotImplementedError("Could not run 'sparse_attn::band' from the 'CUDA' backend. ...")
    translated = ops._translated(error)
    assert isinstance(translated, NotImplementedError)
    assert str(translated) == "sparse_attn: no CUDA engines: the reason; the fix"


def test_other_errors_pass_through_and_traces_are_cut():
    other = RuntimeError("out of memory")
    assert ops._translated(other) is other
    wrong = ops._translated(RuntimeError("sparse_attn::band: expected X, got Y\nException raised"))
    assert isinstance(wrong, ValueError) and str(wrong) == "sparse_attn::band: expected X, got Y"


def test_cpu_calls_do_not_need_the_cuda_library():
    query = torch.randn(1, 1, 4, 8)
    assert torch.isfinite(sa.fused_attention(query, query, query)).all()
