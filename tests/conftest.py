"""The same suite on every device: ``pytest tests --device cuda``.

Folders: ``semantics`` (what a call means, on every engine), ``kernels`` (engines, devices, memory,
C++), ``torch`` (operators, compile), ``models`` (policies, nn, transformers) and ``tools``
(build, docs, benchmarks, recorded runs). What they share stands here, next to this file.

A test that takes ``engine`` runs once for each engine of the device, or for ``--engine`` alone;
``attend`` calls it and skips with the reason where that engine does not serve the case (on the CPU
every engine serves all).
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

# Threads that spin between small ops crawl on a machine that others use; read when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


import pytest
import torch

import sparse_attn as sa

ENGINES = {"cpu": ("tiled", "naive"), "cuda": ("hopper", "portable", "naive")}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", choices=list(ENGINES), help="where tensors live")
    parser.addoption(
        "--filled-outputs", action="store_true", help="calls get outputs filled with NaN"
    )
    parser.addoption("--engine", help="the one engine to test, of those of the device")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "engine" in metafunc.fixturenames:
        only = metafunc.config.getoption("--engine")
        engines = ENGINES[metafunc.config.getoption("--device")]
        metafunc.parametrize("engine", [e for e in engines if only in (None, e)])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``--engine``, leave tests of no engine in particular to the run of the first one."""
    only, first = config.getoption("--engine"), ENGINES[config.getoption("--device")][0]
    if only not in (None, first):
        kept = [item for item in items if "engine" in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    name = request.config.getoption("--device")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return name


@pytest.fixture
def on_device(device: str) -> Iterator[None]:
    """Make every tensor and model of the test on the device."""
    with torch.device(device):
        yield


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def attend(request: pytest.FixtureRequest, device: str, engine: str) -> Callable[..., Any]:
    """Call sparse_attention with the engine under test."""
    filled = request.config.getoption("--filled-outputs")

    def call(pattern: Any, query: Any, key: Any, value: Any, **common: Any) -> Any:
        if filled:
            common.setdefault("out", torch.full_like(query, torch.nan))
        try:
            return sa.sparse_attention(query, key, value, pattern, engine=engine, **common)
        except NotImplementedError as error:
            if device == "cpu":
                raise
            pytest.skip(str(error))

    return call
