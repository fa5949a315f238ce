"""can_use of packed and paged sequences: the engine that serves, or the sentence of the call."""

import pytest
import torch

import sparse_attn as sa
from sparse_attn.capability import ENGINES

PATTERNS = {
    "full": None,
    "band": sa.Band((9, 0), sinks=2),
    "topk": sa.TopK(5),
    "block-topk": sa.BlockTopK(16, mass=None, budget_blocks=2),
    "topk-inside": sa.TopK(5, inside=sa.BlockTopK(16)),
    "by-head": sa.ByHead({1: sa.Full()}, sa.Band((9, 0))),
}


def packed(device):
    """Arguments of a call of `varlen_attention`."""
    starts = torch.tensor([0, 20, 57], dtype=torch.int32, device=device)
    query = torch.randn(57, 4, 64, device=device)
    key, value = torch.randn(2, 57, 2, 64, device=device)
    placing = {"cu_seq_q": starts, "cu_seq_k": starts, "max_q": 37, "max_k": 37}
    return sa.varlen_attention, (query, key, value), placing


def paged(device):
    """Arguments of a call of `paged_attention`."""
    query = torch.randn(2, 4, 3, 64, device=device)
    caches = torch.randn(2, 6, 16, 2, 64, device=device).unbind(0)
    table = torch.tensor([[4, 0], [2, 5]], dtype=torch.int32, device=device)
    used = torch.tensor([20, 9], dtype=torch.int32, device=device)
    return sa.paged_attention, (query, *caches), {"block_table": table, "seqused_k": used}


def packed_on_pages(device):
    """Arguments of a call of `paged_attention` with packed queries."""
    attention, (query, *caches), placing = paged(device)
    starts = torch.tensor([0, 1, 4], dtype=torch.int32, device=device)
    query = query.transpose(1, 2).flatten(0, 1)[:4]
    return attention, (query, *caches), {**placing, "cu_seq_q": starts, "max_q": 3}


CALLS = (packed, paged, packed_on_pages)


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("make", CALLS)
def test_the_answer_is_what_a_forced_call_shows(device, make, pattern):
    attention, tensors, placing = make(device)
    answer = sa.can_use(*tensors, pattern, **placing, is_causal=True)
    assert answer and answer.engine in ENGINES[device]
    auto = attention(*tensors, **placing, pattern=pattern, is_causal=True)
    if not isinstance(pattern, sa.ByHead):  # whose heads may have several engines
        named = {"engine": answer.engine, "pattern": pattern, "is_causal": True}
        assert torch.equal(auto, attention(*tensors, **placing, **named))
    for faster in ENGINES[device][: ENGINES[device].index(answer.engine)]:
        assert any(reason.startswith(faster) for reason in answer.reasons)


@pytest.mark.parametrize("pattern", [None, PATTERNS["block-topk"], PATTERNS["by-head"]], ids=str)
@pytest.mark.parametrize("make", CALLS)
@pytest.mark.parametrize(
    "wrong",
    [
        {"engine": "fastest"},
        {"attn_mask": torch.ones(1).bool()},
        {"sink_logits": torch.ones(3)},
        {"max_q": 2, "cu_seq_q": torch.tensor([0, 0, 3]).int()},
    ],
    ids=["engine", "mask", "sinks", "max_q"],
)
def test_wrong_calls_are_refused_with_their_sentence(make, pattern, wrong):
    attention, tensors, placing = make("cpu")
    answer = sa.can_use(*tensors, pattern, **{**placing, **wrong})
    with pytest.raises((ValueError, NotImplementedError)) as raised:
        attention(*tensors, **{**placing, **wrong}, pattern=pattern)
    assert not answer and answer.reasons == (str(raised.value),)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"block_table": None}, "cu_seq_q to be a tensor, got NoneType"),
        ({"seqused_k": None}, "seqused_k to be a tensor, got NoneType"),
        ({"max_k": 3}, "no max_k of a paged call, got one"),
        ({"max_q": "3"}, "max_q to be an int, got str"),
    ],
    ids=["table", "used", "max_k", "max_q"],
)
def test_wrong_kinds_raise(wrong, sentence):
    _, tensors, placing = paged("cpu")
    with pytest.raises(TypeError, match=rf"^sparse_attn\.can_use: expected {sentence}$"):
        sa.can_use(*tensors, **{**placing, **wrong})
