"""Models whose layers differ in their heads: configurations that no longer name one number."""

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from tiny_models import GROUPED, WINDOW, assert_same, build, output, text

import sparse_attn as sa

pytestmark = pytest.mark.usefixtures("on_device")

if not hasattr(transformers, "EmbeddingGemma2TextConfig"):
    pytest.skip("this transformers has no such model", allow_module_level=True)


def embedding_gemma2():
    config = transformers.EmbeddingGemma2TextConfig(
        **GROUPED,
        global_head_dim=32,
        sliding_window=WINDOW,
        hidden_size_per_layer_input=8,
        layer_types=["sliding_attention", "full_attention"],
    )
    with pytest.raises(RuntimeError, match="num_key_value_heads"):
        print(config.num_key_value_heads)
    return build(config, cls=transformers.AutoModel)


def test_apply_takes_them():
    eager, ours = embedding_gemma2(), sa.integrations.transformers.apply(embedding_gemma2())
    ids, mask = text("left")
    inputs = dict(input_ids=ids, attention_mask=mask)
    assert_same(output(ours, **inputs), output(eager, **inputs), mask)


def test_advise_takes_them():
    texts = list(torch.randint(3, 97, (2, 1, 128)))
    bands = [sa.Band(8), sa.Band(32)]
    advice = sa.advise(embedding_gemma2(), texts, keep=0.5, patterns=bands, progress=False)
    assert advice.validation[-1].pairs < 1
