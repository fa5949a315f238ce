"""Models forbid keys by the lowest number of their mask's type too, and top-k then ranks none."""

import pytest
import torch

import sparse_attn as sa

pytestmark = pytest.mark.usefixtures("on_device")

LENGTH = 24
#: Made in a test, on the device under test.
PATTERNS = {
    "topk": lambda: sa.TopK(3),
    "inside": lambda: sa.TopK(
        3, inside=sa.BlockSparse(sa.BlockLayout.local(32, 32, 16, 16, (1, 1)))
    ),
    "by_head": lambda: sa.ByHead({1: sa.TopK(3)}),
}


def causal(low):
    """Return a causal mask with one number at all forbidden keys."""
    allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return torch.zeros(LENGTH, LENGTH).masked_fill(~allowed, low)


@pytest.mark.parametrize("name", PATTERNS)
def test_multihead_attention(name):
    layer = torch.nn.MultiheadAttention(32, 2, batch_first=True).eval()
    ours = sa.swap_attention(torch.nn.Sequential(layer), PATTERNS[name]())[0]
    x = torch.randn(2, LENGTH, 32)
    with torch.no_grad():
        outs = [
            ours(x, x, x, attn_mask=causal(low), need_weights=False)[0]
            for low in (torch.finfo(torch.float32).min, -torch.inf)
        ]
    assert torch.equal(*outs)


@pytest.mark.parametrize("name", PATTERNS)
def test_own_calls_of_sdpa(name):
    class Attend(torch.nn.Module):
        def forward(self, x, mask):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    model, x = Attend(), torch.randn(1, 2, LENGTH, 16)
    with sa.patch_sdpa(model, PATTERNS[name]()):
        lowest = model(x, causal(torch.finfo(torch.float32).min))
        assert torch.equal(lowest, model(x, causal(-torch.inf)))


@pytest.mark.parametrize("kind", ["additive", "doge"])
def test_transformers(kind):
    """A mask that a caller gives in 4 dimensions, and one that a model makes for itself."""
    transformers = pytest.importorskip("transformers")
    from tiny_models import GROUPED, build, output, text

    name = "Llama" if kind == "additive" else "Doge"
    model = build(getattr(transformers, f"{name}Config")(**GROUPED))
    sa.integrations.transformers.apply(model, sa.TopK(3))
    ids, _ = text()
    own = {}
    if kind == "additive":
        own = dict(attention_mask=causal(torch.finfo(torch.float32).min)[None, None])
    # What is cut off ahead of a row changes nothing.
    whole, short = (output(model, input_ids=ids[:, :end]) for end in (LENGTH, 9))
    if own:
        torch.testing.assert_close(output(model, input_ids=ids, **own), whole)
    torch.testing.assert_close(whole[:, :9], short, atol=1e-4, rtol=1e-4)
