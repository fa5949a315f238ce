"""Few queries on many keys: the engine `decode`, which splits the keys."""

import pytest
import torch
from engines import cuda_engine
from ragged import Ragged, alone, make_pages
from reference import PATTERNS, Shape, random_layout

import sparse_attn as sa
from sparse_attn.testing import assert_close_to_reference

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
WHOLE = ("topk", "topk-in-blocks", "band-scattered")
SPLIT = {name: make for name, make in PATTERNS.items() if name not in WHOLE}
#: More patterns, of sizes that matter on thousands of keys.
LONG = {
    "full": lambda s, device: sa.Full(),
    "band": lambda s, device: sa.Band((1023, 70)),
    "band-sinks": lambda s, device: sa.Band((700, 0), sinks=133),
    "band-sinks-ahead": lambda s, device: sa.Band((None, 0), sinks=4000),
    "globals": lambda s, device: sa.Band((300, 90), global_tokens=2500),
    "dilated": lambda s, device: sa.Dilated((400, 30), 5, sinks=37),
    "strided": lambda s, device: sa.Strided(300, 7),
    "blocks-16": lambda s, device: sa.BlockSparse(random_layout(s.Sq, s.Skv, 16, 16, device)),
    "blocks-of-heads": lambda s, device: sa.BlockSparse(
        random_layout(s.Sq, s.Skv, 128, 128, device, s.B, s.Hq, 0.3)
    ),
    "block-topk": lambda s, device: sa.BlockTopK(64, budget_share=0.2, local_blocks=1),
}


@pytest.fixture
def split(device):
    return cuda_engine(device, "decode")


def check(split, tensors, pattern, **common):
    result = split(*tensors, pattern, return_lse=True, **common)
    assert_close_to_reference(result, *tensors, pattern, return_lse=True, **common)
    return result


def bounds_of_rows(shape, device):
    """Random intervals for every head and row; the first row has no keys."""
    low = torch.randint(0, shape.Skv, (shape.B, shape.Hq, shape.Sq), device=device)
    size = torch.randint(0, shape.Skv, low.shape, device=device)
    size[..., 0] = 0
    return torch.stack([low, low + size], -1).int()


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("Sq", [1, 3, 16])
@pytest.mark.parametrize("name", SPLIT)
def test_every_pattern(split, device, name, Sq, dtype):
    shape = Shape(2, 6, 2, Sq, 203, 64)
    tensors = shape.make(device, dtype)
    pattern = SPLIT[name](shape, device)
    for is_causal in (False, True):
        for offset in (None, 0, 90):
            check(split, tensors, pattern, is_causal=is_causal, query_offset=offset)


@pytest.mark.parametrize("Sq", [1, 5, 16])
@pytest.mark.parametrize("name", LONG)
def test_many_chunks(split, device, name, Sq):
    shape = Shape(2, 8, 2, Sq, 9001, 128)
    tensors = shape.make(device, torch.bfloat16)
    pattern = LONG[name](shape, device)
    for is_causal in (False, True):
        check(split, tensors, pattern, is_causal=is_causal)
    offsets = torch.tensor([8000, 17], dtype=torch.int32, device=device)
    bounds = bounds_of_rows(shape, device)
    check(split, tensors, pattern, is_causal=True, query_offset=offsets, key_bounds=bounds)


@pytest.mark.parametrize("memory", ["transposed", "gaps"])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (4, 4), (40, 2)], ids=str)
def test_every_shape(split, device, heads, head_dim, memory):
    shape = Shape(1, *heads, 2, 515, head_dim)
    for dtype in HALF.values():
        tensors = shape.make(device, dtype, memory)
        for pattern in (sa.Full(), sa.Band((200, 3), sinks=5)):
            check(split, tensors, pattern)


@pytest.mark.sanitizer
@pytest.mark.parametrize("head_dim", [64, 80])
def test_split_keys_stay_inside_their_tensors(split, device, head_dim):
    """Compared on the CPU: a sanitizer then watches the package's kernels, not the comparison's."""
    tensors = Shape(1, 7, 1, 2, 515, head_dim).make(device, torch.bfloat16, "gaps")
    pattern = sa.Band((200, 3), sinks=5)
    result = split(*tensors, pattern, return_lse=True)
    result, tensors = ([tensor.cpu() for tensor in group] for group in (result, tensors))
    assert_close_to_reference(tuple(result), *tensors, pattern, return_lse=True)


def test_one_key(split, device):
    tensors = Shape(2, 4, 2, 1, 1).make(device, torch.float16)
    out, lse = check(split, tensors, sa.Full())
    assert torch.equal(out, tensors[2].repeat_interleave(2, 1)) and lse.isfinite().all()


SCORES = {
    "softcap": dict(softcap=3.0),
    "sinks-in-the-softmax": dict(sink_logits=torch.tensor([0.5, -2.0, 5.0, -torch.inf])),
    "uniform": dict(scale=0.0),
    "negative-scale": dict(scale=-0.3, softcap=2.0),
    "padding-mask": dict(attn_mask=torch.arange(3000)[None, None, None] % 3 > 0),
    "bias": dict(attn_mask=torch.linspace(-2, 2, 4 * 12 * 3000).view(1, 4, 12, 3000)),
}


@pytest.mark.parametrize("Sq", [2, 12])
@pytest.mark.parametrize("common", SCORES.values(), ids=SCORES)
def test_score_modifiers(split, device, common, Sq):
    tensors = Shape(2, 4, 2, Sq, 3000, 64).make(device, torch.float16)
    common = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in common.items()}
    if common.get("attn_mask") is not None and common["attn_mask"].is_floating_point():
        common["attn_mask"] = common["attn_mask"][:, :, :Sq].half()
    for pattern in (sa.Full(), sa.Band((900, 0), sinks=10), sa.Dilated(100, 3)):
        check(split, tensors, pattern, **common)


def test_rows_without_keys(split, device):
    tensors = Shape(1, 4, 2, 4, 2048, 64).make(device, torch.bfloat16)
    out, lse = check(split, tensors, sa.Full(), is_causal=True, query_offset=-2)
    assert (out[:, :, :2] == 0).all() and torch.isneginf(lse[:, :, :2]).all()
    assert lse[:, :, 2:].isfinite().all()


def test_keys_beyond_the_length_never_count(split, device):
    query, key, value = Shape(2, 4, 2, 1, 4000, 128).make(device, torch.float16)
    bounds = torch.tensor([0, 2501], dtype=torch.int32, device=device).expand(2, 1, 1, 2)
    want = split(query, key, value, sa.Full(), key_bounds=bounds)
    key[:, :, 2501:], value[:, :, 2501:] = torch.nan, torch.inf
    assert torch.equal(split(query, key, value, sa.Full(), key_bounds=bounds), want)


@pytest.mark.parametrize("Sq", [2, 12])
@pytest.mark.parametrize("name", [name for name in LONG if name != "block-topk"])
def test_bits_of_a_row_are_its_own(split, device, name, Sq):
    """Neither batch, nor other heads, nor their bounds, nor the run change a row."""
    shape = Shape(3, 8, 2, Sq, 12007, 64)  # two groups of chunks
    query, key, value = shape.make(device, torch.float16)
    pattern = LONG[name](shape, device)
    bounds = bounds_of_rows(shape, device)
    bounds[2, 5] = torch.tensor([1100, 11900], device=device)
    common = dict(is_causal=True, return_lse=True)
    out, lse = split(query, key, value, pattern, key_bounds=bounds, **common)
    again = split(query, key, value, pattern, key_bounds=bounds, **common)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    for b, h in ((0, 0), (2, 5)):
        kv = slice(h // 4, h // 4 + 1)
        own = (query[b : b + 1, h : h + 1], key[b : b + 1, kv], value[b : b + 1, kv])
        its = pattern
        if name == "blocks-of-heads":
            mask = pattern.layout.to_mask()[b, h]
            its = sa.BlockSparse(sa.BlockLayout.from_mask(mask, 128, 128))
        one = split(*own, its, key_bounds=bounds[b : b + 1, h : h + 1], **common)
        assert torch.equal(one[0][0, 0], out[b, h]) and torch.equal(one[1][0, 0], lse[b, h])


@pytest.mark.parametrize("name", ["full", "band"])
@pytest.mark.parametrize("Sq, Skv", [(5, 1000), (3, 20003), (12, 20003)])
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
def test_bits_of_a_row_on_codes_are_its_own(split, device, head_dim, Sq, Skv, name):
    """Alone a head has a tile of 16 rows, beside others one of 32, or two."""
    shape = Shape(2, 16, 2, Sq, Skv, head_dim)
    query, key, value = shape.make(device, torch.bfloat16)
    key, value = (tensor.to(torch.float8_e4m3fn) for tensor in (key, value))
    scales = {name: torch.rand(2, 2, device=device) + 0.5 for name in ("key_scale", "value_scale")}
    pattern = LONG[name](shape, device)
    common = dict(is_causal=True, return_lse=True)
    out, lse = split(query, key, value, pattern, **common, **scales)
    for b, h in ((0, 0), (1, 13)):
        kv = slice(h // 8, h // 8 + 1)
        own = (query[b : b + 1, h : h + 1], key[b : b + 1, kv], value[b : b + 1, kv])
        its = {name: scale[b : b + 1, kv] for name, scale in scales.items()}
        one = split(*own, pattern, **common, **its)
        assert torch.equal(one[0][0, 0], out[b, h]) and torch.equal(one[1][0, 0], lse[b, h])


@pytest.mark.parametrize("Sq", [1, 12])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("Skv", [5003, 20003, 70003])
def test_bounds_that_hold_every_key_change_no_bit(split, device, Skv, head_dim, Sq):
    """Calls without bounds have a kernel of their own."""
    tensors = Shape(2, 4, 2, Sq, Skv, head_dim).make(device, torch.bfloat16)
    bounds = torch.tensor([0, Skv], dtype=torch.int32, device=device).expand(2, 1, Sq, 2)
    for pattern in (sa.Full(), sa.Band((1500, 20))):
        for is_causal in (False, True):
            common = dict(is_causal=is_causal, return_lse=True)
            plain = split(*tensors, pattern, **common)
            general = split(*tensors, pattern, key_bounds=bounds, **common)
            assert all(map(torch.equal, plain, general))


def test_graph_follows_a_growing_cache(split, device):
    tensors = Shape(2, 8, 2, 1, 5000, 64).make(device, torch.bfloat16)
    offsets = torch.tensor([10, 4000], dtype=torch.int32, device=device)
    common = dict(is_causal=True, query_offset=offsets)
    pattern = sa.Band(700, sinks=4)
    split(*tensors, pattern, **common)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = split(*tensors, pattern, **common)
    for step in (0, 1, 300):
        offsets += step
        graph.replay()
        assert torch.equal(out, split(*tensors, pattern, **common))
        assert_close_to_reference(out, *tensors, pattern, **common)


@pytest.mark.parametrize("Sq", [1, 5, 12])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 160, 256])
@pytest.mark.parametrize("Skv", [1, 128, 256, 257, 400, 1000, 2049, 4096, 17000, 33003, 70001])
def test_who_merges_changes_no_bit(split, device, Skv, head_dim, Sq):
    """The thread blocks that wrote chunks, a kernel after them, or none, of the largest batches."""
    most = 280 if Skv <= 4096 else 40 if Skv <= 17000 else 12
    query, key, value = Shape(most, 8, 2, Sq, Skv, head_dim).make(device, torch.bfloat16)
    bounds = torch.tensor([Skv // 9, Skv], dtype=torch.int32, device=device)
    bounds = bounds.expand(most, 1, Sq, 2)
    cases = [
        (sa.Full(), dict(is_causal=True)),
        (sa.Full(), dict(key_bounds=bounds)),
        (sa.Band((900, 0), sinks=3), dict(is_causal=True)),
    ]
    for pattern, common in cases:
        common["return_lse"] = True
        many = split(query, key, value, pattern, **common)
        for batch in (1, 3, 40, 100):
            if "key_bounds" in common:
                common["key_bounds"] = bounds[:batch]
            few = split(query[:batch], key[:batch], value[:batch], pattern, **common)
            assert torch.equal(few[0], many[0][:batch]) and torch.equal(few[1], many[1][:batch])


def test_calls_on_two_streams_do_not_meet(split, device):
    calls = []
    for _ in range(2):
        tensors = Shape(1, 32, 8, 1, 4000, 128).make(device, torch.bfloat16)
        calls.append((tensors, split(*tensors, sa.Full()), torch.cuda.Stream()))
    torch.cuda.synchronize()
    results = []
    for _ in range(50):
        for tensors, want, stream in calls:
            with torch.cuda.stream(stream):
                results.append((split(*tensors, sa.Full()), want))
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out, want in results)


@pytest.mark.parametrize("Skv", [100, 1000, 4096, 40000])
def test_a_graph_of_many_calls_repeats_its_bits(split, device, Skv):
    """Each call may begin before the one in front of it has ended, and takes over its workspace."""
    tensors = [Shape(1, 32, 8, 1, Skv, 128).make(device, torch.bfloat16) for _ in range(2)]
    want = [split(*three, sa.Full()) for three in tensors]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [split(*three, sa.Full()) for _ in range(10) for three in tensors]
    for _ in range(20):
        for out in outs:
            out.zero_()
        graph.replay()
        assert all(torch.equal(out, want[i % 2]) for i, out in enumerate(outs))


#: More sequences than a warp has lanes, most of them short; some have no keys.
UNEVEN = tuple(0 if b % 13 == 5 else round(17 * 1000 ** (b * 29 % 70 / 69)) for b in range(70))
#: Some of them long, whose groups of chunks are small.
LONG_TEXTS = (33000, 500, 70001, 40001, 0, 131100, 65536, 20000)
#: Short ones, each of which is one chunk.
SHORT = tuple(b * 37 % 257 for b in range(70))


@pytest.mark.parametrize("page_size", [16, 48, 64])
@pytest.mark.parametrize("name", ["full", "band", "band-sinks", "dilated"])
def test_uneven_sequences_have_bits_of_their_own(split, device, name, page_size):
    """Thread blocks are shared out by the lengths of all, which changes no bit of one."""
    check_uneven(split, device, name, page_size, UNEVEN)


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("head_dim, value_dim", [(40, 40), (96, 96), (192, 128), (72, 136)])
def test_uneven_sequences_of_other_head_dims(split, device, head_dim, value_dim, coarse):
    check_uneven(split, device, "full", 48, UNEVEN, coarse, head_dim, value_dim)


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("name", ["full", "band", "band-sinks"])
@pytest.mark.parametrize("rows", [6, 11])
def test_uneven_sequences_of_several_queries(split, device, rows, name, head_dim, coarse):
    """Whose heads have a tile of 32 rows, or two; at head dim 256 tiles of 16."""
    check_uneven(split, device, name, 64, UNEVEN, coarse, head_dim, head_dim, rows)


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("more", [0, 30], ids=["alone", "among"])
def test_long_texts_have_bits_of_their_own(split, device, more, rows, head_dim, coarse):
    """Alone a text has a thread block for each chunk, among others one for each group."""
    lengths = LONG_TEXTS + (32000,) * more
    check_uneven(split, device, "full", 64, lengths, coarse, head_dim, head_dim, rows)


@pytest.mark.parametrize("lengths", [LONG_TEXTS, (131100, 100, 300)], ids=["many", "one"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rows", [1, 5])
def test_long_texts_of_many_heads(split, device, rows, head_dim, lengths):
    """Eight key heads share out groups, of one of which each chunk is a thread block's."""
    ragged = Ragged((rows,) * len(lengths), lengths, 8, 8, head_dim)
    sequences = ragged.sequences(device, torch.bfloat16)
    queries, keys, values = zip(*sequences, strict=True)
    pages = make_pages(keys, values, 64)
    caches = (pages.key, pages.value, pages.table, pages.used)
    given = {"is_causal": True, "return_lse": True}
    out, lse = sa.paged_attention(torch.cat(queries), *caches, engine="decode", **given)
    for b, sequence in enumerate(sequences):
        whole = split(*sequence, sa.Full(), **given)
        head = split(*(tensor[:, 3:4] for tensor in sequence), sa.Full(), **given)
        assert torch.equal(out[b : b + 1], whole[0]) and torch.equal(lse[b : b + 1], whole[1])
        assert torch.equal(out[b : b + 1, 3:4], head[0]) and torch.equal(lse[b, 3], head[1][0, 0])


def test_short_sequences_under_a_long_bound(split, device):
    """A server's call knows the longest length that may come, and few are as long."""
    batch, heads, pages, page_size = 64, 32, 2048, 64
    cache = torch.randn(16, page_size, 8, 128, device=device, dtype=torch.bfloat16)
    query = torch.randn(batch, heads, 1, 128, device=device, dtype=torch.bfloat16)
    table = torch.zeros(batch, pages, dtype=torch.int32, device=device)
    used = torch.full((batch,), 100, dtype=torch.int32, device=device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sa.paged_attention(query, cache, cache, table, used, engine="decode")
    results = batch * heads * 35 * (128 + 2) * 4  # a row has room for 35 partial ones
    assert torch.cuda.max_memory_allocated() - before < results + 2**21


@pytest.mark.parametrize("Skv", [40000, 70001, 131100])
@pytest.mark.parametrize("Sq", [1, 5])
def test_long_texts_that_rows_see_in_part(split, device, Sq, Skv):
    """There are fewer groups then than thread blocks that share them."""
    tensors = Shape(2, 8, 8, Sq, Skv, 64).make(device, torch.bfloat16)
    check(split, tensors, sa.Full(), is_causal=True, query_offset=1500)
    low = torch.tensor([Skv // 2, 3], device=device).view(2, 1, 1).expand(2, 1, Sq)
    bounds = torch.stack([low, low + 1700], -1).int()
    check(split, tensors, sa.Full(), key_bounds=bounds)


@pytest.mark.parametrize("page_size", [16, 48])
@pytest.mark.parametrize("name", ["full", "band", "band-sinks", "dilated"])
def test_short_sequences_have_bits_of_their_own(split, device, name, page_size):
    check_uneven(split, device, name, page_size, SHORT)


@pytest.mark.parametrize("page_size", [16, 48, 64])
@pytest.mark.parametrize("name", ["full", "band", "band-sinks"])
def test_uneven_sequences_of_float8_have_bits_of_their_own(split, device, name, page_size):
    check_uneven(split, device, name, page_size, UNEVEN, coarse=True)


def check_uneven(
    split, device, name, page_size, lengths, coarse=False, head_dim=128, value_dim=128, rows=1
):
    ragged = Ragged((rows,) * len(lengths), lengths, 8, 2, head_dim, value_dim)
    sequences = ragged.sequences(device, torch.bfloat16)
    if coarse:
        kind = torch.float8_e4m3fn
        sequences = [(q, k.to(kind), v.to(kind)) for q, k, v in sequences]
    queries, keys, values = zip(*sequences, strict=True)
    pages = make_pages(keys, values, page_size)
    pattern = LONG[name](Shape(1, 8, 2, rows, max(lengths), 128), device)
    given = {"pattern": pattern, "is_causal": True, "engine": "decode", "return_lse": True}
    caches = (pages.key, pages.value, pages.table, pages.used)
    out, lse = sa.paged_attention(torch.cat(queries), *caches, **given)
    for b, sequence in enumerate(sequences):
        own = alone(pattern, b, rows, lengths[b])
        want = split(*sequence, own, is_causal=True, return_lse=True)
        assert torch.equal(out[b : b + 1], want[0]) and torch.equal(lse[b : b + 1], want[1])
