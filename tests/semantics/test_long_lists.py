"""Lists of many blocks by their number alone: exact, with ties to the lower block."""

import pytest
import torch

import sparse_attn as sa

BLOCK, DIM = 16, 8


def chosen(scores, kept, group, device):
    """The lists of a call whose blocks have these scores, (lists, blocks)."""
    lists, blocks = scores.shape
    key = torch.zeros(1, lists, blocks * BLOCK, DIM, device=device)
    query = torch.zeros(1, 2 * lists, 1, DIM, device=device)
    pattern = sa.BlockTopK(
        BLOCK, None, scores[None, :, None].to(device), budget_blocks=kept, sink_blocks=0,
        local_blocks=0, group=group,
    )  # fmt: skip
    layout = sa.select_blocks(query, key, pattern)
    assert (layout.counts == kept).all()
    assert (layout.indices[..., kept:] == 0).all()
    return layout.indices[0, :: 2 if group == "q" else 1, 0, :kept].cpu()


def best(scores, kept):
    """The diagonal's block, those of no number, and the highest ones."""
    scores = scores.index_fill(1, torch.tensor([scores.shape[1] - 1]), torch.nan)
    order = scores.double().nan_to_num(torch.inf).sort(dim=-1, descending=True, stable=True)[1]
    return order[:, :kept].sort(-1).values.int()


SCORES = {
    "normal": lambda n: torch.randn(2, n),
    "few-levels": lambda n: torch.randint(0, 5, (2, n)).float() - 2,
    "equal": lambda n: torch.zeros(2, n),
    "one-apart": lambda n: torch.zeros(2, n).index_fill(1, torch.tensor([n // 2]), 1e-3),
    "wide": lambda n: torch.randn(2, n) * 10.0 ** torch.randint(-20, 1, (2, n)),
    "unknown": lambda n: torch.randn(2, n).index_fill(
        1, torch.tensor([1, n // 3, n - 1]), torch.nan
    ),
}


@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("blocks, kept", [(70, 9), (1500, 64), (2048, 2047), (8200, 128)])
def test_lists(device, blocks, kept, scores):
    torch.manual_seed(0)
    scores = scores(blocks)
    want = best(scores, kept)
    assert torch.equal(chosen(scores, kept, "q", device), want)


@pytest.mark.parametrize("blocks, kept", [(70, 9), (1500, 64), (8200, 128)])
def test_lists_of_heads_that_agree(device, blocks, kept):
    """Heads with the same scores share the list that each has alone; levels stay far apart."""
    torch.manual_seed(0)
    scores = torch.randint(0, 40, (2, blocks)) / 8
    assert torch.equal(chosen(scores, kept, "kv", device), best(scores, kept))


def test_a_chunk_of_rows_has_the_lists_of_its_halves(device):
    """Few rows against many keys: what walks keep for every key block takes much memory."""
    torch.manual_seed(0)
    rows, keys = (8192, 131072) if device == "cuda" else (256, 4096)
    query = torch.randn(1, 4, rows, 16, device=device, dtype=torch.float16)
    key = torch.randn(1, 1, keys, 16, device=device, dtype=torch.float16)
    whole = sa.select_blocks(query, key, sa.BlockTopK(), is_causal=True)
    for half, part in enumerate(query.chunk(2, dim=2)):
        offset = keys - rows + half * part.shape[2]
        lists = sa.select_blocks(part, key, sa.BlockTopK(), is_causal=True, query_offset=offset)
        blocks = slice(half * lists.counts.shape[-1], (half + 1) * lists.counts.shape[-1])
        assert torch.equal(whole.counts[..., blocks], lists.counts)
        assert torch.equal(whole.indices[..., blocks, :], lists.indices)


@pytest.mark.parametrize("blocks", [600, 2100, 8200])
def test_a_batch_changes_no_list(device, blocks):
    """Heads that share a list are joined in an order of its own, whoever shares the work."""
    torch.manual_seed(0)
    key = torch.zeros(1, 1, 1, DIM, device=device)
    query = torch.zeros(16, 32, 1, DIM, device=device)
    scores = torch.randn(16, 32, 1, blocks, device=device)

    def lists(batch):
        pattern = sa.BlockTopK(
            BLOCK, None, scores[:batch], budget_blocks=99, sink_blocks=0, local_blocks=0,
            group="kv",
        )  # fmt: skip
        keys = key.expand(batch, 8, blocks * BLOCK, DIM)
        return sa.select_blocks(query[:batch], keys, pattern).indices[:1, :, :, :99]

    alone = lists(1)
    for batch in (2, 4, 16):
        assert torch.equal(lists(batch), alone)
