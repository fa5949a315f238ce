"""An older transformers, or none, is refused in one sentence."""

import re
from importlib.metadata import PackageNotFoundError

import pytest

from scripts.digests import ROOT
from sparse_attn.integrations import _requirement


@pytest.mark.parametrize("found", ["4.57.6", "5.9.0", "5.16.1", "none"])
def test_older_versions_are_refused(monkeypatch, found):
    def version(name):
        if found == "none":
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(_requirement, "version", version)
    with pytest.raises(ImportError) as error:
        _requirement.check()
    assert str(error.value) == (
        f"sparse_attn.integrations.transformers: expected transformers >= {_requirement.OLDEST}, "
        f"got {found}: pip install 'transformers>={_requirement.OLDEST}'"
    )


@pytest.mark.parametrize("found", ["5.17.0", "5.18.0.dev0", "6.0.0"])
def test_newer_versions_pass(monkeypatch, found):
    monkeypatch.setattr(_requirement, "version", lambda name: found)
    _requirement.check()


def test_the_check_comes_before_any_name_of_transformers():
    source = (ROOT / "sparse_attn" / "integrations" / "transformers.py").read_text()
    assert source.index("import _requirement") < source.index("from transformers import")


def test_the_extra_asks_for_the_same():
    extra = re.search(
        r'^hf = \["transformers>=([\d.]+)"\]', (ROOT / "pyproject.toml").read_text(), re.M
    )
    assert extra and extra[1] == _requirement.OLDEST
