"""Every example in a docstring runs, and every public name has one line of help."""

import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest

import sparse_attn as sa

MODULES = [
    module.name.removeprefix("sparse_attn.")
    for module in pkgutil.walk_packages(sa.__path__, "sparse_attn.")
    if not module.name.startswith(("sparse_attn._C", "sparse_attn._info", "sparse_attn.integr"))
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", MODULES)
def test_examples_run(device, name):
    if device != "cpu":
        pytest.skip("examples make CPU tensors")
    module = importlib.import_module(f"sparse_attn.{name}")
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("name", sa.__all__)
def test_public_names_are_documented(name):
    item = getattr(sa, name)
    assert inspect.getdoc(item)
    if name.endswith("_attention") and name != "swap_attention":
        doc = inspect.getdoc(item)
        for word in ("Parameters", "Returns", "Raises", "Examples", "query_offset", "key_bounds"):
            assert word in doc, f"{name} does not explain {word}"
        assert "{" not in doc.replace('{"auto"', "").replace('{"mean"', "")


def test_import_is_light():
    code = (
        "import sys, sparse_attn; "
        "heavy = {'matplotlib', 'transformers', 'sparse_attn.integrations.transformers'}; "
        "assert not heavy & set(sys.modules), heavy & set(sys.modules); "
        "import torch; assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
