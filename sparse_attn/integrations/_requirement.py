"""Imported before transformers: one sentence where it is missing or older than what was tested."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

__all__ = ["OLDEST", "check"]

#: The oldest transformers that the tests passed with, as in pyproject.toml.
OLDEST = "5.17"


def _release(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)[:2]]


def check() -> None:
    """Raise an ImportError that names the fix."""
    try:
        found = version("transformers")
    except PackageNotFoundError:
        found = "none"
    if found == "none" or _release(found) < _release(OLDEST):
        raise ImportError(
            f"sparse_attn.integrations.transformers: expected transformers >= {OLDEST}, "
            f"got {found}: pip install 'transformers>={OLDEST}'"
        )


check()
