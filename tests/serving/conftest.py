"""Fixtures of packed sequences."""

import pytest
from engines import main_dtype
from ragged import Serving, ragged_for

import sparse_attn as sa


@pytest.fixture
def varlen(device, engine):
    """varlen_attention with the engine under test; skips where that does not serve the call."""
    serving = Serving(device, engine)
    return lambda *args, **common: serving(sa.varlen_attention, *args, **common)


@pytest.fixture
def ragged(engine):
    return ragged_for(engine)


@pytest.fixture
def any_dtype(device, engine):
    """A dtype that the engine serves."""
    return main_dtype(device, engine)
