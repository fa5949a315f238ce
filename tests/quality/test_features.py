"""Features (batch, channels, time), images beside a text, names: what was assumed is said."""

import pytest
import torch
from torch.nn import functional

import sparse_attn as sa

MEL, TIME = 40, 128


class Heard(torch.nn.Module):
    """Attends along the last dimension, as speech models do after their convolution."""

    def __init__(self, dims=MEL):
        super().__init__()
        self.inner = torch.nn.Conv1d(dims, 32, 1)

    def forward(self, features):
        x = self.inner(features).mT.contiguous().unflatten(-1, (2, 16)).transpose(1, 2)
        return functional.scaled_dot_product_attention(x, x, x).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("ask", ["profile", "advise"])
def test_a_dimension_that_is_no_length_is_named_with_what_came(ask, tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSE_ATTN_CACHE", str(tmp_path))
    inputs = {"features": torch.randn(1, MEL, TIME)}
    ours = {"profile": sa.profile, "advise": sa.advise}[ask]
    lengths = None if ask == "profile" else [MEL, 10]
    sentence = (
        rf"^sparse_attn\.{ask}: expected inputs \(batch, length, \.\.\.\), their dimension 1 cut "
        rf"or repeated to 10, got features of shape \(1, {MEL}, {TIME}\); "
        rf"lengths=\[{MEL}\] takes them as they came; Heard refuses that length by RuntimeError: "
        r".*channels"
    )
    with pytest.raises(ValueError, match=sentence) as raised:
        ours(Heard().eval(), inputs, lengths=lengths, patterns=[sa.Band(3)], progress=False)
    assert isinstance(raised.value.__cause__, RuntimeError)
    with pytest.raises(ValueError, match="to 20, got features"):
        sa.profile(Heard().eval(), inputs, [20, 40], patterns=[sa.Band(3)], progress=False)


class Read(torch.nn.Module):
    """Puts the patches of an image at the places of its text that are 0."""

    def __init__(self):
        super().__init__()
        self.words, self.look = torch.nn.Embedding(9, 32), torch.nn.Linear(8, 32)

    def forward(self, ids, patches, grid):
        x = self.words(ids)
        rows, columns = grid[0].tolist()
        x[ids == 0] = self.look(patches.view(rows * columns, 8))
        x = x.unflatten(-1, (2, 16)).transpose(1, 2)
        return functional.scaled_dot_product_attention(x, x, x).transpose(1, 2).flatten(2)


@pytest.fixture
def image_and_text():
    ids = torch.randint(1, 9, (1, 64))
    ids[0, :6] = 0
    return {"ids": ids, "patches": torch.randn(6, 8), "grid": torch.tensor([[2, 3]])}


def test_images_beside_a_text_are_measured_as_they_came(image_and_text, tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSE_ATTN_CACHE", str(tmp_path))
    patterns = {"patterns": [sa.Band(3)], "progress": False}
    (row,) = sa.profile(Read().eval(), image_and_text, [64], **patterns).rows
    assert row.length == 64
    shorter = {**image_and_text, "ids": image_and_text["ids"][:, :40]}
    for texts in (image_and_text, [image_and_text, shorter]):
        assert list(sa.advise(Read().eval(), texts, 0.5, **patterns).times) == [64]


def test_a_text_that_an_image_does_not_fit_is_named(image_and_text):
    sentence = (
        r"^sparse_attn\.profile: expected inputs whose text can be cut or repeated to 128 "
        r"positions, got ids of shape \(1, 64\) beside patches of shape \(6, 8\), grid of shape "
        r"\(1, 2\); lengths=\[64\] takes them as they came; Read refuses that length by Runtime"
    )
    with pytest.raises(ValueError, match=sentence):
        sa.profile(Read().eval(), image_and_text, [64, 128], patterns=[sa.Band(3)], progress=False)


class Masked(torch.nn.Module):
    """Attends under a mask of every pair."""

    def forward(self, x, attention_mask):
        x = x.unflatten(-1, (2, 16)).transpose(1, 2)
        out = functional.scaled_dot_product_attention(x, x, x, attention_mask)
        return out.transpose(1, 2).flatten(2)


def test_a_mask_of_pairs_is_cut_with_its_text(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSE_ATTN_CACHE", str(tmp_path))
    inputs = {"x": torch.randn(1, 64, 32), "attention_mask": torch.ones(1, 1, 64, 64).tril() > 0}
    found = sa.profile(Masked().eval(), inputs, patterns=[sa.Band(3)], progress=False)
    assert [row.length for row in found.rows] == [16, 32, 64]
    with pytest.raises(
        ValueError, match="lengths of at most 64 beside attention_mask, a mask of pairs, got 128$"
    ):
        sa.profile(Masked().eval(), inputs, [128], patterns=[sa.Band(3)], progress=False)


def test_a_mask_of_pairs_without_a_batch_is_cut_with_its_text(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSE_ATTN_CACHE", str(tmp_path))
    layer = torch.nn.TransformerEncoderLayer(32, 2, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    inputs = {"src": torch.randn(2, 64, 32), "mask": torch.ones(64, 64).triu(1) > 0}
    inputs["src_key_padding_mask"] = torch.zeros(2, 64).bool()
    found = sa.profile(model, inputs, [32, 64], patterns=[sa.Band(3)], progress=False)
    assert [row.length for row in found.rows] == [32, 64]


def test_a_mask_of_keys_goes_along_with_its_text(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSE_ATTN_CACHE", str(tmp_path))
    inputs = {"x": torch.randn(2, 64, 32), "attention_mask": torch.ones(2, 1, 1, 64) > 0}
    found = sa.profile(Masked().eval(), inputs, [32, 128], patterns=[sa.Band(3)], progress=False)
    assert [row.length for row in found.rows] == [32, 128]


MASKS = {
    "of keys": lambda seen: seen[:, None, None],
    "added": lambda seen: torch.zeros(2, 1, 1, 64).masked_fill(~seen[:, None, None], -torch.inf),
    "of pairs": lambda seen: torch.ones(64, 64).tril().bool() & seen[:, None, None],
}


@pytest.mark.parametrize("kind", MASKS)
def test_positions_that_a_mask_of_four_dimensions_pads_do_not_count(kind):
    seen = torch.arange(64) < torch.tensor([64, 40])[:, None]
    inputs = {"x": torch.randn(2, 64, 32), "attention_mask": MASKS[kind](seen)}
    policies = {"band": sa.Band(3)}
    found = sa.quality.model(Masked().eval(), inputs, policies, timed=False, progress=False)
    assert found.positions == 104


def test_inputs_that_the_model_refuses_as_they_came_keep_its_words():
    inputs = {"features": torch.randn(1, MEL, TIME)}
    sentence = rf"expected inputs that the model takes \(features of shape \(1, {MEL}, {TIME}\)\)"
    with pytest.raises(ValueError, match=sentence):
        sa.profile(Heard(7).eval(), inputs, progress=False)


def test_what_a_layer_refuses_at_another_length_keeps_its_words(on_device):
    from tiny_models import CONFIGS, build

    inputs = {"inputs_embeds": torch.randn(1, 32, 64, dtype=torch.float64)}
    with pytest.raises(ValueError, match=r"got float64; .* model\.float\(\)$"):
        sa.profile(build(CONFIGS["bert"]()).double(), inputs, [16], progress=False)


class Words(torch.nn.Module):
    """Takes ids where its class says."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(9, 32)

    def read(self, ids):
        x = self.words(ids).unflatten(-1, (2, 16)).transpose(1, 2)
        return functional.scaled_dot_product_attention(x, x, x).transpose(1, 2).flatten(2)


class Second(Words):
    def forward(self, pixel_values=None, input_ids=None):
        assert pixel_values is None
        return self.read(input_ids)


class Named(Words):
    def forward(self, **inputs):
        return self.read(inputs["input_ids"])


class First(Words):
    def forward(self, tokens, **more):
        assert not more
        return self.read(tokens)


@pytest.mark.parametrize("kind", [Second, Named, First])
def test_ids_go_where_the_model_takes_them(kind):
    ids = torch.randint(0, 9, (1, 12))
    for inputs in (ids, {"input_ids": ids}):
        policies = {"all": sa.Full()}
        found = sa.quality.model(kind().eval(), inputs, policies, timed=False, progress=False)
        assert found["all"].cosine > 0.999
