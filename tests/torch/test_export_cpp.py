"""A layer compiled by AOTInductor runs in C++: the program and the command of docs/exporting.md."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sparse_attn as sa

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "exporting.md").read_text()
#: Compiles for 8 seconds instead of 30.
QUICKLY = {
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.precompile_headers": False,
}


def block(language, words):
    """The code block of the page that holds these words."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return next(text for text in found if words in text)


class Layer(torch.nn.Module):
    def forward(self, query, key, value):
        return sa.band_attention(query, key, value, (127, 0), sinks=4)


def test_layer_runs_in_cpp(device, tmp_path, monkeypatch):
    if device != "cpu":
        pytest.skip("examples make CPU tensors")
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler found")
    monkeypatch.chdir(tmp_path)
    layer, length = Layer(), torch.export.Dim("length", min=2, max=8192)
    with torch.no_grad():
        example = torch.randn(3, 1, 4, 64, 64).unbind(0)
        program = torch.export.export(layer, example, dynamic_shapes=[{2: length}] * 3)
        with torch._inductor.config.patch(QUICKLY):
            exec(block("py", "aoti_compile"), {"torch": torch, "program": program})
        tensors = torch.randn(3, 1, 4, 300, 64).unbind(0)
        want = layer(*tensors)
    torch.save(torch.stack(tensors), "inputs.pt")
    Path("main.cpp").write_text(block("cpp", "AOTIModelPackageLoader"))
    library = Path(sa.__file__).parent / "_C.so"
    command = block("bash", "g++").replace("sparse_attn/_C.so", str(library))
    command = command.replace("python -c", f"{sys.executable} -c")
    run = subprocess.run(["bash", "-ec", command], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert torch.equal(torch.load("out.pt"), want)


def test_blocks_of_packed_sequences_of_all_lengths(device, tmp_path):
    """Bounds that a graph takes from shapes reach the ops as they are."""
    if device != "cpu":
        pytest.skip("examples make CPU tensors")
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler found")
    pattern = sa.BlockTopK(16, mass=0.6, local_blocks=1)

    class Packed(torch.nn.Module):
        def forward(self, query, key, value, starts):
            bounds = query.shape[0], key.shape[0]
            return sa.varlen_attention(
                query, key, value, starts, starts, *bounds, pattern=pattern, is_causal=True
            )

    def texts(*lengths):
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()
        query, key, value = (torch.randn(sum(lengths), heads, 32) for heads in (4, 2, 2))
        return query, key, value, starts

    free = {0: torch.export.Dim.DYNAMIC}
    with torch.no_grad(), torch._inductor.config.patch(QUICKLY):
        program = torch.export.export(Packed(), texts(30, 5, 61), dynamic_shapes=[free] * 4)
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "packed.pt2")
        )
        loaded = torch._inductor.aoti_load_package(package)
        for lengths in [(30, 5, 61), (7, 100), (200, 1, 3, 4)]:
            inputs = texts(*lengths)
            assert torch.equal(loaded(*inputs), Packed()(*inputs))
