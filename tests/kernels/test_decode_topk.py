"""Token top-k of few queries: scores in the workspace, a thread block for each row's choice."""

import pytest
import torch
from engines import cuda_engine
from ragged import make_pages
from reference import Shape

import sparse_attn as sa
from sparse_attn.testing import assert_close_to_reference

#: What joins scores, of (2, 4, Sq, 7000) of them, once they are ranked; a mask leaves some rows
#: less than is kept.
TRANSFORMS = {
    "softcap": lambda Sq, device: {"softcap": 20.0},
    "scale": lambda Sq, device: {"scale": -0.2},
    "alibi": lambda Sq, device: {"alibi_slopes": torch.tensor([0.5, 0.125, 0, 1 / 64]).to(device)},
    "mask": lambda Sq, device: {"attn_mask": rising(torch.rand(2, 1, Sq, 7000, device=device))},
    "bias": lambda Sq, device: {"attn_mask": 2 * torch.randn(4, Sq, 7000, device=device)},
}
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
LONG = 8192  # keys, of which a sample of every fourth bounds the choice


def rising(numbers):
    """A mask of which the first row allows no key, and the last one every second."""
    rows = numbers.shape[-2]
    share = torch.linspace(0, 0.5, rows, device=numbers.device)
    return numbers < share.square()[:, None]


@pytest.fixture
def few(device):
    return cuda_engine(device, "decode", filled=True)


def tensors_of(scores, dtype, heads=1):
    """Query, key and value with those scores ``(keys)``, whole numbers up to 2^16, exactly."""
    key = torch.zeros(1, heads, scores.numel(), 16, device=scores.device, dtype=dtype)
    key[..., 0], key[..., 1] = scores // 256, scores % 256
    query = torch.zeros(1, heads, 1, 16, device=scores.device, dtype=dtype)
    query[..., 0], query[..., 1] = 256, 1
    return query, key, torch.randn_like(key)


def check(few, scores, dtype, k):
    """The k highest are kept, of equal ones the lower keys, and nothing else."""
    tensors = tensors_of(scores, dtype)
    order = torch.sort(scores, descending=True, stable=True).indices
    kept = torch.zeros(1, scores.numel(), dtype=torch.bool, device=scores.device)
    kept[0, order[:k]] = True
    common = dict(scale=1e-4, return_lse=True)
    result = few(*tensors, sa.TopK(k), **common)
    result = tuple(part.cpu() for part in result)  # where sanitizers see no product of torch's own
    assert_close_to_reference(
        result, *(tensor.cpu() for tensor in tensors), attn_mask=kept.cpu(), **common
    )


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("k", [1, 64, 2048])
@pytest.mark.parametrize("sampled", ["highest", "lowest", "equal", "like all"])
def test_whatever_the_sample_says(few, device, sampled, k, dtype):
    """A bound that too few or too many reach; the sample is every fourth key."""
    scores = torch.randperm(LONG, device=device) + LONG
    if sampled == "highest":
        scores[::4] += 2 * LONG
    elif sampled == "lowest":
        scores[::4] -= LONG
    elif sampled == "equal":
        scores[::4] = 2 * LONG
    check(few, scores, dtype, k)


@pytest.mark.sanitizer
def test_rows_with_and_without_a_sample(few, device):
    for keys in (300, 7000):
        check(few, torch.randperm(keys).to(device), torch.bfloat16, 64)


@pytest.mark.parametrize("keys", [3000, LONG, 20_000])
@pytest.mark.parametrize("k", [1, 700, 2048])
@pytest.mark.parametrize("values", [1, 3, 200])
def test_ties_go_to_the_lower_key(few, device, keys, k, values):
    check(few, torch.randint(values, (keys,), device=device), torch.bfloat16, k)


@pytest.mark.parametrize("Sq", [1, 16, 64])
def test_heads_are_served_in_parts(few, device, Sq):
    """Scores of 64 MiB at once, and the bits of each key head alone."""
    shape = Shape(2, 32, 8, Sq, 320_000 // Sq, 64)
    query, key, value = shape.make(device, torch.bfloat16)
    out = torch.empty_like(query)
    few(query, key, value, sa.TopK(100), is_causal=True, out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    few(query, key, value, sa.TopK(100), is_causal=True, out=out)
    assert torch.cuda.max_memory_allocated() - before < 65 * 2**20
    for batch, head in ((0, 0), (0, 7), (1, 3), (1, 7)):
        heads = slice(4 * head, 4 * head + 4)
        alone = few(
            query[batch : batch + 1, heads],
            key[batch : batch + 1, head : head + 1],
            value[batch : batch + 1, head : head + 1],
            sa.TopK(100),
            is_causal=True,
        )
        assert torch.equal(out[batch : batch + 1, heads], alone)


@pytest.mark.parametrize("page_size", [16, 64])
def test_pages_of_long_rows_have_the_bits_of_contiguous_keys(few, device, page_size):
    query, key, value = Shape(2, 6, 2, 3, 9000, 128).make(device, torch.float16)
    keys = [key[:1], key[1:, :, :6500]]
    values = [value[:1], value[1:, :, :6500]]
    pages = make_pages(keys, values, page_size)
    paged = sa.paged_attention(
        query,
        pages.key,
        pages.value,
        pages.table,
        pages.used,
        pattern=sa.TopK(300),
        is_causal=True,
        engine="decode",
    )
    for i in range(2):
        alone = few(query[i : i + 1], keys[i], values[i], sa.TopK(300), is_causal=True)
        assert torch.equal(paged[i : i + 1], alone)


@pytest.mark.parametrize("Sq", [5, 43])
@pytest.mark.parametrize("name", ["bounds", "offsets", "sinks", "value-dim", *TRANSFORMS])
def test_long_rows_with(few, device, name, Sq):
    shape = Shape(2, 4, 2, Sq, 7000, 64)
    query, key, value = shape.make(device, torch.bfloat16)
    common = {}
    if name == "bounds":
        low = torch.randint(0, 7000, (2, 4, Sq), device=device)
        size = torch.randint(0, 7000, low.shape, device=device)
        size[..., 0] = 0
        common["key_bounds"] = torch.stack([low, low + size], -1).int()
    elif name == "offsets":
        common["query_offset"] = torch.tensor([6500, -3], dtype=torch.int32, device=device)
    elif name in TRANSFORMS:
        query, key = (torch.randint_like(tensor, -3, 4) for tensor in (query, key))  # exact ranks
        common |= TRANSFORMS[name](Sq, device)
    elif name == "sinks":
        common["sink_logits"] = torch.randn(4, device=device)
    else:
        value = torch.randn(2, 2, 7000, 200, device=device, dtype=torch.bfloat16)
    common |= dict(is_causal=True, return_lse=True)
    result = few(query, key, value, sa.TopK(200), **common)
    assert_close_to_reference(result, query, key, value, sa.TopK(200), engine="decode", **common)


def test_what_it_leaves_to_others(few, device):
    query, key, value = Shape(1, 4, 2, 2, 4000, 64).make(device, torch.bfloat16)
    assert sa.can_use(query, key, value, sa.TopK(2048)).engine == "decode"
    codes = [tensor.to(torch.float8_e4m3fn) for tensor in (key, value)]
    for keys, k, words in (
        ((key, value), 2049, "token top-k of up to 2048 keys, not 2049"),
        (codes, 9, "no keys of float8 with token top-k"),
    ):
        assert sa.can_use(query, *keys, sa.TopK(k)).engine not in ("decode", None)
        with pytest.raises(NotImplementedError, match=f"decode takes {words}"):
            few(query, *keys, sa.TopK(k))
