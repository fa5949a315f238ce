"""The op libraries: a missing one is named with its reason and the fix."""

import pytest
import torch

import sparse_attn as sa
from sparse_attn import _load, ops


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
    with pytest.raises(ImportError, match=r"_C\.so does not load: .*; build it with"):
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
    monkeypatch.setattr(
        _load, "_open", lambda name: None if name == "_C" else f"{name}.so was not built"
    )
    monkeypatch.setattr(torch.version, "cuda", cuda)
    _load.load()
    assert reason in _load.cuda_error


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
