"""The advisor on tiny models: the whole pipeline, its figures, its files."""

import json
import sys
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
from tiny_models import CONFIGS, build, output

import sparse_attn as sa

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


def test_a_policy_that_saves_nothing_is_said(llama, ids):
    advice = advise(llama, ids)
    assert "No policy was found" not in advice.summary()
    slow = tuple(replace(tried, cost=1.2) for tried in advice.tried)
    by_time = replace(advice, by="time", tried=slow).summary()
    assert by_time.startswith(
        "No policy was found that is predicted to save time: this one takes 120"
    )
    wide = advise(llama, ids, patterns=[sa.Band((300, 0))])
    assert wide.kept and wide.summary().startswith("No policy was found that saves pairs")


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


def test_without_matplotlib_notebooks_show_text_and_reports_say_why(
    llama, ids, tmp_path, monkeypatch
):
    advice = advise(llama, ids)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert advice._repr_html_().startswith("<pre>")
    with pytest.raises(ImportError, match=r"^sparse_attn: expected matplotlib for pictures"):
        advice.report(tmp_path / "report.html")


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


def test_names_in_the_picture_stand_apart(llama, ids):
    advice = advise(llama, ids, patterns=None)
    drawn = advice.plot()
    drawn.canvas.draw()
    names = {text.get_text(): text.get_window_extent() for text in drawn.axes[0].texts}
    assert advice.chosen.name.removesuffix(", everywhere") in names
    assert 3 < len(names) < len(advice.tried)
    for one, other in combinations(names.values(), 2):
        assert not one.shrunk(0.9, 0.9).overlaps(other.shrunk(0.9, 0.9))


def test_little_time_still_gives_an_answer(llama, ids):
    advice = advise(llama, ids, minutes=1e-6)
    assert advice.pairs < 1 and len(advice.tried) < 4


def test_local_errors_stop_in_time(llama, ids, tmp_path, monkeypatch):
    from sparse_attn.advisor import _clock

    class Clock(_clock.Clock):
        """No time is left once the first layer is measured."""

        def has_time_for(self, forwards, share):
            return not self._measured

    monkeypatch.setattr("sparse_attn.advisor._run.Clock", Clock)
    file = tmp_path / "search.json"
    advice = advise(llama, ids, minutes=60, resume=file)
    assert advice.unmeasured == (1,) and advice.policy.num_layers == 2
    assert {own for (layer, _), own in advice.choice.items() if layer == 1} == {"dense"}
    assert {own for (layer, _), own in advice.choice.items() if layer == 0} != {"dense"}
    assert "no time to measure candidates: layers 1. More minutes" in advice.summary()
    judged = sa.quality.model(llama, ids[:, 128:], {"policy": advice.policy}, progress=False)
    assert advice.pairs == pytest.approx(judged["policy"].pairs) and 0.5 < advice.pairs < 1
    assert advice.chosen.pairs == pytest.approx(advice.pairs, abs=0.01)
    monkeypatch.undo()
    whole = advise(llama, ids, resume=file)  # which measures what was left
    assert whole.unmeasured == () and whole.policy == advise(llama, ids).policy


def test_every_layer_of_several_inputs_is_measured_once_at_least(llama, ids):
    from sparse_attn._binding import bound
    from sparse_attn._observe import watching
    from sparse_attn.advisor._local import Local

    def local_of(inputs, late=lambda: False):
        local = Local({"narrow": PATTERNS["narrow"], "dense": sa.Full()}, late=late)
        with torch.no_grad(), bound("test", llama, sa.Full()), watching(local):
            for own in inputs:
                llama(**own)
        local.finish("test")
        return local

    tokens = torch.arange(128)[None] < 100
    first, second = (
        {"input_ids": own, "attention_mask": tokens.long()} for own in ids.split(128, 1)
    )
    seen = []
    hurried = local_of([first, second], lambda: len(seen.append(0) or seen) > 1)
    assert hurried.unmeasured == set() and hurried.figures == local_of([first]).figures
    seen.clear()
    last = local_of([first, second], lambda: len(seen.append(0) or seen) > 2)  # one layer is left
    assert hurried.allowed == last.allowed == local_of([first, second]).allowed


def test_a_search_that_was_cut_off_goes_on(llama, ids, tmp_path, monkeypatch):
    from sparse_attn.advisor._run import Run
    from sparse_attn.quality._model import Judge

    def expected(real, left):
        def expect(run, *given):
            before = run.clock.evaluations
            real(run, *given)
            left.append((before, run.clock.evaluations))

        return expect

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
    left = []
    monkeypatch.setattr(Run, "_expect", expected(Run._expect, left))
    assert advise(llama, ids, resume=file).policy == whole.policy
    # weights and single candidates are known, so that they leave the count as it is
    assert [after for _, after in left[:4]] == [10, 10, 10, 0]
    assert [before for before, _ in left[1:3]] == [10, 10]
    assert len(judged) <= 4  # dense attention, and the validation
    kept = file.read_bytes()
    with pytest.raises(ValueError, match=r"search\.json of another model, other inputs"):
        advise(llama, ids.flip(1), resume=file)
    assert file.read_bytes() == kept


def test_a_file_of_lists_with_other_blocks_is_refused(llama, ids, tmp_path):
    blocks = torch.ones(8, 8, device=ids.device).tril().bool()
    layouts = [sa.BlockLayout.from_mask(mask, 16, 16) for mask in (blocks, blocks.triu(-2))]
    one, other = ({"lists": sa.TopK(9, inside=layout)} for layout in layouts)
    options = dict(resume=tmp_path / "search.json", validate=ids[:, :128])
    advise(llama, ids[:, 128:], patterns=one, **options)
    advise(llama, ids[:, 128:], patterns=one, **options)
    with pytest.raises(ValueError, match="of another model, other inputs or patterns"):
        advise(llama, ids[:, 128:], patterns=other, **options)


def test_a_file_that_was_changed_is_refused(llama, ids, tmp_path):
    file = tmp_path / "search.json"
    advise(llama, ids, resume=file)
    held = json.loads(file.read_text())
    for change in (
        dict(judged=None),
        dict(judged={"of a choice": [1.0]}),
        dict(local=[[0, 0]]),
        dict(local=[[0, 0, 1.0, {"narrow": [0.1, 0.2]}]]),
        dict(local=[[0, 0, "all", {"narrow": [0.1] * 4}]]),
        dict(skipped=None),
    ):
        file.write_text(json.dumps(held | change))
        with pytest.raises(ValueError, match=r"of an earlier search, got .*, which was changed$"):
            advise(llama, ids, resume=file)


def test_a_file_that_cannot_be_written_is_refused_before_the_search(llama, ids, tmp_path):
    (tmp_path / "search.json.new").mkdir()  # which is written first, and then takes its place
    with pytest.raises(ValueError, match=r"resume to name a file that can be written, got .*json"):
        advise(llama, ids, resume=tmp_path / "search.json")


def test_windows_of_the_model_are_left_alone(on_device, ids):
    config = CONFIGS["qwen3_sliding"]()
    config.layer_types = ["sliding_attention", "full_attention"]
    advice = advise(build(config, "sdpa"), ids)
    assert advice.skipped == (0,) and {layer for layer, _ in advice.choice} == {1}
    assert "Layers left alone" in advice.summary()
    config.layer_types = ["sliding_attention"] * 2
    with pytest.raises(ValueError, match=r"policy reaches, got layers with a window .*: 0, 1$"):
        advise(build(config, "sdpa"), ids)


@pytest.mark.parametrize("holes", [False, True], ids=["left", "holes"])
def test_windows_of_the_model_are_left_alone_in_padded_texts(on_device, ids, holes):
    config = CONFIGS["qwen3_sliding"]()
    config.layer_types = ["sliding_attention", "full_attention"]
    mask = torch.ones_like(ids).repeat(2, 1)
    mask[:, :20] = 0
    mask[:, 40] = not holes
    inputs = {"input_ids": ids.repeat(2, 1), "attention_mask": mask}
    advice = advise(build(config, "sdpa"), inputs)
    assert advice.skipped == (0,) and {layer for layer, _ in advice.choice} == {1}


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


@pytest.mark.parametrize("configured", [True, False])
def test_the_estimate_counts_every_key_head(llama, ids, monkeypatch, configured):
    from sparse_attn.advisor._run import Run

    class Bar:
        def __init__(self, total, leave):
            self.n, self.total, self.first = 0, total, total
            bars.append(self)

        def set_description(self, name, refresh):
            self.name = name

        def update(self, steps):
            self.n += steps
            assert self.n <= self.total or self.name.startswith("validation")

        def close(self):
            pass

    def step(run, name, *steps):
        seen.setdefault(name, run.clock.evaluations)
        real(run, name, *steps)

    bars, seen, real = [], {}, Run.step
    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(tqdm=Bar))
    monkeypatch.setattr(Run, "step", step)
    hidden = [{"hidden": torch.randn(1, 96, 32)} for _ in range(2)]
    model, inputs = (llama, ids) if configured else (Own().eval(), hidden)
    sa.advise(model, inputs, 0.7, patterns=PATTERNS)
    search = [left for name, left in seen.items() if name.startswith("search, price")]
    weights = [left for name, left in seen.items() if name.endswith("alone")]
    assert weights == [17, 16, 15, 14]
    if configured:
        assert search[0] == 10  # after three everywhere
        # layers, dense and three more everywhere, key heads, the search
        assert bars[0].first == 2 + 1 + 3 + 4 + 10


def test_a_search_by_time(llama, ids):
    advice = advise(llama, ids, 0.3, by="time")
    assert advice.by == "time" and advice.kept
    assert advice.plot().axes[0].get_xlabel() == "predicted time, share of dense"
    assert advise(llama, ids, 0.3).plot().axes[0].get_xlabel().startswith("pairs visited")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(keep=0), "keep above 0"),
        (dict(keep=1.5), "keep above 0 and up to 1"),
        (dict(minutes=0), "minutes above 0"),
        (dict(minutes=float("nan")), "minutes above 0"),
        (dict(validate=torch.empty(1, 0).long()), r"validate with a tensor .*shape \(1, 0\)"),
        (dict(resume="nowhere/search.json"), "resume in a folder that exists"),
        (dict(resume=3), "resume to be a path or None, got int"),
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
