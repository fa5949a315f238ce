"""A pattern that never looks ahead makes an encoder causal, which a warning says, once."""

import warnings

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
import transformers
from tiny_models import COMMON, CONFIGS, build, output, text

import sparse_attn as sa

pytestmark = pytest.mark.usefixtures("on_device")

apply = sa.integrations.transformers.apply
BACK = {
    "strided": sa.Strided(4, 4),
    "band": sa.Band((3, 0), sinks=1),
    "dilated": sa.Dilated((3, 0), 2),
    "by head": sa.ByHead({0: sa.Band((3, 0))}, sa.Strided(4, 4)),
    "below its reach": sa.Policy(sa.Band((99, 0))),
}
BOTH = {
    "two sides": sa.Band(3, sinks=1),
    "by head": sa.ByHead({0: sa.Band((3, 0))}, sa.Band((0, 3))),
    "all": sa.Full(),
}


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch):
    monkeypatch.setattr("sparse_attn._warn._given", set())


def silently(call, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return call(*args, **kwargs)


def warns_once(call, *args, layer, **kwargs):
    with pytest.warns(UserWarning, match=rf"{layer} runs \w+\(.*\), whose .* two sides"):
        call(*args, **kwargs)
    silently(call, *args, **kwargs)


def longformer():
    return build(
        transformers.LongformerConfig(**COMMON, attention_window=8), cls=transformers.AutoModel
    )


@pytest.mark.parametrize("pattern", BACK.values(), ids=BACK)
def test_an_encoder_of_transformers(pattern):
    ids, mask = text("left")
    inputs = dict(input_ids=ids, attention_mask=mask)
    silently(output, apply(build(CONFIGS["llama"]()), pattern), **inputs)
    warns_once(
        output, apply(build(CONFIGS["bert"]()), pattern), layer=r"layer 0 \(encoder.*\)", **inputs
    )


@pytest.mark.parametrize("pattern", BOTH.values(), ids=BOTH)
def test_patterns_that_look_ahead_are_no_question(pattern):
    silently(output, apply(build(CONFIGS["bert"]()), pattern), input_ids=text()[0])


def test_an_encoder_with_windows_of_its_own():
    ours = apply(longformer(), sa.Band((3, 0)))
    warns_once(output, ours, layer=r"layer 0 \(encoder.*\)", input_ids=text()[0])


@torch.no_grad()
def test_modules_of_torch():
    layer = nn.TransformerEncoderLayer(64, 4, 64, batch_first=True).eval()
    ours, x = sa.swap_attention(layer, sa.Band((3, 0))), torch.randn(2, 24, 64)
    silently(ours, x, src_mask=torch.ones(24, 24).triu(1).bool())
    silently(ours, x, src_mask=torch.ones(24, 24).triu(1).bool(), is_causal=True)
    warns_once(ours, x, layer="layer 0")


class Attend(nn.Module):
    def forward(self, x, **options):
        return nn.functional.scaled_dot_product_attention(x, x, x, **options)


def test_calls_of_sdpa():
    model, x = Attend(), torch.randn(1, 2, 24, 16)
    with sa.patch_sdpa(model, sa.Strided(4, 4)):
        silently(model, x, is_causal=True)
        silently(model, x, attn_mask=torch.ones(24, 24).tril().bool())
        warns_once(model, x, layer="patch_sdpa: layer 0")
