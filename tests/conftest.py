"""The same suite on every device: ``pytest tests --device cuda``.

Folders: ``semantics`` (what a call means, on every engine), ``kernels`` (engines, devices, memory,
C++), ``torch`` (operators, compile), ``models`` (policies, nn, transformers), ``quality``,
``serving`` and ``tools`` (build, docs, benchmarks, recorded runs); what all share stands here.

A test that takes ``engine`` runs once for each engine of the device, or for those of ``--engine``,
on the dtypes, head dims and numbers of queries that the engine serves; ``attend`` calls it
(engines.py). ``--fuzz-examples`` sets the random cases of each property, ``--fuzz-seconds`` the
seconds after which fewer must do.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator

# Threads that spin between small ops crawl on a machine that others use; read when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Memory that a test gave back goes to the next one instead of to the system, page by page: that
# takes an eighth of a run's time. Read when the processes of a parallel run start.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(32 << 20))
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 30))
# What the advisor keeps for a device stays out of the user's folder.
os.environ["SPARSE_ATTN_CACHE"] = tempfile.mkdtemp(prefix="sparse_attn-tests-")

import pytest
import torch
from engines import Attend, serves_parameters
from skip_budget import over_budget

from sparse_attn.capability import ENGINES


def at_least_one(text: str) -> int:
    """Return a number of cases, of which none would test nothing."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", choices=list(ENGINES), help="where tensors live")
    parser.addoption(
        "--filled-outputs", action="store_true", help="calls get outputs filled with NaN"
    )
    parser.addoption(
        "--shared-device", action="store_true", help="another suite runs there: less memory is free"
    )
    parser.addoption("--engine", help="engines to test, comma separated, of those of the device")
    parser.addoption(
        "--fuzz-examples", type=at_least_one, default=25, help="random cases of each property"
    )
    parser.addoption("--fuzz-seconds", type=float, help="seconds after which fewer must do")


def engines_of(config: pytest.Config) -> list[str]:
    """The engines that this run tests."""
    only = config.getoption("--engine")
    engines = ENGINES[config.getoption("--device")]
    if only is None:
        return list(engines)
    if unknown := set(only.split(",")).difference(engines):
        got = ", ".join(sorted(unknown))
        raise pytest.UsageError(f"--engine: expected engines among {', '.join(engines)}, got {got}")
    return [engine for engine in engines if engine in only.split(",")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "engine" in metafunc.fixturenames:
        metafunc.parametrize("engine", engines_of(metafunc.config))


def wanted(item: pytest.Item, device: str, engines: list[str]) -> bool:
    """Whether this run makes the case; tests of no engine belong to the run of the first one."""
    if "engine" not in getattr(item, "fixturenames", ()):
        return ENGINES[device][0] in engines
    parameters = item.callspec.params
    item.user_properties.append(("engine", parameters["engine"]))  # for records of the run
    return serves_parameters(device, parameters["engine"], parameters)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    device, engines = config.getoption("--device"), engines_of(config)
    kept = [item for item in items if wanted(item, device, engines)]
    config.hook.pytest_deselected(items=list(set(items).difference(kept)))
    items[:] = kept


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that skipped what no budget allows."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:  # one of several processes, whose reports the first one has
        return
    skips = [
        (dict(getattr(report, "user_properties", ())).get("engine", ""), report.longrepr[2])
        for report in reporter.stats.get("skipped", ())
    ]
    device, shared = map(session.config.getoption, ("--device", "--shared-device"))
    if sentences := over_budget(device, skips, shared):
        reporter.write_line("")
        for sentence in sentences:
            reporter.write_line(f"over the budget of skips: {sentence}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


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
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # where it would note the stack for a device that never comes, in 5 ms
        torch.default_generator.manual_seed(0)


@pytest.fixture
def attend(request: pytest.FixtureRequest, device: str, engine: str) -> Attend:
    """Call sparse_attention with the engine under test."""
    return Attend(device, engine, request.config.getoption("--filled-outputs"))
