"""Same inputs, same bits; a row's bits depend on its own batch entry and head alone."""

import pytest
import torch
from reference import DTYPES, PATTERNS, Shape, random_layout

import sparse_attn as sa
from sparse_attn.testing import assert_close_to_reference

SHAPE = Shape(3, 4, 2, 130, 197, 64)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", PATTERNS)
def test_same_bits_twice(attend, device, name, dtype):
    shape = attend.fit(SHAPE)
    query, key, value = shape.make(device, dtype)
    pattern = PATTERNS[name](shape, device)
    first = attend(pattern, query, key, value, is_causal=True, return_lse=True)
    again = attend(pattern, query, key, value, is_causal=True, return_lse=True)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def alone(pattern, b, h):
    """The pattern of one batch entry and head."""
    if not isinstance(pattern, sa.BlockSparse):
        return pattern
    layout = pattern.layout
    batch, lists = layout.counts.shape[:2]
    b, h = b % batch, h * lists // SHAPE.Hq
    counts, indices, partial = (
        None if tensor is None else tensor[b : b + 1, h : h + 1]
        for tensor in (layout.counts, layout.indices, layout.partial)
    )
    sizes = (layout.block_q, layout.block_kv, layout.num_kv_blocks)
    return sa.BlockSparse(sa.BlockLayout._trusted(counts, indices, *sizes, partial, layout.bits))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", PATTERNS)
def test_rows_do_not_see_their_neighbours(attend, device, name, dtype):
    shape = attend.fit(SHAPE)
    query, key, value = shape.make(device, dtype)
    pattern = PATTERNS[name](shape, device)
    out, lse = attend(pattern, query, key, value, is_causal=True, return_lse=True)
    for b, h in ((0, 0), (2, 3)):
        kv = slice(h // 2, h // 2 + 1)
        own = (query[b : b + 1, h : h + 1], key[b : b + 1, kv], value[b : b + 1, kv])
        one = attend(alone(pattern, b, h), *own, is_causal=True, return_lse=True)
        assert torch.equal(one[0][0, 0], out[b, h]) and torch.equal(one[1][0, 0], lse[b, h])


def few_rows(attend, device, Sq, head_dim, keys=9000):
    """Tensors of a batch of two, of so many heads that their query tiles fill a device."""
    most = 128
    if Sq >= 1000:
        keys, most = 33000, 16
    if device == "cpu":
        keys, most = 700, 16
    return Shape(2, most, most // 4, Sq, keys, head_dim).make(device, attend.dtype)


def assert_heads_change_no_bit(attend, query, key, value, **common):
    """Of few heads each chunk of keys has a thread block, of more a group of them, then a tile."""
    most = query.shape[1]
    calls = []
    for batch, heads in ((1, 4), (1, most // 4), (1, most // 2), (1, most), (2, most)):
        own = (query[:batch, :heads], key[:batch, : heads // 4], value[:batch, : heads // 4])
        parts = {name: tensor[:batch] for name, tensor in common.items()}
        out, lse = attend(sa.Full(), *own, is_causal=True, return_lse=True, **parts)
        calls.append((out[:1, :4], lse[:1, :4]))
    for out, lse in calls[1:]:
        assert torch.equal(out, calls[0][0]) and torch.equal(lse, calls[0][1])


@pytest.mark.parametrize("head_dim", [40, 64, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("Sq", [17, 64, 128, 250, 1000, 1300])
def test_few_rows_do_not_see_how_many_heads_there_are(attend, device, Sq, head_dim):
    assert_heads_change_no_bit(attend, *few_rows(attend, device, Sq, head_dim))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("Sq", [17, 100])
def test_nor_on_keys_of_the_most_chunks(attend, device, Sq, head_dim):
    assert_heads_change_no_bit(attend, *few_rows(attend, device, Sq, head_dim, keys=25000))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 160, 192, 224, 256])
@pytest.mark.parametrize("Sq", [9, 17, 40, 64])
def test_heads_that_share_a_tile_have_the_bits_of_one_alone(attend, device, Sq, head_dim):
    """On few keys or in a window, where heads of a tile each would be more than a device holds."""
    batch = 3 if device == "cpu" else 40
    for keys, pattern in ((100, sa.Full()), (500, sa.Full()), (3000, sa.Band((400, 0)))):
        if device == "cpu" and keys > 500:
            continue
        query, key, value = Shape(batch, 8, 2, Sq, keys, head_dim).make(device, attend.dtype)
        result = attend(pattern, query, key, value, is_causal=True, return_lse=True)
        for b, h in ((0, 0), (batch - 1, 5)):
            kv = slice(h // 4, h // 4 + 1)
            own = (query[b : b + 1, h : h + 1], key[b : b + 1, kv], value[b : b + 1, kv])
            one = attend(pattern, *own, is_causal=True, return_lse=True)
            for mine, shared in zip(one, result, strict=True):
                assert torch.equal(mine[0, 0], shared[b, h])
            assert_close_to_reference(one, *own, pattern, is_causal=True)


@pytest.mark.parametrize("head_dim", [64, 80, 112, 128, 224])
@pytest.mark.parametrize("Sq", [17, 250, 1000])
@pytest.mark.parametrize("known", ["offsets", "bounds"])
def test_nor_do_those_of_which_the_device_alone_knows(attend, device, known, Sq, head_dim):
    """Where queries stand, or what they see: some rows no key."""
    query, key, value = few_rows(attend, device, Sq, head_dim)
    keys = key.shape[2]
    offsets = torch.tensor([keys - Sq - 70, keys - Sq], dtype=torch.int32, device=device)
    row = torch.arange(Sq, device=device)
    bounds = torch.stack([row % 300, torch.where(row % 5 == 0, 0, keys - row % 7)], -1)
    bounds = bounds.int().expand(2, 1, Sq, 2)
    common = {"query_offset": offsets} if known == "offsets" else {"key_bounds": bounds}
    assert_heads_change_no_bit(attend, query, key, value, **common)
    own = (query[:1, :4], key[:1, :1], value[:1, :1])
    parts = {name: tensor[:1] for name, tensor in common.items()}
    result = attend(sa.Full(), *own, is_causal=True, return_lse=True, **parts)
    assert_close_to_reference(result, *own, is_causal=True, **parts)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 208, 256])
@pytest.mark.parametrize("Sq, keys", [(9, 4000), (60, 4000), (600, 4000), (700, 17000)])
def test_bits_do_not_depend_on_who_knows_where_queries_stand(attend, device, Sq, keys, head_dim):
    """The host or the device alone: kernels differ, as keys past the queries may be any."""
    keys = 800 if device == "cpu" else keys
    query, key, value = Shape(2, 4, 2, Sq, keys, head_dim).make(device, attend.dtype)
    offset = keys - Sq - 130
    offsets = torch.full((2,), offset, dtype=torch.int32, device=device)
    for pattern in (sa.Full(), sa.Band((500, 0))):
        common = {"is_causal": True, "return_lse": True}
        host = attend(pattern, query, key, value, query_offset=offset, **common)
        own = attend(pattern, query, key, value, query_offset=offsets, **common)
        assert torch.equal(host[0], own[0]) and torch.equal(host[1], own[1])


def test_bits_do_not_depend_on_memory_layout(attend, device):
    shape = attend.fit(Shape(2, 2, 2, 90, 90, 64))
    query, key, value = shape.make(device, attend.dtype, memory="gaps")
    layout = sa.BlockSparse(random_layout(shape.Sq, 90, shape.block, 16, device))
    for pattern in (sa.Full(), sa.Band(30, sinks=3), sa.Dilated(9, 3), layout, sa.TopK(9)):
        strided = attend(pattern, query, key, value)
        dense = attend(pattern, query.contiguous(), key.contiguous(), value.contiguous())
        assert torch.equal(strided, dense)


def test_bits_do_not_depend_on_the_number_of_threads(attend, device):
    shape = attend.fit(SHAPE)
    if device != "cpu":
        pytest.skip("threads are the CPU's")
    query, key, value = shape.make(device, attend.dtype)
    threads = torch.get_num_threads()
    for name in PATTERNS:
        pattern = PATTERNS[name](shape, device)
        out = attend(pattern, query, key, value)
        try:
            torch.set_num_threads(1 if threads > 1 else 2)
            other = attend(pattern, query, key, value)
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(out, other), name
