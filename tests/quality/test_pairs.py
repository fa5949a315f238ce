"""quality.model's pairs are those that ran: calls that stay with torch visit all of theirs."""

import dataclasses
import math

import pytest
import torch
from torch.nn import functional

import sparse_attn as sa

BAND = sa.Band(3)


class Own(torch.nn.Module):
    """Attends by heads of these dims, one after another."""

    def __init__(self, *head_dims):
        super().__init__()
        self.head_dims = head_dims

    def forward(self, hidden):
        for head_dim in self.head_dims:
            x = hidden.unflatten(-1, (-1, head_dim)).transpose(1, 2)
            hidden = functional.scaled_dot_product_attention(x, x, x).transpose(1, 2).flatten(2)
        return hidden


def judge(model, hidden, policies=BAND):
    policies = {"band": policies}
    return sa.quality.model(model, {"hidden": hidden}, policies, timed=False, progress=False)


@pytest.mark.filterwarnings("ignore:sparse_attn.patch_sdpa")
@pytest.mark.parametrize(
    ("head_dim", "dtype", "reason"),
    [(16, torch.float64, "got float64"), (12, torch.float32, "got 12")],
    ids=["dtype", "head dim"],
)
def test_a_model_whose_calls_all_stay_with_torch_is_refused(head_dim, dtype, reason):
    sentence = (
        r"^sparse_attn\.quality\.model: expected a model with attention that band reaches, got "
        rf"Own, which leaves all calls to torch: sparse_attn::band: .*{reason}"
    )
    with pytest.raises(ValueError, match=sentence):
        judge(Own(head_dim), torch.randn(2, 30, 48, dtype=dtype))


@pytest.mark.filterwarnings("ignore:sparse_attn.patch_sdpa")
def test_a_model_without_attention_is_refused():
    sentence = "band reaches, got Own without calls of F.scaled_dot_product_attention"
    with pytest.raises(ValueError, match=sentence):
        judge(Own(), torch.randn(2, 30, 48))


@pytest.mark.filterwarnings("ignore:sparse_attn.patch_sdpa")
def test_calls_that_stay_with_torch_count_as_dense():
    share = BAND.density(30, 30)
    hidden = torch.randn(2, 30, 48)
    assert judge(Own(16, 16), hidden)["band"].pairs == pytest.approx(share)
    # 3 heads of 16 under the band, 4 of 12 dense
    want = (3 * share + 4) / 7
    assert judge(Own(16, 12), hidden)["band"].pairs == pytest.approx(want)


@pytest.mark.parametrize("padding", [0, 5], ids=["whole", "padded"])
@pytest.mark.parametrize(("name", "windowed"), [("mistral", 2), ("gemma2", 1), ("llama", 0)])
def test_allowed_pairs_are_those_of_the_models_own_windows(name, windowed, padding):
    pytest.importorskip("transformers")
    from tiny_models import CONFIGS, WINDOW, build

    length, inner = 40, sa.Band((3, 0))
    ids = torch.randint(3, 97, (1, padding + length))
    inputs = {"input_ids": ids, "attention_mask": (torch.arange(padding + length) >= padding)[None]}
    policies = {"own": sa.Full(), "band": inner}
    judged = sa.quality.model(build(CONFIGS[name]()), inputs, policies, timed=False, progress=False)
    window, whole, visited = (
        pattern.density(length, length, is_causal=True)
        for pattern in (sa.Band((WINDOW - 1, 0)), sa.Full(), inner)
    )
    allowed = windowed * window + (2 - windowed) * whole  # of two layers
    assert judged["own"].pairs == 1
    assert judged["band"].pairs == pytest.approx(2 * visited / allowed)


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize(("name", "band"), [("llama", sa.Band((3, 0))), ("bert", BAND)])
def test_padded_queries_have_no_pairs(name, band, left):
    pytest.importorskip("transformers")
    from tiny_models import CONFIGS, build

    lengths = torch.tensor([40, 13, 0])
    tokens = torch.arange(40) < lengths[:, None]
    inputs = {"input_ids": torch.randint(3, 97, (3, 40)), "attention_mask": tokens.long()}
    if left:
        inputs["attention_mask"] = inputs["attention_mask"].flip(1)
    model = build(CONFIGS[name]())
    judged = sa.quality.model(model, inputs, {"band": band}, timed=False, progress=False)
    visited, allowed = (
        sum(n * n * pattern.density(n, n, is_causal=name == "llama") for n in lengths.tolist())
        for pattern in (band, sa.Full())
    )
    assert judged["band"].pairs == pytest.approx(visited / allowed)


TOKENS = torch.tensor([[True] * 4, [False, True, True, False]])
ENDS = torch.tensor([[[[0, 4]] * 4], [[[1, 3], [3, 1], [2, 3], [4, 4]]]], dtype=torch.int32)
SAY_PADDING = {
    "mask of keys": ({"attn_mask": TOKENS[:, None, None]}, TOKENS),
    "additive mask": (
        {"attn_mask": torch.zeros(2, 2, 4, 4).masked_fill(~TOKENS[:, None, None], -torch.inf)},
        TOKENS,
    ),
    "mask of all texts": ({"attn_mask": TOKENS[1].expand(4, 4)}, TOKENS[1:]),
    "bounds": ({"key_bounds": ENDS}, TOKENS),
    "bounds and mask": (
        {"key_bounds": ENDS, "attn_mask": torch.arange(4) < 2},
        TOKENS & (torch.arange(4) < 2),
    ),
}


@pytest.mark.parametrize(("common", "real"), SAY_PADDING.values(), ids=SAY_PADDING)
def test_rows_are_real_whose_own_key_some_row_may_see(common, real):
    from sparse_attn._observe import Attended

    call = Attended(0, *[torch.zeros(2, 2, 4, 16)] * 3, sa.Full(), common)
    assert torch.equal(call.real_rows(), real[:, None])
    fewer = dataclasses.replace(call, query=call.query[:, :, :1])
    assert fewer.real_rows() is None
    assert dataclasses.replace(call, common={}).real_rows() is None


class Reader(torch.nn.Module):
    """A query for each place of a padded memory."""

    def __init__(self, length):
        super().__init__()
        self.questions = torch.nn.Parameter(torch.randn(1, length, 16))
        self.read = torch.nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, memory, padding):
        questions = self.questions.expand(len(memory), -1, -1)
        return self.read(questions, memory, memory, padding, need_weights=False)[0]


def test_queries_of_a_padded_memory_are_no_padding():
    lengths = torch.tensor([12, 4])
    padding = torch.arange(12) >= lengths[:, None]
    inputs = {"memory": torch.randn(2, 12, 16), "padding": padding}
    judged = sa.quality.model(
        Reader(12).eval(), inputs, {"band": BAND}, timed=False, progress=False
    )
    visited, allowed = (
        sum(int(pattern.mask(12, 12)[:, :length].sum()) for length in lengths)
        for pattern in (BAND, sa.Full())
    )
    assert judged["band"].pairs == pytest.approx(visited / allowed)


def test_pairs_that_are_not_seen_are_not_said_to_be_all():
    """Those of texts packed into one row by ``cu_seq_lens_q``."""
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    from tiny_models import CONFIGS, build

    starts = torch.tensor([0, 15, 40], dtype=torch.int32)
    inputs = {"input_ids": torch.randint(3, 97, (1, 40)), "max_length_q": 25, "max_length_k": 25}
    inputs |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "use_cache": False}
    inputs["position_ids"] = torch.cat([torch.arange(15), torch.arange(25)])[None]
    policies = {"band": sa.Band((3, 0))}
    found = sa.quality.model(
        build(CONFIGS["llama"]()), inputs, policies, timed=False, progress=False
    )
    assert math.isnan(found["band"].pairs) and found["dense"].pairs == 1
    dense, band = (line.split() for line in found.table().splitlines()[1:])
    assert "100.0%" in dense and "%" not in band[1]
    found.plot()
