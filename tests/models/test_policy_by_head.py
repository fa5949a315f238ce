"""Policies by layer and key head: what runs where, in plain modules, torch's and transformers'."""

import re

import pytest
import torch

import sparse_attn as sa

BAND, OTHER = sa.Band((3, 0), sinks=1), sa.Strided(4, 4)


def test_the_first_match_counts():
    policy = sa.Policy(
        BAND,
        heads={1: {0: sa.Full()}, 2: {1: OTHER}, 3: {0: OTHER}},
        layers={2: sa.TopK(4), 4: sa.TopK(5)},
        dense_layers=[3, 4, 5],
        decode=sa.TopK(6),
        dense_below=16,
    )
    dense = sa.Band((None, 0), sinks=1)
    for length, queries, rest in ((64, 64, BAND), (64, 1, sa.TopK(6)), (8, 8, dense)):
        assert policy.choose(0, queries, length) == rest
        assert policy.choose(1, queries, length) == sa.ByHead({0: sa.Full()}, rest)
    assert policy.choose(2, 64, 64) == sa.ByHead({1: OTHER}, sa.TopK(4))
    assert policy.choose(2, 1, 64) == sa.ByHead({1: OTHER}, sa.TopK(4))
    assert policy.choose(3, 64, 64) == sa.ByHead({0: OTHER}, dense)
    assert policy.choose(3, 8, 8) == sa.ByHead({0: sa.Band((None, 0))}, dense)
    assert policy.choose(4, 64, 64) == policy.choose(4, 1, 64) == sa.TopK(5)
    assert policy.choose(4, 8, 8) == sa.Full()
    assert policy.choose(5, 64, 64) == policy.choose(5, 1, 64) == dense


def test_patterns_lists_those_of_layers_and_heads():
    policy = sa.Policy(BAND, layers={2: sa.TopK(4)}, heads={1: {0: OTHER}})
    assert sa.TopK(4) in policy.patterns()
    assert sa.ByHead({0: OTHER}, BAND) in policy.patterns()


def test_table_names_heads():
    policy = sa.Policy(
        sa.TopK(4), heads={1: {0: sa.Full(), 2: sa.Full(), 1: sa.TopK(9)}}, num_layers=3
    )
    assert [line.split() for line in str(policy).splitlines()] == [
        ["layers", "heads", "pattern", "decode"],
        ["0", "all", "TopK(k=4)", "TopK(k=4)"],
        ["1", "0,", "2", "Full()", "Full()"],
        ["1", "1", "TopK(k=9)", "TopK(k=9)"],
        ["1", "others", "TopK(k=4)", "TopK(k=4)"],
        ["2", "all", "TopK(k=4)", "TopK(k=4)"],
    ]


def test_a_plain_module_runs_what_choose_returns(device):
    query, key, value = torch.randn(3, 2, 4, 40, 16, device=device)
    policy = sa.Policy(BAND, heads={0: {1: OTHER}}, dense_below=0)
    out = sa.sparse_attention(query, key, value, policy.choose(0, 40, 40), is_causal=True)
    for head in range(4):
        own = slice(head, head + 1)
        alone = sa.sparse_attention(
            query[:, own], key[:, own], value[:, own], OTHER if head == 1 else BAND, is_causal=True
        )
        assert torch.equal(out[:, own], alone)


def test_swapped_modules_have_patterns_by_head(device):
    """Equal to torch's module under the mask of each head."""
    dense = torch.nn.MultiheadAttention(64, 4, batch_first=True, device=device).eval()
    model = torch.nn.Sequential(dense)
    tokens = torch.randn(2, 40, 64, device=device)
    hidden = torch.stack([~p.mask(40, 40) for p in (BAND, OTHER, BAND, sa.Band((None, 0)))])
    with torch.no_grad():
        want, _ = dense(
            tokens, tokens, tokens, attn_mask=hidden.to(device).repeat(2, 1, 1), need_weights=False
        )
        policy = sa.Policy(
            BAND, heads={0: {1: OTHER, 3: sa.Full()}}, dense_below=0, num_layers=1, num_key_heads=4
        )
        twin = sa.swap_attention(model, policy)[0]
        got, _ = twin(tokens, tokens, tokens, need_weights=False, is_causal=True)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="3 key heads, got num_key_heads=4"):
        sa.swap_attention(torch.nn.Sequential(torch.nn.MultiheadAttention(48, 3)), policy)


@pytest.mark.parametrize("padding", ["none", "left", "right", "holes"])
def test_models_have_patterns_by_head(padding, on_device):
    """Equal to the model's own attention under the dense mask of each head."""
    pytest.importorskip("transformers")
    from tiny_models import CONFIGS, assert_same, build, output, text

    eager, ours = build(CONFIGS["llama"]()), build(CONFIGS["llama"]())
    policy = sa.Policy(
        sa.Band((3, 0)), heads={1: {0: sa.Band((6, 0))}}, dense_below=0, num_key_heads=2
    )
    sa.integrations.transformers.apply(ours, policy)
    ids, mask = text(padding)
    wide, narrow = (sa.Band((side, 0)).mask(24, 24) for side in (6, 3))
    allowed = torch.stack([wide, wide, narrow, narrow])[None] & mask[:, None, None].bool()
    additive = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)

    def second_layer_by_head(module, arguments, keywords):
        return arguments, {**keywords, "attention_mask": additive}

    layer = eager.model.layers[1].self_attn
    layer.register_forward_pre_hook(second_layer_by_head, with_kwargs=True)
    first = torch.where(narrow & mask[:, None, None].bool(), 0.0, torch.finfo(torch.float32).min)
    positions = torch.arange(24).expand(2, -1)
    inputs = dict(input_ids=ids, position_ids=positions)
    got = output(ours, **inputs, attention_mask=mask)
    assert_same(got, output(eager, **inputs, attention_mask=first), mask)


BEYOND = {
    "bare": sa.ByHead({2: sa.Full()}, BAND),
    "layers": sa.Policy(BAND, layers={1: sa.ByHead({2: sa.Full()})}),
    "decode": sa.Policy(BAND, decode=sa.ByHead({2: sa.Full()}, BAND)),
    "heads": sa.Policy(BAND, heads={1: {2: sa.Full()}}),
}


@pytest.mark.parametrize("policy", BEYOND.values(), ids=BEYOND)
def test_heads_that_a_model_has_not_are_refused_at_once(policy):
    """A model of 4 query heads and 2 key heads, and one of 2 of both."""
    pytest.importorskip("transformers")
    from tiny_models import CONFIGS, build

    apply, model = sa.integrations.transformers.apply, build(CONFIGS["llama"]())
    sentence = r"^sparse_attn\.Policy: expected heads below {}'s 2 key heads, got 2$"
    with pytest.raises(ValueError, match=sentence.format("LlamaForCausalLM")):
        apply(model, policy)
    assert model.config._attn_implementation == "eager"
    layer = torch.nn.TransformerEncoderLayer(32, 2, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    with pytest.raises(ValueError, match=sentence.format("TransformerEncoder")):
        sa.swap_attention(encoder, policy)


def test_a_model_that_does_not_say_its_heads_refuses_them_in_its_first_call():
    pytest.importorskip("transformers")
    from tiny_models import CONFIGS, build, output, text

    model = build(CONFIGS["llama"]())
    vars(model.config)["num_key_value_heads"] = [2, 2]  # of each stage, as some models have it
    sa.integrations.transformers.apply(model, BEYOND["bare"])
    sentence = r"layer 0 .*sparse_attn\.ByHead: expected patterns for the call's 2 key heads"
    with pytest.raises(ValueError, match=sentence):
        output(model, input_ids=text()[0])


def test_generation_by_head(on_device):
    """Prefill and decode stand where they are: chunks equal the whole."""
    transformers = pytest.importorskip("transformers")
    from tiny_models import CONFIGS, assert_same, build, output, text

    policy = sa.Policy(BAND, heads={0: {1: sa.Full()}, 1: {0: sa.TopK(3)}}, dense_below=0)
    ours = sa.integrations.transformers.apply(build(CONFIGS["llama"]()), policy)
    ids, mask = text("none")
    past = transformers.DynamicCache()
    parts = [
        output(ours, input_ids=ids[:, begin:end], past_key_values=past)
        for begin, end in ((0, 10), (10, 23), (23, 24))
    ]
    assert_same(torch.cat(parts, 1), output(ours, input_ids=ids), mask)


def test_a_saved_policy_is_the_same(tmp_path):
    policy = sa.Policy(
        sa.Band((7, 0), sinks=4),
        dense_layers=[7],
        decode=sa.Full(),
        num_layers=8,
        num_key_heads=3,
        layers={3: sa.Dilated((5, 0), 2), 4: sa.BlockTopK()},
        heads={5: {0: sa.Full(), 2: sa.Strided(8, 8)}, 6: {1: sa.Band(3, global_tokens=2)}},
    )
    policy.save(tmp_path / "policy.json", about={"model": "mine"})
    loaded = sa.Policy.load(tmp_path / "policy.json")
    assert loaded == policy and repr(loaded) == repr(policy)
    sa.Policy(sa.Band(7), dense_below=5).save(tmp_path / "below.json")
    assert sa.Policy.load(str(tmp_path / "below.json")).dense_below == 5
    scattered = sa.Policy(sa.Band(7, global_tokens=torch.tensor([3, 9])))
    scattered.save(tmp_path / "scattered.json")
    loaded = sa.Policy.load(tmp_path / "scattered.json").pattern
    assert torch.equal(loaded.global_tokens, torch.tensor([3, 9]))
    narrow = sa.Policy(sa.Band(7, global_tokens=torch.tensor([3, 9], dtype=torch.int32)))
    narrow.save(tmp_path / "narrow.json")
    assert sa.Policy.load(tmp_path / "narrow.json") == narrow != scattered
    text = (tmp_path / "scattered.json").read_text()
    (tmp_path / "earlier.json").write_text(re.sub(r',\s*"dtype": "int64"', "", text))
    assert "dtype" not in (tmp_path / "earlier.json").read_text()
    assert sa.Policy.load(tmp_path / "earlier.json") == scattered


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("policy", r"expected a policy file \(JSON\), got"),
        ("[1]", "expected a policy file with its version, got"),
        ('{"pattern": {"kind": "Full"}}', "expected a policy file with its version, got"),
        ('{"version": 99}', "expected a policy file of version 1, got version 99"),
        ('{"format": "recipe", "version": 1}', "expected a policy file with its version"),
        ('{"version": 1}', "got .* without a pattern"),
        ('{"version": 1, "pattern": {"kind": "Full"}, "colour": 1}', "got .* with colour"),
        ('{"version": 1, "pattern": {"kind": "Star"}}', "expected patterns among .*, got 'Star'"),
        ('{"version": 1, "pattern": 3}', "expected a pattern with its kind, got 3"),
        ('{"version": 1, "pattern": {"kind": "TopK", "k": 0}}', "expected a pattern TopK, got"),
        ('{"version": 1, "pattern": {"kind": "TopK", "q": 0}}', "expected fields of TopK, got q"),
        ('{"version": 1, "pattern": {"kind": "Full"}, "heads": 3}', "entries by number, got 3"),
        ('{"version": 1, "pattern": {"kind": "Full"}, "layers": {"x": 1}}', "or head, got 'x'"),
        ('{"version": "1", "pattern": {"kind": "Full"}}', "of version 1, got version '1'"),
        ('{"version": 1, "pattern": null}', "got .* without a pattern"),
        (
            '{"version": 1, "pattern": {"kind": "Band", "global_tokens": {"positions": "x"}}}',
            'expected positions, a list of ints, got "x"',
        ),
        (
            '{"version": 1, "pattern": {"kind": "Band", "global_tokens": {"positions": [1.5]}}}',
            r"expected positions, a list of ints, got \[1.5\]",
        ),
        (
            '{"version": 1, "pattern": {"kind": "Band", "global_tokens": '
            '{"positions": [18446744073709551616]}}}',
            "expected positions, a list of ints, got .18446744073709551616.",
        ),
        (
            '{"version": 1, "pattern": {"kind": "Band", "global_tokens": '
            '{"positions": [1], "dtype": "load"}}}',
            'expected positions of dtype int32 or int64, got "load"',
        ),
        ("[" * 100_000, r"expected a policy file \(JSON\), got"),
    ],
)
def test_wrong_files_are_refused_in_a_sentence(tmp_path, text, sentence):
    path = tmp_path / "policy.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"^sparse_attn\.Policy\.load: .*{sentence}") as error:
        sa.Policy.load(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("about", "error", "sentence"),
    [
        (3, TypeError, "expected about to be a mapping, got int"),
        ({"text": torch.ones(1)}, ValueError, r"about that JSON can hold, got one .*Tensor.*\)"),
        ({(1, 2): 3}, ValueError, r"about that JSON can hold, got one .*tuple.*\)"),
    ],
    ids=["number", "tensor", "key"],
)
def test_an_about_that_no_file_holds_is_refused(tmp_path, about, error, sentence):
    with pytest.raises(error, match=rf"^sparse_attn\.Policy\.save: .*{sentence}$"):
        sa.Policy(BAND).save(tmp_path / "policy.json", about=about)
    assert not (tmp_path / "policy.json").exists()


def test_numbers_of_numpy_are_saved(tmp_path):
    numpy = pytest.importorskip("numpy")
    number = numpy.int64(2)
    options = dict(num_layers=number, num_key_heads=number, dense_below=number)
    blocks = sa.BlockTopK((16 * number, 32), numpy.float32(0.5), budget_blocks=number)
    heads = {number - 1: {number - 2: sa.TopK(number), number - 1: blocks}}
    policy = sa.Policy(sa.Band(number), heads=heads, **options)
    policy.save(tmp_path / "policy.json")
    assert sa.Policy.load(tmp_path / "policy.json") == policy


def test_a_missing_file_and_data_in_a_policy_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^sparse_attn\.Policy\.load: expected a policy"):
        sa.Policy.load(tmp_path / "none.json")
    layout = sa.BlockSparse(sa.BlockLayout.local(64, 64, 16, 16, (1, 0)))
    with pytest.raises(ValueError, match=r"^sparse_attn\.Policy\.save: .*got BlockSparse"):
        sa.Policy(layout).save(tmp_path / "policy.json")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: sa.Policy(BAND, layers=3), "layers to be a mapping"),
        (lambda: sa.Policy(BAND, layers={-1: BAND}), "layer.s number of at least 0"),
        (lambda: sa.Policy(BAND, layers={1: 3}), r"layers\[1\] to be a pattern"),
        (lambda: sa.Policy(BAND, heads={1: BAND}), r"heads\[1\] to be a mapping"),
        (lambda: sa.Policy(BAND, heads={1: {0: 3}}), "pattern to be a pattern"),
        (lambda: sa.Policy(BAND, layers={4: BAND}, num_layers=4), "layers below .* 4 layers"),
        (lambda: sa.Policy(BAND, heads={4: {0: BAND}}, num_layers=4), "heads below .* 4 layers"),
        (lambda: sa.Policy(BAND, heads={0: {2: BAND}}, num_key_heads=2), "heads below .* 2 key"),
        (lambda: sa.Policy(sa.ByHead({2: BAND}), num_key_heads=2), "heads below .* 2 key heads"),
        (
            lambda: sa.Policy(BAND, layers={1: sa.ByHead({4: BAND})}).check_model(2, 4),
            "heads below the model's 4 key heads, got 4",
        ),
        (
            lambda: sa.Policy(BAND, decode=sa.ByHead({7: BAND, 3: BAND})).check_model(None, 2),
            "heads below the model's 2 key heads, got 3, 7",
        ),
        (lambda: sa.Policy(BAND, num_key_heads=0), "num_key_heads of at least 1"),
        (lambda: sa.Policy(BAND, num_key_heads=2).check_model(1, 3), "3 key heads, got num_key"),
    ],
)
def test_wrong_arguments_are_refused(make, sentence):
    with pytest.raises((TypeError, ValueError), match=rf"^sparse_attn\.\w+: expected .*{sentence}"):
        make()
