"""examples/cpp: a layer exported by AOTInductor runs in a program without Python."""

import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import sparse_attn

EXAMPLE = Path(__file__).parents[2] / "examples" / "cpp"
#: Compiles for a fourth of the time.
QUICKLY = {
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.precompile_headers": False,
}


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_exported_layer_runs_without_python(tmp_path, device, capsys):
    if device != "cpu":
        pytest.skip("examples make CPU tensors")
    for tool in ("cmake", "c++"):
        if shutil.which(tool) is None:
            pytest.skip(f"no compiler: {tool} is missing")
    layer, build = tmp_path / "layer.pt2", tmp_path / "build"
    with torch._inductor.config.patch(QUICKLY):
        runpy.run_path(str(EXAMPLE / "export.py"))["main"](str(layer))
    want = capsys.readouterr().out.strip().splitlines()[-1]
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    run("cmake", "-S", EXAMPLE, "-B", build, prefix)
    run("cmake", "--build", build)
    library = Path(sparse_attn.__file__).parent / "_C.so"
    got = run(build / "main", layer, library)
    assert float(got) == pytest.approx(float(want), abs=1e-3)
