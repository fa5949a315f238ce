"""make hub: the folder that the kernel hub's builder takes is whole and names no other package."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import sparse_attn
from scripts import hub

PLOTS = "matplotlib"  # asked for inside the methods that draw


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    written = tmp_path_factory.mktemp("hub")
    hub.write(written)
    return written


@pytest.fixture(scope="module")
def settings(folder):
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    return tomllib.loads((folder / "build.toml").read_text())


def test_names_and_abi(settings):
    assert settings["general"]["name"] == "sparse_attn" and settings["general"]["edition"] == 5
    assert settings["general"]["backends"] == ["cpu", "cuda"]
    assert settings["torch"]["stable-abi"] == {"cpu": "2.11", "cuda": "2.11"}


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_every_source_is_built_once(folder, settings, backend):
    kernels = [k for k in settings["kernel"].values() if k["backend"] == backend]
    built = Counter(name for kernel in kernels for name in kernel["src"])
    assert all((folder / name).exists() for name in [*built, *settings["torch"]["src"]])
    others = {"cpu": ".cu", "cuda": "csrc/cpu/"}[backend]
    sources = {p.relative_to(folder).as_posix() for p in (folder / "csrc").rglob("*.c*")}
    sources = {name for name in sources if name.endswith((".cpp", ".cu")) and others not in name}
    if backend == "cpu":
        sources.remove("csrc/cpu/vector/vector_math.cpp")  # included once for each instruction set
    assert built == Counter(sources)


def test_every_header_is_listed(folder, settings):
    headers = {p.relative_to(folder).as_posix() for p in (folder / "csrc").rglob("*.*h")}
    assert headers < set(settings["torch"]["src"])
    assert "csrc/cuda/hopper/wgmma_generated.cuh" in headers


def test_kernels_keep_their_flags(settings):
    kernels = settings["kernel"]
    assert kernels["cuda_hopper"]["cuda-flags"] == ["--use_fast_math"]
    assert kernels["cuda_hopper_ftz_false"]["cuda-flags"] == ["--use_fast_math", "-ftz=false"]
    assert kernels["cuda_hopper"]["cuda-capabilities"] == ["9.0a"]
    assert kernels["cuda_naive"]["cuda-capabilities"] == ["7.5", "8.0+PTX"]
    assert kernels["cuda_portable_dense"]["cuda-capabilities"] == ["8.0+PTX"]
    assert kernels["cuda_select"]["cuda-capabilities"] == ["7.5", "8.0+PTX", "9.0"]
    assert kernels["cuda_decode"]["cuda-capabilities"] == ["8.0+PTX", "9.0"]
    assert "-mavx512f" in kernels["cpu_avx512"]["cxx-flags"]
    assert "-mavx2" not in kernels["cpu_plain"]["cxx-flags"]


def imports(tree):
    """Modules that a file imports when it runs, and whether a function asks for them."""
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    late = {n for f in ast.walk(tree) if isinstance(f, functions) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0, node in late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is None:
            yield from ((alias.name, node.level, node in late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module, node.level, node in late


def test_python_imports_torch_and_itself_alone(folder):
    package = folder / "torch-ext" / "sparse_attn"
    for path in package.rglob("*.py"):
        for name, level, late in imports(ast.parse(path.read_text())):
            where = f"{path.relative_to(package)}: {name}"
            if level:
                base = path.parents[level - 1] / name.replace(".", "/")
                found = base.with_suffix(".py").exists() or (base / "__init__.py").exists()
                assert found or base.name in ("_ops", "_info"), where  # the builder's; optional
            else:
                top = name.partition(".")[0]
                known = top in sys.stdlib_module_names or top == "torch"
                assert known or (late and top == PLOTS), where


def test_the_builder_chooses_the_namespace(folder):
    package = folder / "torch-ext" / "sparse_attn"
    assert not (package / "_ops.py").exists()
    assert not re.search(r"torch\.ops\.sparse_attn\.", (package / "_autograd.py").read_text())
    binding = (folder / "torch-ext" / "torch_binding.cpp").read_text()
    assert "#define SPARSE_ATTN_NAMESPACE TORCH_EXTENSION_NAME" in binding
    for name in re.findall(r'#include "\.\./(.*)"', binding):
        assert (folder / name).exists()


def test_the_package_runs_under_another_name(folder, tmp_path):
    """With a file in place of the builder's that loads the library in the tree."""
    package = tmp_path / "_hub_copy"
    (folder / "torch-ext" / "sparse_attn").rename(package)
    library = Path(sparse_attn.__path__[-1]) / "_C.so"
    (package / "_ops.py").write_text(
        f"import torch\ntorch.ops.load_library({str(library)!r})\nops = torch.ops.sparse_attn\n"
        "def add_op_namespace_prefix(op_name): return f'sparse_attn::{op_name}'\n"
    )
    program = (
        "import torch, _hub_copy as sa; q = torch.ones(1, 1, 4, 8); "
        "print(*sa.__all__); print(sa.band_attention(q, q, q, (1, 0)).sum().item())"
    )
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    names, total = said.stdout.splitlines()
    assert total == "32.0"
    assert set(sparse_attn.__all__) - set(names.split()) == set(hub.DROPPED)
