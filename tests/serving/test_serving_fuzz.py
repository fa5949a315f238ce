"""Property test: ragged batches, pages and codes of 8 bits have the bits of each sequence alone."""

import pytest
import torch
from engines import main_dtype, serves
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ragged import RAGGED_PATTERNS, Ragged, Serving, alone, make_pages, packed, split, split_lse

import sparse_attn as sa

PATTERNS = [name for name in RAGGED_PATTERNS if name != "blocks-of-all"]
lengths = st.one_of(st.integers(0, 90), st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 129, 300]))


@st.composite
def batches(draw, most_rows, value_dims):
    count = draw(st.integers(1, 5))
    rows = tuple(min(draw(lengths), most_rows) for _ in range(count))
    keys = tuple(draw(lengths) for _ in range(count))
    heads_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 4))
    head_dim, value_dim = (draw(st.sampled_from([16, 64, 72, 128])) for _ in range(2))
    if not draw(st.booleans()) or not value_dims:
        value_dim = head_dim
    return Ragged(rows, keys, heads_kv * group, heads_kv, head_dim, value_dim)


def call(serving, ragged, sequences, pattern, page_size, layout, common):
    """One call for all sequences: packed keys, or pages where there is a page size."""
    device = sequences[0][0].device
    queries, keys, values = (list(part) for part in zip(*sequences, strict=True))
    query, starts = packed(queries, gap=2), ragged.starts(device, ragged.rows)
    given = {"pattern": pattern, "return_lse": True, **common}
    if page_size is None:
        starts_k = ragged.starts(device, ragged.keys)
        bounds = (ragged.bound(5), max(ragged.keys) + 9)
        tensors = (query, packed(keys), packed(values), starts, starts_k, *bounds)
        return serving(sa.varlen_attention, *tensors, **given)
    pages = make_pages(keys, values, page_size, layout)
    caches = (pages.key, pages.value, pages.table, pages.used)
    given |= {"cu_seq_q": starts, "max_q": ragged.bound(5)}
    return serving(sa.paged_attention, query, *caches, **given)


@pytest.fixture
def serving(device, engine):
    """Calls with the engine; skips the property where that serves no packed sequences."""
    serving = Serving(device, engine)
    query = torch.zeros(1, 1, 64, device=device, dtype=main_dtype(device, engine))
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    serving(sa.varlen_attention, query, query, query, starts, starts, 1, 1)
    return serving


@given(data=st.data())
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
    ],
)
def test_fuzz(serving, device, engine, data):
    torch.manual_seed(data.draw(st.integers(0, 2**16), label="seed"))
    most_rows = 16 if engine == "decode" else 300
    value_dims = serves(device, engine, None, 64, value_dim=72)
    ragged = data.draw(batches(most_rows, value_dims), label="batch")
    half = [torch.float16, torch.bfloat16]
    dtype = data.draw(st.sampled_from([main_dtype(device, engine), *half]), label="dtype")
    name = data.draw(st.sampled_from(PATTERNS), label="pattern")
    pattern = RAGGED_PATTERNS[name](max(ragged.rows), max(ragged.keys), device)
    page_size = data.draw(st.sampled_from([None, 16, 48, 128]), label="page size")
    layout = data.draw(st.sampled_from(["separate", "interleaved"]), label="layout")
    common = {
        "is_causal": data.draw(st.booleans()),
        "softcap": data.draw(st.sampled_from([0.0, 0.0, 5.0])),
        "scale": data.draw(st.sampled_from([None, 0.5, -0.2])),
    }
    sequences = ragged.sequences(device, dtype)
    float8 = dtype in half and data.draw(st.booleans(), label="float8")
    scales = [{} for _ in sequences]
    if float8:
        kind = torch.float8_e4m3fn
        sequences = [(q, k.to(kind), v.to(kind)) for q, k, v in sequences]
        made = torch.rand(2, len(sequences), ragged.Hkv, device=device) + 0.5
        names = ("key_scale", "value_scale")
        scales = [dict(zip(names, made[:, b], strict=True)) for b in range(len(sequences))]
        common |= dict(zip(names, made, strict=True))
    out, lse = call(serving, ragged, sequences, pattern, page_size, layout, common)
    parts = zip(split(out, ragged.rows), split_lse(lse, ragged.rows), strict=True)
    for b, (part, sequence) in enumerate(zip(parts, sequences, strict=True)):
        own = alone(pattern, b, ragged.rows[b], ragged.keys[b])
        given = {**common, **scales[b], "engine": engine, "return_lse": True}
        want = sa.sparse_attention(*sequence, own, **given)
        for mine, other in zip(part, want, strict=True):
            assert torch.equal(mine, other)
