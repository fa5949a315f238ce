"""float32 with few queries: keys are cut into chunks, and who joins them changes no bit."""

import pytest
import torch
from engines import cuda_engine
from ragged import Ragged, packed, split, split_lse
from reference import Shape, random_layout, with_bits

import sparse_attn as sa
from sparse_attn.testing import assert_close_to_reference

#: Rows on either side of the limits that cut the keys in another way, and of a low tile.
ROWS = [1, 5, 16, 17, 64, 65, 256, 257]
PATTERNS = {
    "full": lambda s, device: sa.Full(),
    "band": lambda s, device: sa.Band((1023, 70)),
    "band-sinks": lambda s, device: sa.Band((700, 0), sinks=133),
    "band-sinks-ahead": lambda s, device: sa.Band((None, 0), sinks=4000),
    "globals": lambda s, device: sa.Band((300, 90), global_tokens=2500),
    "scattered": lambda s, device: sa.Band(
        (300, 0), sinks=2, global_tokens=torch.arange(7, 5003, 311, device=device)
    ),
    "dilated": lambda s, device: sa.Dilated((400, 30), 3, sinks=37),
    "strided": lambda s, device: sa.Strided(300, 7),
    "blocks-16": lambda s, device: sa.BlockSparse(random_layout(s.Sq, s.Skv, 16, 16, device)),
    "blocks-128": lambda s, device: sa.BlockSparse(
        with_bits(random_layout(s.Sq, s.Skv, 128, 128, device, heads=s.Hkv, density=0.8))
    ),
    "block-topk": lambda s, device: sa.BlockTopK(64, budget_share=0.4, local_blocks=1),
}


@pytest.fixture
def portable(device):
    return cuda_engine(device, "portable", filled=True, return_lse=True)


def batch_that_fills(shape):
    """Entries whose tiles fill a device, so that each thread block takes a whole tile."""
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    tiles = 1 if shape.Sq <= 16 else -(-shape.Sq // 64)
    return 2 * multiprocessors * (8 if shape.Sq <= 16 else 4) // (shape.Hq * tiles) + 1


def check(portable, tensors, pattern, shape, **common):
    """The call is right, and has the bits that it has within a batch."""
    one = portable(*tensors, pattern, **common)
    assert_close_to_reference(one, *tensors, pattern, **common)
    batch = batch_that_fills(shape)
    if "key_bounds" in common:  # has an entry for each of the batch
        common["key_bounds"] = common["key_bounds"].repeat(batch, 1, 1, 1)
    many = portable(*(t.expand(batch, -1, -1, -1) for t in tensors), pattern, **common)
    for own, all_of_them in zip(one, many, strict=True):
        assert torch.equal(own.expand_as(all_of_them).isnan(), all_of_them.isnan())
        assert torch.equal(own.nan_to_num().expand_as(all_of_them), all_of_them.nan_to_num())
    return one


@pytest.mark.parametrize("head_dim", [64, 128, 256, 40])
@pytest.mark.parametrize("Skv", [255, 257, 513, 1025, 8300])
@pytest.mark.parametrize("Sq", ROWS)
def test_edges_of_chunks(portable, device, Sq, Skv, head_dim):
    shape = Shape(1, 2, 1, Sq, Skv, head_dim)
    check(portable, shape.make(device), sa.Full(), shape, is_causal=True)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("Sq", [1, 17, 65])
@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern(portable, device, name, Sq, is_causal):
    shape = Shape(1, 4, 2, Sq, 5003, 64)
    pattern = PATTERNS[name](shape, device)
    check(portable, shape.make(device), pattern, shape, is_causal=is_causal)


def bounds_of_rows(Sq, device):
    """Keys of one chunk, of a few, of those far after, of none, in turn."""
    each = [(600, 700), (3000, 4900), (0, 4000), (20, 20), (255, 257), (512, 768), (4990, 5003)]
    rows = [each[i % len(each)] for i in range(Sq)]
    return torch.tensor(rows, dtype=torch.int32, device=device).view(1, 1, Sq, 2)


MASK = torch.linspace(-2, 2, 65 * 5003).view(1, 1, 65, 5003)
#: How scores are made, for up to 65 queries on 5003 keys, where `device` is the default one.
SCORES = {
    "softcap": lambda: dict(softcap=3.0),
    "sinks-in-the-softmax": lambda: dict(sink_logits=torch.tensor([0.5, -2.0, 5.0, -torch.inf])),
    "uniform": lambda: dict(scale=0.0),
    "negative-scale": lambda: dict(scale=-0.3, softcap=2.0),
    "large-scale": lambda: dict(scale=3000.0),
    "alibi": lambda: dict(alibi_slopes=torch.tensor([0.0, 0.01, 0.1, 1.0])),
    "padding-mask": lambda: dict(attn_mask=torch.arange(5003)[None, None, None] % 900 > 600),
    "bias": lambda: dict(attn_mask=MASK.to("cuda")),
    "deep-bias": lambda: dict(attn_mask=MASK.to("cuda") - 1e4),
    "huge-bias": lambda: dict(attn_mask=torch.full((1, 1, 65, 5003), -1e30)),
}


@pytest.mark.parametrize("Sq", [1, 17, 65])
@pytest.mark.parametrize("name", SCORES)
def test_score_modifiers(portable, device, name, Sq):
    shape = Shape(1, 4, 2, Sq, 5003, 64)
    with torch.device(device):
        common = SCORES[name]()
    if "attn_mask" in common:
        common["attn_mask"] = common["attn_mask"][:, :, :Sq]
    tensors = shape.make(device)
    for pattern in (sa.Full(), sa.Band((2900, 0), sinks=10)):
        check(portable, tensors, pattern, shape, **common)


@pytest.mark.parametrize("Sq", [1, 16, 65])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_chunks_without_keys_and_rows_without_keys(portable, device, Sq, is_causal):
    shape = Shape(1, 4, 2, Sq, 5003, 128)
    tensors = shape.make(device)
    bounds = bounds_of_rows(Sq, device)
    for first in range(0, 5 if Sq == 1 else 1):  # one row has each of the bounds in turn
        own = bounds_of_rows(5, device)[:, :, first : first + 1] if Sq == 1 else bounds
        one = check(portable, tensors, sa.Full(), shape, is_causal=is_causal, key_bounds=own)
        empty = (own[..., 0] == own[..., 1]).expand(1, 4, Sq)
        assert not one[0][empty].any() and torch.isneginf(one[1][empty]).all()
    out, lse = check(portable, tensors, sa.Full(), shape, is_causal=True, query_offset=-2)
    assert not out[:, :, :2].any() and torch.isneginf(lse[:, :, :2]).all()


@pytest.mark.parametrize("Sq", [1, 17])
@pytest.mark.parametrize("keys", [slice(300, 301), slice(512, 768)], ids=["a-key", "a-chunk"])
def test_nan_reaches_the_rows_that_see_it(portable, device, keys, Sq):
    shape = Shape(1, 4, 2, Sq, 5003, 64)
    for which in (1, 2):
        tensors = shape.make(device)
        tensors[which][:, :1, keys] = torch.nan
        out, _ = check(portable, tensors, sa.Full(), shape)
        assert out[:, :2].isnan().any(-1).all() and not out[:, 2:].isnan().any()


@pytest.mark.parametrize("Sq", [3, 65])
def test_memory_that_is_not_aligned(portable, device, Sq):
    """In an output with others between its rows, which stay as they are."""
    query, key, value = Shape(1, 4, 2, Sq, 3001, 72).make(device, memory="gaps")
    want = portable(query, key, value, sa.Full())
    assert_close_to_reference(want, query, key, value, sa.Full())
    for batch in (1, batch_that_fills(Shape(1, 4, 2, Sq))):
        buffer = torch.full((batch, Sq, 5, 75), 7.0, device=device)
        out = buffer[:, :, 1:, 2:74].transpose(1, 2)
        parts = (t.expand(batch, -1, -1, -1) for t in (query, key, value))
        portable(*parts, sa.Full(), out=out)
        assert torch.equal(out, want[0].expand_as(out))
        assert (buffer[:, :, :1] == 7).all() and (buffer[..., :2] == 7).all()
        assert (buffer[..., 74:] == 7).all()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_packed_sequences_have_the_bits_of_own_calls(portable, device, head_dim):
    """Those of many rows too, which take the kernel without chunks where they are alone."""
    rows, keys = (300, 1, 17, 65, 0, 256, 700), (3000, 5000, 4000, 4500, 9, 9000, 900)
    ragged = Ragged(rows, keys, 4, 2, head_dim)
    sequences = ragged.sequences(device, torch.float32)
    tensors = [packed(list(parts)) for parts in zip(*sequences, strict=True)]
    starts = [ragged.starts(device, lengths) for lengths in (rows, keys)]
    given = (*tensors, *starts, max(rows), max(keys))
    common = {"is_causal": True, "engine": "portable", "return_lse": True}
    out, lse = sa.varlen_attention(*given, **common)
    parts = zip(split(out, rows), split_lse(lse, rows), strict=True)
    for part, sequence in zip(parts, sequences, strict=True):
        want = portable(*sequence, sa.Full(), is_causal=True)
        assert all(map(torch.equal, part, want))


def test_a_graph_follows_offsets(portable, device):
    """Captured once: how many of the chunks have keys changes at each replay."""
    tensors = Shape(2, 8, 2, 1, 5000, 64).make(device)
    offsets = torch.tensor([10, 4000], dtype=torch.int32, device=device)
    common = dict(is_causal=True, query_offset=offsets)
    pattern = sa.Band((2000, 0), sinks=4)
    portable(*tensors, pattern, **common)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [portable(*tensors, pattern, **common) for _ in range(3)]
    for step in (0, 1, 300):
        offsets += step
        graph.replay()
        want = portable(*tensors, pattern, **common)
        for result in outs:
            assert all(map(torch.equal, result, want))
        assert_close_to_reference(want, *tensors, pattern, **common)


def test_a_batch_that_fills_the_device_takes_no_workspace(portable, device):
    """So the tests above compare the two ways, and not one with itself."""
    shape = Shape(1, 8, 2, 1, 8192, 64)
    tensors = shape.make(device)
    for batch, shared_out in ((1, True), (batch_that_fills(shape), False)):
        given = [t.expand(batch, -1, -1, -1) for t in tensors]
        result = portable(*given, sa.Full())
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        sa.sparse_attention(*given, sa.Full(), engine="portable", out=result[0])
        more = torch.cuda.max_memory_allocated() - before
        assert (more > 8 * 30 * 64 * 4) == shared_out and (more == 0) != shared_out
