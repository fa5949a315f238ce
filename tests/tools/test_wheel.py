"""The wheel, packed from the libraries in the tree: one for every Python, clean, and it works."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts import wheel
from scripts.digests import ROOT

pytest.importorskip("auditwheel", reason="auditwheel is not installed")
pytest.importorskip("setuptools", minversion="77", reason="setuptools is too old")


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return wheel.pack(tmp_path_factory.mktemp("dist"))


def test_serves_every_python_on_old_systems(packed):
    assert "-py3-none-manylinux_2_" in packed.name
    show = [sys.executable, "-m", "auditwheel", "show", "--json", str(packed)]
    report = json.loads(subprocess.run(show, capture_output=True, text=True, check=True).stdout)
    assert set(report["external_libs"]) <= {*wheel.TORCH_LIBRARIES}, report


def test_holds_the_op_libraries_and_no_module_of_one_python(packed):
    libraries = {p.name for p in (ROOT / "sparse_attn").glob("_C*.so")}
    names = zipfile.ZipFile(packed).namelist()
    assert {Path(name).name for name in names if name.endswith(".so")} == libraries
    assert "sparse_attn/.built_from" in names


def test_runs_where_nothing_else_is_installed(packed, tmp_path):
    zipfile.ZipFile(packed).extractall(tmp_path)
    program = (
        "import sys; sys.path.insert(0, '.'); import torch, sparse_attn as sa; "
        "q = torch.ones(1, 1, 4, 8); "
        "print(sa.__file__, sa.band_attention(q, q, q, (1, 0)).sum().item())"
    )
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert said.split() == [str(tmp_path / "sparse_attn" / "__init__.py"), "32.0"]


def test_larger_wheels_are_refused(packed, monkeypatch):
    monkeypatch.setattr(wheel, "LARGEST", 1000)
    with pytest.raises(SystemExit, match="expected a wheel of at most 1000 bytes, got"):
        wheel.check_size(packed)


def test_only_libraries_of_these_sources_are_packed(tmp_path):
    no_libraries = shutil.ignore_patterns("*.so", "__pycache__", ".built_from")
    for name in ("csrc", "cmake", "scripts", "sparse_attn"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=no_libraries)
    for name in ("CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    command = [sys.executable, "setup.py", "--quiet", "bdist_wheel", "--in-tree"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    sentence = (
        "sparse_attn: the libraries in sparse_attn/ are not built from these sources: run make"
    )
    assert result.returncode == 1 and result.stderr.splitlines()[-1] == sentence
