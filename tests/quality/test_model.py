"""quality.model: policies judged by a model's own output, against figures computed plainly."""

import dataclasses

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from tiny_models import CONFIGS, build, output, text

import sparse_attn as sa
from sparse_attn.quality import _figures, _model

BAND = sa.Band((5, 0), sinks=2)
IDS = torch.arange(3, 11)[None]
BARRED = torch.arange(90, 97)


@pytest.fixture
def llama():
    return build(CONFIGS["llama"](), "sdpa")


def judge(model, inputs, policies, **options):
    return sa.quality.model(model, inputs, policies, progress=False, **options)


def under_mask(model, pattern, ids, mask):
    """Logits of the model's own attention under a dense mask, which must not be padded."""
    length = ids.shape[1]
    allowed = pattern.mask(length, length, is_causal=True) & mask[:, None, None].bool()
    additive = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
    return output(model, input_ids=ids, attention_mask=additive)


def test_a_decode_that_whole_texts_do_not_judge_warns(llama, recwarn):
    for policy in (BAND, sa.Policy(BAND, decode=sa.Full()), sa.Policy(BAND, decode=BAND)):
        judge(llama, IDS, policy)
    assert not recwarn
    with pytest.warns(
        UserWarning, match=r"figures of 'all' say .* its decode=Band\(.*5, 0"
    ) as said:
        judge(llama, IDS, {"all": sa.Policy(sa.Full(), decode=BAND)})
    assert said[0].filename == __file__


def test_rounding_makes_no_distance_negative():
    assert _model._row("dense", _figures.Sums(rows=3, judged=3, kl=-1e-9), 1.0, None).kl == 0


def test_figures_are_those_of_the_distributions(on_device, llama):
    ids, mask = text("right", batch=2)
    mask[:, -5:] = 0
    got = judge(llama, dict(input_ids=ids, attention_mask=mask), {"band": BAND})
    rows = slice(0, 19)  # the rest is padding
    dense = output(llama, input_ids=ids, attention_mask=mask)[:, rows].double()
    own = under_mask(llama, BAND, ids, mask)[:, rows].double()
    p, q = dense.log_softmax(-1), own.log_softmax(-1)
    row = got["band"]
    assert row.kl == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-3)
    same = (p.argmax(-1) == q.argmax(-1)).double().flatten()
    assert row.top1 == pytest.approx(same.mean().item())
    pieces = torch.stack([piece.mean() for piece in same.tensor_split(16)])
    assert row.standard_error == pytest.approx(pieces.std().item() / 4)
    for name, logp in (("dense", p), ("band", q)):
        chosen = logp[:, :-1].gather(-1, ids[:, 1:19, None])
        assert got[name].perplexity == pytest.approx((-chosen.mean()).exp().item(), rel=1e-4)
    assert row.rel_l1 == pytest.approx(((own - dense).abs().sum() / dense.abs().sum()).item(), 1e-3)
    assert row.cosine == pytest.approx(torch.cosine_similarity(own, dense, -1).mean().item(), 1e-4)
    assert row.pairs < 1 and got.positions == 2 * 19
    with pytest.raises(KeyError, match=r"expected the name of a row \(dense, band\), got 'bnd'"):
        got["bnd"]
    assert row.seconds > 0


def test_figures_do_not_depend_on_how_many_positions_are_compared_at_once(device, monkeypatch):
    own, dense = torch.randn(2, 2, 12, 97, device=device)
    own[0, 3:5, BARRED], dense[0, 3:5, BARRED] = -torch.inf, -torch.inf  # of few positions alone
    mask = torch.ones(2, 12, device=device)
    mask[:, 10:] = 0
    call = {"input_ids": torch.randint(0, 90, (2, 12), device=device), "attention_mask": mask}

    def figures(of):
        sums = _figures.Sums()
        outputs = (_figures.Output(values, True) for values in (own, dense))
        sums.add(*outputs, {**call, "attention_mask": of}, predicts=True)
        return {name: number for name, number in vars(sums).items() if name != "agreement"}

    whole = figures(mask)
    assert set(figures(torch.zeros_like(mask)).values()) == {0}
    monkeypatch.setitem(_figures._AT_ONCE, device, 3 * 97)
    assert figures(mask) == pytest.approx(whole, rel=1e-6)
    p, q = dense.double().log_softmax(-1)[:, :10], own.double().log_softmax(-1)[:, :10]
    kl = (p.exp() * (p - q)).nan_to_num(0.0).sum()
    assert whole["kl"] == pytest.approx(kl.item(), rel=1e-6) and whole["rows"] == 20


def test_rows_of_zeros_are_like_themselves(device):
    values = torch.randn(1, 6, 8, device=device)
    values[0, :3] = 0
    sums = _figures.Sums()
    output = _figures.Output(values, False)
    sums.add(output, output, {}, predicts=False)
    assert sums.cosine == pytest.approx(6) and sums.rows == 6


def test_dense_policies_change_nothing_and_see_all_pairs(on_device, llama):
    ids, _ = text()
    got = judge(llama, ids, {"full": sa.Full()})
    assert got["full"].pairs == got["dense"].pairs == 1
    assert got["full"].kl < 1e-9 and got["full"].top1 == got["dense"].top1 == 1
    assert got["full"].perplexity == pytest.approx(got["dense"].perplexity, rel=1e-5)


def test_pairs_are_those_of_the_mask(on_device, llama):
    ids, _ = text()
    policy = sa.Policy(BAND, heads={1: {0: sa.Full()}}, dense_below=0)
    got = judge(llama, [ids, ids[:, :12]], {"policy": policy, "band": BAND}, timed=False)
    allowed = visited = 0
    for n in (24, 12):
        band = BAND.mask(n, n, is_causal=True).sum().item()
        allowed += 4 * n * (n + 1) / 2
        visited += 3 * band + n * (n + 1) / 2
        if n == 24:
            assert judge(llama, ids, BAND)[repr(BAND)].pairs == pytest.approx(band / 300)
    assert got["policy"].pairs == pytest.approx(visited / allowed)
    assert got["policy"].seconds is None


def test_the_model_is_left_as_it_was(on_device, llama):
    ids, _ = text()
    llama.train()
    before = output(llama.eval(), input_ids=ids)
    llama.train()
    judge(llama, ids, BAND)
    assert llama.training and llama.config._attn_implementation == "sdpa"
    assert not any("_sparse_attn" in vars(module) for module in llama.modules())
    assert torch.equal(output(llama.eval(), input_ids=ids), before)
    applied = sa.integrations.transformers.apply(llama, BAND)
    narrow = output(applied, input_ids=ids)
    judge(applied, ids, sa.Full())
    assert torch.equal(output(applied, input_ids=ids), narrow)


def test_models_without_tokens_are_judged_by_their_output(on_device):
    encoder = build(CONFIGS["bert"](), "sdpa")
    ids, mask = text("right")
    row = judge(encoder, dict(input_ids=ids, attention_mask=mask), sa.Band(2))[repr(sa.Band(2))]
    assert row.kl is row.top1 is row.perplexity is None
    assert row.rel_l1 > 0 and row.cosine < 1
    few = judge(encoder, ids % encoder.config.hidden_size, sa.Band(2))[repr(sa.Band(2))]
    assert few.kl is few.top1 is few.perplexity is None  # hidden states, wider than every id
    masked = build(CONFIGS["bert"](), "sdpa", transformers.AutoModelForMaskedLM)
    row = judge(masked, ids, sa.Band(2))[repr(sa.Band(2))]
    assert row.kl > 0 and row.perplexity is None


@pytest.mark.parametrize("return_dict", [True, False], ids=["named", "tuples"])
@pytest.mark.parametrize("has_head", [True, False], ids=["head", "no head"])
def test_only_models_with_a_head_have_logits(on_device, has_head, return_dict):
    kind = transformers.AutoModelForCausalLM if has_head else transformers.AutoModel
    model = build(CONFIGS["llama"](), "sdpa", kind)
    ids = text()[0] % model.config.hidden_size  # hidden states are wider than every id
    row = judge(model, dict(input_ids=ids, return_dict=return_dict), BAND, timed=False).rows[1]
    assert (row.kl is not None) == (row.perplexity is not None) == has_head


class Holder(torch.nn.Module):
    """Holds transformers models, of which the first gives the logits."""

    def __init__(self, *held):
        super().__init__()
        self.held = torch.nn.ModuleList(held)

    def forward(self, input_ids):
        return {"hidden": None, "logits": self.held[0](input_ids).logits}


def test_a_dict_is_read_by_its_keys(on_device, llama):
    ids, _ = text()
    named = judge(Holder(llama), dict(input_ids=ids), {"band": BAND}, timed=False)["band"]
    assert named.kl == judge(llama, ids, {"band": BAND}, timed=False)["band"].kl


class Own(torch.nn.Module):
    def forward(self, hidden):
        x = hidden.unflatten(-1, (4, 16)).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x).transpose(1, 2).flatten(2)


def of_torch():
    layer = torch.nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize(("make", "name"), [(Own, "hidden"), (of_torch, "src")])
def test_any_model_is_judged(on_device, make, name):
    model = make().eval()
    inputs = {name: torch.randn(2, 30, 64)}
    with torch.no_grad():
        before = model(**inputs)
    got = judge(model, inputs, {"band": sa.Band(3)})
    assert got["band"].pairs == pytest.approx(sa.Band(3).density(30, 30))
    assert got["band"].rel_l1 > 1e-3
    with torch.no_grad():
        assert torch.equal(model(**inputs), before)


def test_table_and_picture(on_device, llama):
    pytest.importorskip("matplotlib").use("Agg")
    ids, _ = text()
    got = judge(llama, ids, {"narrow": sa.Band((2, 0)), "wide": sa.Band((12, 0))})
    lines = got.table().splitlines()
    assert lines[0].split() == ["policy", "pairs", "perplexity", "top-1", "KL", "cosine", "seconds"]
    assert [line.split()[0] for line in lines[1:]] == ["dense", "narrow", "wide"]
    assert got._repr_html_().startswith("<pre>policy") and "<img " in got._repr_html_()
    axes = got.plot()
    named = {text.get_text() for text in axes.get_legend().get_texts()}
    assert named == {"frontier", "1  narrow", "2  wide"}
    assert [text.get_text() for text in axes.texts] == ["1", "2"]
    assert got.to_dict()["rows"][1]["name"] == "narrow"


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        ([0.0012345, 0.1], ["0.00123", "0.10000"]),
        ([1234.5, 1200.0], ["1234", "1200"]),
        ([0.5, 0.0], ["0.500", "0.000"]),
        ([2.0, None], ["2.00", None]),
    ],
    ids=["milliseconds", "many", "none", "not timed"],
)
def test_seconds_have_the_same_decimals(seconds, told):
    row = sa.quality.PolicyQuality("dense", 1.0, None, None, None, 0.0, 1.0, None)
    rows = [dataclasses.replace(row, seconds=number) for number in seconds]
    lines = sa.quality.ModelQuality(tuple(rows), 8).table().splitlines()[1:]
    want = ["1.0000" if number is None else number for number in told]  # the cosine is last
    assert [line.split()[-1] for line in lines] == want


@pytest.mark.parametrize(
    ("inputs", "policies", "sentence"),
    [
        (torch.ones(1, 8, dtype=torch.long), "band", "policies to be a policy"),
        (torch.ones(1, 8, dtype=torch.long), [3], "policy .* to be one"),
        (
            torch.ones(1, 8).long(),
            [torch.ones(9, 9)],
            r"policy tensor\(\[\[1.* to be one, got Tensor",
        ),
        (torch.ones(1, 8).long(), torch.tensor(3), "policies to be a policy, .* got Tensor$"),
        ("text", BAND, "inputs to be .* got str; a tokenizer makes ids of it"),
        ([[1, 2, 3]], BAND, "inputs to be .* got list of numbers; torch.tensor makes ids of them"),
        ({"input_ids": [[1, 2, 3]]}, BAND, "input_ids to be a tensor, got list; .* return_tensors"),
        (torch.arange(9), BAND, r"inputs of shape \(batch, length\), got .* ids\[None\]"),
        ((IDS, IDS > 3), BAND, "got a mask of 0 and 1; {'input_ids': ids, 'attention_mask': mask}"),
        ([IDS, (IDS > 3).long()], BAND, "ids, each of texts of its own, got a mask of 0 and 1"),
        ([], BAND, "expected inputs, got none"),
        (3, BAND, "inputs to be"),
    ],
)
def test_wrong_arguments_are_refused(on_device, llama, inputs, policies, sentence):
    with pytest.raises(
        (TypeError, ValueError), match=rf"^sparse_attn\.quality\.model: .*{sentence}"
    ):
        judge(llama, inputs, policies)
    with pytest.raises(TypeError, match=r"^sparse_attn\.quality\.model: expected model"):
        judge("model", torch.ones(1, 8), BAND)


def swapped():
    layer = torch.nn.TransformerEncoderLayer(32, 2, 32, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2).eval()


MODELS = {
    "transformers": (
        lambda: build(CONFIGS["llama"](), "sdpa"),
        sa.integrations.transformers.apply,
        lambda: torch.randint(3, 97, (1, 48)),
    ),
    "multi-head": (swapped, sa.swap_attention, lambda: {"src": torch.randn(1, 48, 32)}),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_policy_that_the_model_has_is_set_aside(on_device, kind):
    make, apply, inputs = MODELS[kind]
    model, given = make(), inputs()
    want = judge(model, given, BAND, timed=False).rows[1]
    other = sa.Band((1, 0))
    apply(model, other)
    held = [vars(module) | {} for module in model.modules()]
    assert judge(model, given, BAND, timed=False).rows[1] == want
    assert [vars(module) | {} for module in model.modules()] == held
    assert judge(model, given, other, timed=False).rows[1].cosine < want.cosine


def test_a_policy_of_a_model_that_another_holds_is_set_aside(on_device, llama):
    ids, _ = text()
    inputs = dict(input_ids=ids)
    want = judge(llama, ids, BAND, timed=False).rows[1]
    other = sa.Band((1, 0))
    sa.integrations.transformers.apply(llama, other)
    holder = Holder(llama)
    held = [vars(module) | {} for module in holder.modules()]
    assert judge(holder, inputs, BAND, timed=False).rows[1] == want
    (row,) = sa.profile(holder, inputs, [24], patterns=BAND, progress=False).rows
    assert sorted(row.layers) == [0, 1]
    two = Holder(llama, build(CONFIGS["llama"](), "sdpa"))
    with pytest.raises(TypeError, match=r"a transformers model, got Holder with 2: held.0, held.1"):
        judge(two, inputs, BAND, timed=False)
    assert [vars(module) | {} for module in holder.modules()] == held


class Own(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("whose", ["own", "part", "llama"])
def test_a_patch_is_set_aside(on_device, llama, whose):
    model, inputs = llama, text(length=64)[0]
    if whose != "llama":
        model, inputs = torch.nn.Sequential(Own()), {"input": torch.randn(1, 2, 48, 16)}
    patched = model[0] if whose == "part" else model
    want = judge(model, inputs, BAND, timed=False)
    with sa.patch_sdpa(patched, sa.Band((1, 0))):
        held = patched.forward
        assert judge(model, inputs, BAND, timed=False).rows == want.rows
        assert patched.forward is held
    assert "forward" not in vars(patched)


@pytest.mark.parametrize("ask", [judge, sa.advise], ids=["model", "advise"])
def test_a_model_whose_output_is_nan_is_refused(on_device, llama, ask):
    ids = text(length=64)[0]
    rest = ({"band": BAND},) if ask is judge else ()
    options = {} if ask is judge else dict(progress=False)
    with torch.no_grad():
        llama.lm_head.weight[3] = float("nan")
    sentence = "expected a model whose own output holds numbers, got NaN; a wider dtype may mend it"
    with pytest.raises(ValueError, match=sentence):
        ask(llama, ids, *rest, **options)


def test_texts_of_padding_alone_are_refused(on_device, llama):
    ids = text(length=64)[0]
    with pytest.raises(ValueError, match="a token that is not padding, got padding alone"):
        judge(llama, {"input_ids": ids, "attention_mask": torch.zeros_like(ids)}, {"band": BAND})


@pytest.mark.parametrize("kind", [torch.bool, torch.float32], ids=["bool", "additive"])
def test_positions_that_torchs_modules_pad_do_not_count(on_device, kind):
    model, src = of_torch().eval(), torch.randn(2, 30, 64)
    padding = torch.zeros(2, 30, dtype=torch.bool)
    padding[1, 20:] = True
    mask = padding if kind is torch.bool else torch.zeros(2, 30).masked_fill(padding, -torch.inf)
    inputs = dict(src=src, src_key_padding_mask=mask)
    with torch.no_grad():
        outs = [model(src, src_key_padding_mask=padding)]
        outs.append(sa.swap_attention(model, sa.Band(3))(src, src_key_padding_mask=padding))
    sa.restore_attention(model)
    cosine = torch.cosine_similarity(*outs, -1)[~padding].mean().item()
    got = judge(model, inputs, {"band": sa.Band(3)}, timed=False)
    assert got["band"].cosine == pytest.approx(cosine, abs=1e-6) and got.positions == 50


def test_nan_in_padded_rows_does_not_count(on_device):
    class Padded(torch.nn.Module):
        def forward(self, x, attention_mask):
            heads = x[:, None]
            out = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)[:, 0]
            return out.masked_fill(attention_mask[..., None] == 0, float("nan"))

    mask = torch.ones(1, 24, dtype=torch.long)
    mask[:, 20:] = 0
    x = torch.randn(1, 24, 16)
    assert Padded()(x, mask).isnan().any()
    found = judge(Padded(), dict(x=x, attention_mask=mask), {"full": sa.Full()})
    assert found["full"].cosine > 0.999


def test_words_that_a_model_bars_do_not_count(on_device, llama):
    ids = text(length=64)[0] % 90
    plain = judge(llama, ids, {"band": BAND})
    llama.lm_head.register_forward_hook(
        lambda module, given, out: out.index_fill(-1, BARRED.to(out.device), -1e30)
    )
    low = judge(llama, ids, {"band": BAND})["band"]
    llama.lm_head.register_forward_hook(
        lambda module, given, out: out.index_fill(-1, BARRED.to(out.device), -float("inf"))
    )
    barred = judge(llama, ids, {"band": BAND})["band"]
    assert barred.kl == pytest.approx(low.kl, rel=1e-6) and barred.top1 == low.top1
    assert barred.perplexity == pytest.approx(low.perplexity, rel=1e-6)
    assert 0 < barred.cosine < 1 and 0 < barred.rel_l1 < 10
    assert plain["band"].kl != barred.kl
