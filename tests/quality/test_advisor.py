"""The advisor on tiny models: the whole pipeline, its figures, its files."""

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
from tiny_models import CONFIGS, build, output

import sparse_attn as sa
from sparse_attn.advisor._advise import _margin
from sparse_attn.advisor._local import Local
from sparse_attn.advisor._profile import AtLength
from sparse_attn.advisor._search import Search
from sparse_attn.quality._model import PolicyQuality

pytestmark = pytest.mark.usefixtures("without_windows")

PATTERNS = {
    "narrow": sa.Band((3, 0), sinks=1),
    "wide": sa.Band((31, 0), sinks=4),
    "blocks": sa.BlockTopK(16, budget_blocks=2, local_blocks=1),
}


@pytest.fixture
def without_windows(monkeypatch):
    """Draw into files alone."""
    monkeypatch.setenv("MPLBACKEND", "Agg")


@pytest.fixture
def llama(on_device):
    return build(CONFIGS["llama"](), "sdpa")


@pytest.fixture
def ids(on_device):
    return torch.randint(3, 97, (1, 256))


def advise(model, inputs, keep=0.7, **options):
    options.setdefault("patterns", PATTERNS)
    return sa.advise(model, inputs, keep, progress=False, **options)


def test_a_policy_with_its_price_on_unseen_text(llama, ids):
    before = output(llama, input_ids=ids)
    advice = advise(llama, ids)
    assert torch.equal(output(llama, input_ids=ids), before)
    assert llama.config._attn_implementation == "sdpa"
    judged = sa.quality.model(llama, ids[:, 128:], {"policy": advice.policy}, progress=False)
    got = advice.validation[-1]
    assert got.top1 == pytest.approx(judged["policy"].top1)
    assert got.kl == pytest.approx(judged["policy"].kl)
    assert advice.pairs == pytest.approx(judged["policy"].pairs) and advice.pairs < 1
    assert advice.kept == (got.top1 >= 0.7)
    assert advice.policy.num_layers == 2 and advice.policy.num_key_heads == 2
    assert list(advice.times) == [128] and min(advice.times[128]) > 0
    assert len(advice.choice) == 4


def test_equal_inputs_give_equal_policies(llama, ids):
    first, second = advise(llama, ids), advise(llama, ids)
    assert first.policy == second.policy and first.tried == second.tried


def test_more_to_keep_takes_more_pairs(llama, ids):
    low, high = advise(llama, ids, 0.3), advise(llama, ids, 0.9)
    assert low.kept and low.chosen.pairs < high.chosen.pairs


def test_what_cannot_be_kept_is_said(llama, ids):
    advice = advise(llama, ids, 1.0, patterns=[sa.Band((1, 0))])
    assert not advice.kept and advice.pairs < 1
    assert advice.summary().startswith("Could not keep top-1 agreement of 100.0%")
    assert advice.chosen.kept == max(t.kept for t in advice.tried if t.name != "dense")


def test_what_rounding_loses_is_said(llama, ids):
    advice = advise(llama, ids, 1.0, patterns=[sa.Band((1, 0))])
    assert advice.dense_kept == 1.0 and "float32" not in advice.summary()
    rounded = replace(advice, dense_kept=0.98)
    assert "Dense attention by other kernels keeps 98.0%" in rounded.summary()


def test_the_saved_policy_gives_the_same_tokens(llama, ids, tmp_path):
    advice = advise(llama, ids)
    advice.save(tmp_path / "policy.json")
    apply = sa.integrations.transformers.apply
    want = output(apply(build(CONFIGS["llama"]()), advice.policy), input_ids=ids)
    loaded = sa.Policy.load(tmp_path / "policy.json")
    assert torch.equal(output(apply(build(CONFIGS["llama"]()), loaded), input_ids=ids), want)
    about = json.loads((tmp_path / "policy.json").read_text())["about"]
    assert about["model"] == "LlamaForCausalLM" and about["kept"] == advice.kept
    config = CONFIGS["llama"]()
    config.num_hidden_layers = 3
    with pytest.raises(ValueError, match="a policy for LlamaForCausalLM's 3 layers"):
        apply(build(config), loaded)


def test_report_and_tables(llama, ids, tmp_path):
    advice = advise(llama, ids, lengths=[64, 128])
    advice.report(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "data:image/png;base64," in page and "http" not in page
    assert advice._repr_html_().startswith("<h1>Sparse attention for Llama")
    assert "narrow, everywhere" in advice.table() and "* " in advice.table()
    assert set(advice.times) == {64, 128} and "64 positions:" in str(advice)
    axes = advice.plot().axes
    assert axes[0].get_xlabel().startswith("pairs") and axes[1].get_ylabel() == "layer"


def test_texts_are_held_out(llama, ids):
    one, other = ids[:, :128], ids[:, 128:]
    split = advise(llama, ids)
    assert advise(llama, one, validate=other).policy == split.policy
    assert advise(llama, [one, other]).validation[-1] == split.validation[-1]
    short = advise(llama, ids[:, :100])
    assert short.validation == () and "on the calibration text alone" in short.summary()


def test_little_time_still_gives_an_answer(llama, ids):
    advice = advise(llama, ids, minutes=1e-6)
    assert advice.pairs < 1 and len(advice.tried) < 4


def test_a_search_that_was_cut_off_goes_on(llama, ids, tmp_path, monkeypatch):
    from sparse_attn.quality._model import Judge

    file = tmp_path / "search.json"
    whole = advise(llama, ids)
    judged, real = [], Judge.rows

    def cut_off_after(count):
        def rows(self, policies, **options):
            if len(judged) == count:
                raise KeyboardInterrupt
            judged.append(list(policies))
            return real(self, policies, **options)

        monkeypatch.setattr(Judge, "rows", rows)

    cut_off_after(4)
    with pytest.raises(KeyboardInterrupt):
        advise(llama, ids, resume=file)
    cut_off_after(10**6)
    resumed = advise(llama, ids, resume=file)
    assert resumed.policy == whole.policy and resumed.tried == whole.tried
    judged.clear()
    assert advise(llama, ids, resume=file).policy == whole.policy
    assert len(judged) <= 4  # dense attention, and the validation
    other = advise(llama, ids.flip(1), resume=file)
    assert other.tried == advise(llama, ids.flip(1)).tried


def test_windows_of_the_model_are_left_alone(on_device, ids):
    config = CONFIGS["qwen3_sliding"]()
    config.layer_types = ["sliding_attention", "full_attention"]
    advice = advise(build(config, "sdpa"), ids)
    assert advice.skipped == (0,) and {layer for layer, _ in advice.choice} == {1}
    assert "Layers left alone" in advice.summary()


class Own(torch.nn.Module):
    """Two layers that call torch's SDPA themselves."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(32, 96) for _ in range(2))

    def forward(self, hidden):
        for qkv in self.qkv:
            q, k, v = qkv(hidden).unflatten(-1, (6, 16)).transpose(1, 2).chunk(3, 1)
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            hidden = hidden + out.transpose(1, 2).flatten(2)
        return hidden


def test_models_that_call_sdpa_are_advised_by_cosine(on_device):
    hidden = [{"hidden": torch.randn(1, 96, 32)} for _ in range(3)]
    advice = advise(Own().eval(), hidden, 0.8, patterns=[sa.Band(3), sa.Band(20)])
    assert advice.figure == "cosine" and advice.kept and advice.pairs < 1


def test_usual_candidates_are_served():
    from sparse_attn.advisor._candidates import candidates

    found = candidates(512)
    assert any(isinstance(pattern, sa.BlockTopK) for pattern in found.values())
    query = torch.randn(1, 2, 512, 16)
    for pattern in found.values():
        assert sa.can_use(query, query, query, pattern, is_causal=True)


def search_over(errors, margin=0.0):
    """A search over two units whose output loses what the local errors say."""
    local = Local({"sparse": sa.Band(1), "dense": sa.Full()})
    for unit, error in errors.items():
        local.figures[unit] = {
            "sparse": (error, 0.5, 0.1, 0.1),
            "dense": (0.0, 1.0, 1.0, 1.0),
        }
        local.allowed[unit] = 1 / len(errors)

    def judge(name, choice):
        loss = sum(errors[unit] ** 2 for unit, own in choice.items() if own == "sparse")
        return 1 - loss, loss, margin

    return Search(local, judge)


def test_the_search_spares_the_heads_that_matter():
    search = search_over({(0, 0): 0.5, (0, 1): 0.1, (1, 0): 0.1, (1, 1): 0.1})
    best = search.find(0.95, 12, lambda: False)
    assert best.choice == {(0, 0): "dense", (0, 1): "sparse", (1, 0): "sparse", (1, 1): "sparse"}
    assert search.find(1.5, 12, lambda: False) is None


def test_the_margin_is_kept_on_top():
    errors = {(0, 0): 0.1, (0, 1): 0.1, (1, 0): 0.1}
    assert search_over(errors).find(0.97, 12).pairs == pytest.approx(0.1)
    assert search_over(errors, margin=0.005).find(0.97, 12) is None  # 0.97 is no longer sure
    assert search_over(errors, margin=0.005).find(0.96, 12).pairs == pytest.approx(0.1)


@pytest.mark.parametrize(("by", "want"), [("pairs", "few"), ("time", "fast")])
def test_the_search_makes_its_cost_small(by, want):
    local = Local({"few": sa.Band(1), "fast": sa.Band(2), "dense": sa.Full()})
    local.allowed[0, 0] = 1.0
    local.figures[0, 0] = {  # error, mass, pairs, time
        "few": (0.1, 0.5, 0.1, 0.4),
        "fast": (0.1, 0.5, 0.3, 0.2),
        "dense": (0.0, 1.0, 1.0, 1.0),
    }
    search = Search(local, lambda name, choice: (0.99, 0.01, 0.0), by)
    assert search.find(0.9, 8).choice == {(0, 0): want}
    for name in ("few", "fast"):
        search.try_choice(name, {(0, 0): name})
    assert search.best(0.9).choice == search.most_kept().choice == {(0, 0): want}


def test_a_search_by_time(llama, ids):
    advice = advise(llama, ids, 0.3, by="time")
    assert advice.by == "time" and advice.kept
    assert advice.plot().axes[0].get_xlabel() == "predicted time, share of dense"
    assert advise(llama, ids, 0.3).plot().axes[0].get_xlabel().startswith("pairs visited")


@pytest.mark.parametrize(
    ("top1", "kl", "margin"), [(0.99, 0.01, 0.038), (0.95, 0.01, 0.0), (1.0, -1e-9, 0.0)]
)
def test_luck_of_a_text_is_its_margin(top1, kl, margin):
    row = PolicyQuality("p", 0.2, 9.0, top1, kl, 0.1, 0.99, None, 0.5)
    assert _margin(row) == pytest.approx(margin)
    without_tokens = replace(row, top1=None, kl=None, perplexity=None)
    assert _margin(without_tokens) == pytest.approx(0.5 * 2**0.5)


def test_what_other_text_misses_is_asked_for_on_top():
    units = {(layer, 0): 0.1 for layer in range(10)}
    search = search_over({unit: 0.1 + 0.001 * unit[0] for unit in units})
    best = search.find(0.9, 20)
    judged = []

    def other(less):
        def kept(outcome):
            judged.append(outcome.kept)
            return outcome.kept - less

        return kept

    assert search.validated(best, 0.9, other(0.0), 20) is best and len(judged) == 1
    judged.clear()
    safer = search.validated(best, 0.9, other(0.03), 20)
    assert 0.93 <= safer.kept < 0.96 and len(judged) == 2
    judged.clear()
    assert search.validated(best, 0.9, other(0.5), 20) is search.most_kept()
    assert len(judged) <= 4 and judged == sorted(judged)


@pytest.mark.parametrize("by", ["key head", "layer"])
def test_units_weigh_what_they_do_to_the_output(by):
    """Rounding, which dense attention by these kernels has too, weighs nothing."""
    units = [(layer, head) for layer in range(3) for head in range(2)]
    search = search_over(dict.fromkeys(units, 0.1))

    def judge(name, choice):
        hurt = {unit: 9 if unit == (1, 0) else 1 for unit, own in choice.items() if own != "dense"}
        loss = 0.5 + sum(0.01 * times for times in hurt.values())
        return 1 - loss, loss, 0.0

    search.judge = judge
    parts = (
        [(unit,) for unit in units]
        if by == "key head"
        else [tuple(units[i : i + 2]) for i in (0, 2, 4)]
    )
    search.weigh("sparse", parts, lambda: False)
    hurt = {(1, 0): 9.0} if by == "key head" else {(1, 0): 5.0, (1, 1): 5.0}
    assert search.weights == pytest.approx(dict.fromkeys(units, 1.0) | hurt)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(keep=0), "keep above 0"),
        (dict(keep=1.5), "keep above 0 and up to 1"),
        (dict(minutes=0), "minutes above 0"),
        (dict(by="speed"), "by to be one of pairs, time, got 'speed'"),
        (dict(patterns=[]), "patterns beside Full"),
        (dict(patterns=["band"]), "pattern 'band' to be one"),
        (dict(patterns={"band": sa.Band}), r"pattern band to be one, got the class Band; write"),
        (dict(validate="text"), "validate to be a tensor of token ids"),
        (dict(resume=__file__), "resume to name a new file or that of an earlier search, got"),
        (dict(resume="/"), "resume to name a new file or that of an earlier search, got /$"),
        (dict(lengths=128), "lengths to be a list"),
        (dict(inputs="text"), "inputs to be"),
        (dict(model=3), "model to be"),
    ],
)
def test_wrong_arguments_are_refused(llama, ids, options, sentence):
    given = dict(model=llama, inputs=ids, keep=0.9) | options
    with pytest.raises((TypeError, ValueError), match=rf"^sparse_attn\.advise: .*{sentence}"):
        sa.advise(progress=False, **given)


def test_profile_measures_and_leaves_the_model(llama, ids):
    before = output(llama, input_ids=ids)
    measured = sa.profile(llama, ids, [64, 128], patterns=PATTERNS, progress=False)
    assert torch.equal(output(llama, input_ids=ids), before)
    assert [row.length for row in measured.rows] == [64, 128]
    for row in measured.rows:
        assert 0 <= row.share < 1 and sorted(row.layers) == [0, 1]
        assert set(row.patterns) == set(PATTERNS) and min(row.patterns.values()) > 0
    assert "positions attention takes" in str(measured)
    usual = sa.profile(llama, ids, progress=False)
    assert [row.length for row in usual.rows] == [64, 128, 256] and str(usual)
    assert len({tuple(row.patterns) for row in usual.rows}) == 1


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


def test_profile_says_when_it_is_not_worth_it():
    def row(length, without, dense, band):
        return AtLength(length, 1.0, without, {0: dense}, {"band": band}, None)

    small = sa.Profile((row(64, 0.96, 0.04, 0.05),), "Model")
    assert "not worth it" in str(small) and small.crossover("band") is None
    rows = (row(64, 0.9, 1.0, 2.0), row(128, 0.8, 4.0, 3.0), row(256, 0.5, 16.0, 5.0))
    large = sa.Profile(rows, "Model")
    assert large.crossover("band") == 128
    assert "more than 2.00 times" in str(large) and "not worth it" not in str(large)


def test_crossovers_are_measured_once_for_a_device(tmp_path, monkeypatch):
    from sparse_attn.advisor import _crossover
    from sparse_attn.advisor._kept import cache_file

    monkeypatch.setenv("SPARSE_ATTN_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr(_crossover, "LAST", {"cpu": 1024})
    lengths = []

    def seconds(tensors, pattern):
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


def test_the_time_left_counts_forwards(monkeypatch):
    from sparse_attn.advisor import _clock

    now = [100.0]
    monkeypatch.setattr(_clock.time, "monotonic", lambda: now[0])
    clock = _clock.Clock(None, layers=4, evaluations=10)
    clock.time_forward(lambda: now.append(now.pop() + 2))
    now[0] += 3
    clock.measured(1)  # a layer takes 3 seconds, a forward 2
    assert clock.left() == 3 * 3 + 10 * 2 + 11 * 2
    clock.evaluated()
    assert clock.left() == 9 * 2 + 11 * 2
    hurried = _clock.Clock(1.0, layers=4, evaluations=100)
    hurried.time_forward(lambda: now.append(now.pop() + 2))
    assert hurried.left() == 58 - 11 * 2 + 11 * 2  # the minute, less what has gone
    assert hurried.has_time_for(9, 0.5) is (2 + 18 < 19) and hurried.has_time_for(8, 0.5)
    now[0] += 40
    assert hurried.out_of_time(1.0)() and hurried.left() == 22


def test_costs_are_visited_tiles_by_measured_rates(tmp_path, monkeypatch):
    from sparse_attn.advisor import _rates

    monkeypatch.setenv("SPARSE_ATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(_rates, "_known", {})
    monkeypatch.setattr(_rates, "LENGTH", {"cpu": 512})
    timed = []

    def seconds(tensors, pattern):
        timed.append(type(pattern).__name__)
        tiles = pattern.cost(512, is_causal=True)
        slowed = 3 if len(timed) in (1, 2) else 1  # by others, for a while
        return slowed * tiles * {"Full": 1.0, "Band": 1.52, "BlockSparse": 2.0}[timed[-1]]

    monkeypatch.setattr(_rates, "seconds_of_call", seconds)
    query, key = torch.randn(1, 4, 256, 16), torch.randn(1, 2, 256, 16)
    band = sa.Band((63, 0))
    tiles = band.cost(256, is_causal=True) / sa.Full().cost(256, is_causal=True)
    assert _rates.cost(band, query, key, True, [0.1, 0.1]) == pytest.approx([1.5 * tiles] * 2)
    found = _rates.cost(sa.BlockTopK(16), query, key, True, [0.1, 0.3])
    assert found == pytest.approx([0.2, 0.6])
    assert timed == 3 * ["Band", "Full"] + 3 * ["BlockSparse", "Full"]
    monkeypatch.setattr(_rates, "_known", {})  # another process finds them in the file
    assert _rates.cost(band, query, key, True, [0.1]) == pytest.approx([1.5 * tiles])
    assert len(timed) == 12
