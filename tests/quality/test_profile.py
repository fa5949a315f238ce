"""`profile`: attention's share of the time, and where patterns begin to pay on a device."""

import re
import statistics

import pytest
import torch

import sparse_attn as sa
from sparse_attn.advisor._profile import _error
from sparse_attn.advisor._profiled import AtLength

PATTERNS = {
    "narrow": sa.Band((3, 0), sinks=1),
    "wide": sa.Band((31, 0), sinks=4),
    "blocks": sa.BlockTopK(16, budget_blocks=2, local_blocks=1),
}


def test_profile_measures_and_leaves_the_model(llama, ids):
    from tiny_models import output

    before = output(llama, input_ids=ids)
    measured = sa.profile(llama, ids, [64, 128], patterns=PATTERNS, progress=False)
    assert torch.equal(output(llama, input_ids=ids), before)
    assert [row.length for row in measured.rows] == [64, 128]
    for row in measured.rows:
        assert 0 <= row.share < 1 and sorted(row.layers) == [0, 1]
        assert set(row.patterns) == set(PATTERNS) and min(row.patterns.values()) > 0
    assert "positions our dense attention takes" in str(measured)
    assert measured._repr_html_().startswith("<pre>length")
    usual = sa.profile(llama, ids, progress=False)
    assert [row.length for row in usual.rows] == [64, 128, 256] and str(usual)
    assert len({tuple(row.patterns) for row in usual.rows}) == 1


def test_profile_takes_policies_too(llama, ids):
    policy = sa.Policy(sa.Band((7, 0)), heads={1: {0: sa.Full()}}, num_layers=2)
    measured = sa.profile(llama, ids, [64], patterns=policy, progress=False)
    assert list(measured.rows[0].patterns) == ["policy"] and measured.pays_from == {}
    both = sa.profile(llama, ids, [64], patterns=[policy, policy], progress=False)
    assert list(both.rows[0].patterns) == ["policy", "policy (2)"]
    other = sa.Policy(sa.Full(), num_layers=3)
    with pytest.raises(ValueError, match="a policy for LlamaForCausalLM's 2 layers, got"):
        sa.profile(llama, ids, [64], patterns=[other], progress=False)


def test_an_encoder_is_profiled_in_calls_that_look_ahead(on_device, ids, tmp_path, monkeypatch):
    from tiny_models import CONFIGS, build

    from sparse_attn.advisor import _crossover

    kinds = []
    monkeypatch.setenv("SPARSE_ATTN_CACHE", str(tmp_path))

    def seconds(tensors, pattern, is_causal):
        kinds.append(is_causal)
        return 1.0 if pattern == sa.Full() else 0.5

    monkeypatch.setattr(_crossover, "seconds_of_call", seconds)
    measured = sa.profile(build(CONFIGS["bert"](), "sdpa"), ids[:, :64], [64], progress=False)
    assert not measured.is_causal and set(kinds) == {False}
    name = "band 8 + 8, 4 sinks, 1 global"
    assert f"{name} alone, not causal, on this device" in measured.summary()
    assert "strided" not in measured.rows[0].patterns
    kinds.clear()
    measured = sa.profile(build(CONFIGS["llama"](), "sdpa"), ids[:, :64], [64], progress=False)
    assert measured.is_causal and set(kinds) == {True}


@pytest.mark.parametrize("padded", [slice(0, 9), slice(-9, None), slice(20, 29)], ids=str)
@pytest.mark.parametrize(("name", "is_causal"), [("llama", True), ("bert", False)])
def test_padding_hides_no_causality(ids, name, is_causal, padded):
    from tiny_models import CONFIGS, build

    from sparse_attn.advisor._first_call import first_call

    model = build(CONFIGS[name](), "sdpa")
    texts = ids[:, :64].repeat(2, 1)
    call = {"input_ids": texts, "attention_mask": torch.ones_like(texts)}
    call["attention_mask"][1, padded] = 0
    assert first_call("advise", model, call).is_causal == is_causal


@pytest.mark.parametrize(
    ("inputs", "lengths", "sentence"),
    [
        ({"name": "text"}, None, r"inputs with a tensor \(B, S, ...\), got name"),
        (torch.ones(1, 8), [], "at least one of lengths, got none"),
        (torch.ones(1, 8), [0], "lengths of at least 1, got 0"),
        (torch.ones(1, 8), 3, "lengths to be a list of ints, got int"),
    ],
)
def test_profile_refuses_what_it_cannot_measure(llama, inputs, lengths, sentence):
    with pytest.raises((TypeError, ValueError), match=rf"^sparse_attn\.profile: .*{sentence}"):
        sa.profile(llama, inputs, lengths, progress=False)


def test_models_that_refuse_the_inputs_are_named():
    sentence = r"inputs that the model takes \(input_ids of shape \(1, 8\)\), got RuntimeError of"
    for judge in (sa.profile, lambda model, ids: sa.quality.model(model, ids, sa.Full())):
        with pytest.raises(ValueError, match=rf"^sparse_attn\.[a-z.]+: expected {sentence} Linear"):
            judge(torch.nn.Linear(3, 3), torch.zeros(1, 8))


def test_whatever_a_model_raises_is_named():
    """A container without a forward, and a forward that asserts."""

    class Asserts(torch.nn.Module):
        def forward(self, x):
            assert x.shape[-1] == 32, "of 32 features"

    parts = torch.nn.ModuleList([torch.nn.Linear(3, 3)])
    for model, kind in ((Asserts(), "AssertionError"), (parts, "NotImplementedError")):
        with pytest.raises(ValueError, match=rf"inputs that the model takes .* got {kind} of"):
            sa.profile(model, torch.zeros(1, 8, 16))


class Embedder(torch.nn.Sequential):
    """Takes features, as a SentenceTransformer does."""

    def __init__(self, model):
        super().__init__(torch.nn.ModuleDict({"auto_model": model}))

    def forward(self, features):
        return self[0]["auto_model"](**features)


def test_what_a_model_cannot_take_is_said(on_device):
    from tiny_models import CONFIGS, build

    bert = build(CONFIGS["bert"](), "sdpa")
    holder = Embedder(bert)
    for judge in (sa.profile, lambda model, ids: sa.quality.model(model, ids, sa.Band(7))):
        with pytest.raises(ValueError, match="at most 128 positions, as many as Bert"):
            judge(bert, torch.ones(1, 1024).long())
        with pytest.raises(ValueError, match=r"holds one: .*get_submodule\('0.auto_model'\)$"):
            judge(holder, torch.ones(1, 64).long())


def test_profile_says_when_it_is_not_worth_it():
    def row(length, without, dense, band):
        return AtLength(length, 1.0, without, {0: dense}, {"band": band}, None)

    small = sa.Profile((row(64, 0.96, 0.04, 0.05),), "Model")
    assert "not worth it" in str(small) and small.crossover("band") is None
    rows = (row(64, 0.9, 1.0, 2.0), row(128, 0.8, 4.0, 3.0), row(256, 0.5, 16.0, 5.0))
    large = sa.Profile(rows, "Model")
    assert large.crossover("band") == 128
    with pytest.raises(ValueError, match=r"crossover: expected name to be one of band, got 'bnd'"):
        large.crossover("bnd")
    assert "more than 2.00 times" in str(large) and "not worth it" not in str(large)
    faster = sa.Profile((row(64, 0.96, 0.05, 0.04),), "Model")
    assert "not worth it at these lengths, even where it is faster than dense." in str(faster)
    said = "band: faster than dense attention from 64 positions on, 1.25 times as fast at 64."
    assert said in str(faster)
    assert "from 128 positions on, 3.20 times as fast at 256." in str(large)


def test_times_of_a_column_have_the_same_decimals():
    rows = [
        AtLength(64, 0.0123, 0.01, {0: 0.1}, {"band": 1234.5}, None),
        AtLength(128, 1.0, 0.5, {0: 12.0}, {"band": 2000.0}, None),
    ]
    lines = [line.split() for line in sa.Profile(tuple(rows), "Model").table().splitlines()[1:]]
    assert [[line[1], *line[5:]] for line in lines] == [
        ["0.0123", "0.100", "1234"],
        ["1.0000", "12.000", "2000"],
    ]


@pytest.mark.parametrize(
    ("share", "noise", "says"),
    [
        (
            0.01,
            0.02,
            r"takes 1% .*, which is within the noise .* \(2%\): .* 1.05 times .*not worth",
        ),
        (0.10, 0.20, r"takes 10% .* noise of the measurement \(20%\): measure longer texts"),
        (0.00, 0.001, r"takes 0% .* noise .* \(1%\): .* 1.00 times .*not worth"),
        (0.50, 0.20, r"takes 50% of the forward: no pattern.* 2.00 times as fast\.$"),
    ],
    ids=["small", "not known", "none", "clear"],
)
def test_profile_says_when_the_share_is_noise(share, noise, says):
    row = AtLength(300, 1.0, 1 - share, {0: 0.2}, {}, None, noise)
    measured = sa.Profile((row,), "Model")
    assert f"{share:.0%} ± {max(noise, 0.01):.0%}" in measured.table()
    assert re.search(says, measured.summary().replace("\n", " "))
    assert ("not worth" in says) == ("not worth" in measured.summary())


@pytest.mark.parametrize("rounds", [3, 4, 5, 8, 9, 20, 49])
def test_two_errors_hold_nine_of_ten_medians(rounds):
    draws = torch.randn(4000, rounds, generator=torch.Generator().manual_seed(0)).tolist()
    held = [abs(statistics.median(one)) <= 2 * _error(one) for one in draws]
    assert 0.9 < statistics.mean(held) < 0.98


def test_a_machine_that_slows_down_does_not_change_the_share(monkeypatch):
    """Attention takes a fifth of each forward, one of which stalls."""
    from sparse_attn import _observe
    from sparse_attn.advisor import _times

    now, forwards = [0.0], [0]

    class Attend(torch.nn.Module):
        def forward(self, x):
            forwards[0] += 1
            stalls = 10.0 if forwards[0] == 6 else 0.0
            share = 0.8 if _observe._substitutes else 1.0
            now[0] += share * 1.05 ** forwards[0] + stalls
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    monkeypatch.setattr(_times, "stopwatch", lambda: now[0])
    inputs = {"x": torch.randn(1, 2, 64, 16)}
    (row,) = sa.profile(Attend(), inputs, patterns=sa.Band(3), progress=False).rows
    assert row.share == pytest.approx(0.2, abs=0.05) and not row.within_noise


def test_every_call_of_a_shared_layer_counts(monkeypatch):
    """As in ALBERT: one module, called three times."""
    from sparse_attn.advisor import _profile

    class Shared(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(32, 2, batch_first=True)

        def forward(self, x):
            for _ in range(3):
                x = self.attention(x, x, x, need_weights=False)[0]
            return x

    monkeypatch.setattr(_profile, "in_turns", lambda calls, seconds: [[1.0] * 3 for _ in calls])
    inputs = {"x": torch.randn(1, 8, 32)}
    (row,) = sa.profile(Shared(), inputs, [8], patterns=sa.Band(3), progress=False).rows
    assert row.layers == {0: 3.0} and list(row.patterns.values()) == [3.0]


def test_cross_attention_is_no_layer():
    layer = torch.nn.TransformerDecoderLayer(32, 2, 32, batch_first=True)
    model = torch.nn.TransformerDecoder(layer, 2).eval()
    inputs = {"tgt": torch.randn(1, 64, 32), "memory": torch.randn(1, 64, 32)}
    (row,) = sa.profile(model, inputs, [64], patterns=sa.Band(3), progress=False).rows
    assert sorted(row.layers) == [0, 1]
    band = sa.quality.model(model, inputs, {"band": sa.Band(3)}, timed=False, progress=False)
    assert band["band"].pairs == pytest.approx((64 * 7 - 12) / 64**2)
    inputs = [inputs, {name: tensor.flip(1) for name, tensor in inputs.items()}]
    advice = sa.advise(model, inputs, 0.8, patterns=[sa.Band(20)], progress=False)
    assert advice.policy.num_layers == 2


@pytest.mark.parametrize("lengths", [None, [96], [48, 96]], ids=str)
def test_a_model_of_length_and_batch_is_refused(lengths):
    """What torch's modules take unless told otherwise: the batch would be cut and repeated."""
    layer = torch.nn.TransformerEncoderLayer(32, 2, 32)
    model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    inputs = {"src": torch.randn(96, 2, 32)}
    what = r": expected a model of inputs \(batch, length, ...\), got TransformerEncoder that takes"
    what += r" \(length, .* made with batch_first=True$"
    with pytest.raises(ValueError, match=f"^sparse_attn.profile{what}"):
        sa.profile(model, inputs, lengths, patterns=sa.Band(3), progress=False)
    with pytest.raises(ValueError, match=f"^sparse_attn.advise{what}"):
        sa.advise(model, [inputs, inputs], patterns=[sa.Band(3)], lengths=lengths, progress=False)


class Patches(torch.nn.Module):
    """An encoder of images: 16 patches, and a token before them."""

    def __init__(self):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(32, 2, 32, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.patches = torch.nn.Conv2d(3, 32, 4, 4)

    def forward(self, pixels):
        tokens = self.patches(pixels).flatten(2).mT
        return self.encoder(torch.nn.functional.pad(tokens, (0, 0, 1, 0)))


def test_images_have_the_length_that_attention_sees():
    model, images = Patches().eval(), [{"pixels": torch.randn(2, 3, 16, 16)} for _ in range(2)]
    band = [sa.Band(3)]
    measured = sa.profile(model, images[0], patterns=band, progress=False)
    assert [row.length for row in measured.rows] == [17]
    advice = sa.advise(model, images, 0.5, patterns=band, progress=False)
    assert advice.length == 17 and list(advice.times) == [17]
    what = r"expected lengths of \[17\], the positions of inputs that are not cut, got \[8\]$"
    with pytest.raises(ValueError, match=f"profile: {what}"):
        sa.profile(model, images[0], [8], patterns=band, progress=False)
    with pytest.raises(ValueError, match=f"advise: {what}"):
        sa.advise(model, images, lengths=[8], patterns=band, progress=False)


def test_crossovers_are_measured_once_for_a_device(tmp_path, monkeypatch):
    from sparse_attn.advisor import _crossover
    from sparse_attn.advisor._device_figures import cache_file

    monkeypatch.setenv("SPARSE_ATTN_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr(_crossover, "LAST", {"cpu": 1024})
    lengths = []

    def seconds(tensors, pattern, is_causal):
        lengths.append(tensors[0].shape[2])
        slow = pattern == sa.Band(20) or (pattern == sa.Band(9) and lengths[-1] < 256)
        return 1.0 if pattern == sa.Full() else 2.0 if slow else 0.5

    monkeypatch.setattr(_crossover, "seconds_of_call", seconds)
    query, key = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 1, 16)
    assert _crossover.crossover(sa.Band(9), query, key) == 256
    assert lengths == [128, 128, 256, 256, 512, 512]
    assert _crossover.crossover(sa.Band(20), query, key) is None
    measured = len(lengths)
    assert _crossover.crossover(sa.Band(9), query, key) == 256
    assert _crossover.crossover(sa.Band(20), query, key) is None
    assert len(lengths) == measured
    _crossover.crossover(sa.Band(9), query, query)  # other heads
    cache_file().write_text("{")
    assert len(lengths) > measured
    assert _crossover.crossover(sa.Band(9), query, key) == 256
    monkeypatch.setenv("SPARSE_ATTN_CACHE", "/proc/nowhere")
    assert _crossover.crossover(sa.Band(9), query, key) == 256
    layout = sa.BlockLayout.local(64, 64, 16, 16, 0)
    for pattern in (sa.BlockTopK(), sa.TopK(4, inside=layout), sa.BlockSparse(layout)):
        with pytest.raises(NotImplementedError, match="not served: .* without its data"):
            _crossover.crossover(pattern, query, key)


def test_an_empty_cache_folder_is_none_given(tmp_path, monkeypatch):
    from sparse_attn.advisor._device_figures import cache_file

    monkeypatch.setenv("SPARSE_ATTN_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_file() == tmp_path / "sparse_attn" / "crossovers.json"
