"""Graphs of a model serve other padding than the example's: traced, captured, without values."""

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from tiny_models import COMMON, CONFIGS, assert_same, build, output, text
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import sparse_attn as sa

pytestmark = pytest.mark.usefixtures("on_device")


@pytest.fixture(autouse=True)
def registered():
    sa.integrations.transformers.register()


class Hidden(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask):
        return output(self.model, input_ids=ids, attention_mask=mask)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("padding", ["left", "right", "holes"])
@pytest.mark.parametrize("name", ["bert", "modernbert", "llama"])
def test_traced_without_padding(name, padding):
    config = CONFIGS[name]()
    config.use_cache = False
    eager, ours = (build(config, engine) for engine in ("eager", "sparse_attn"))
    ids, mask = text()
    traced = torch.jit.trace(Hidden(ours), (ids, mask), check_trace=False)
    for length in (24, 13):
        ids, mask = text(padding, length=length)
        assert_same(traced(ids, mask), output(eager, input_ids=ids, attention_mask=mask), mask)


@torch.no_grad()
def test_made_into_a_graph_without_padding():
    """By make_fx; BERT's own mask reads values there, Llama's does not."""
    config = CONFIGS["llama"]()
    config.use_cache = False
    eager, ours = (build(config, engine) for engine in ("eager", "sparse_attn"))
    graph = make_fx(Hidden(ours))(*text())
    ids, mask = text("left")
    assert_same(graph(ids, mask), output(eager, input_ids=ids, attention_mask=mask), mask)


def bert():
    return build(transformers.BertConfig(**COMMON), "sparse_attn")


def test_while_a_stream_is_captured_nothing_reads_the_mask(monkeypatch):
    model, (ids, mask) = bert(), text("right")
    own = output(model, input_ids=ids, attention_mask=mask)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: pytest.fail("waits for the device"))
    assert_same(output(model, input_ids=ids, attention_mask=mask), own, mask)


def test_tensors_without_values():
    model, (ids, mask) = bert(), text("right")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(tensor) for tensor in (ids, mask)]
        assert output(model, input_ids=fake[0], attention_mask=fake[1]).shape == (2, 24, 64)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_policy_is_not_traced():
    """What it chooses follows from lengths, which a trace does not tell."""
    model = bert()
    sa.integrations.transformers.apply(model, sa.Band(4))
    with pytest.raises(TypeError, match=r"Policy.choose: .* got Tensor; torch.jit.trace .*export"):
        torch.jit.trace(Hidden(model), text(), check_trace=False)
