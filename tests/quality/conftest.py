"""A tiny model and a text, for the advisor."""

import pytest
import torch


@pytest.fixture
def llama(on_device):
    pytest.importorskip("transformers")
    from tiny_models import CONFIGS, build

    return build(CONFIGS["llama"](), "sdpa")


@pytest.fixture
def ids(on_device):
    return torch.randint(3, 97, (1, 256))
