"""Property test: the lists of block top-k follow from the definitions in ``selection``.

Packed and paged sequences have the lists of each alone: tests/serving/test_chosen_blocks.py.
"""

import dataclasses

import pytest
import torch
from fuzz import run_cases
from hypothesis import strategies as st
from reference import DTYPES, Shape
from selection import DTYPE_ERRORS, SELECTORS, check_selection
from selection_cases import scores_of, selections

import sparse_attn as sa

lengths = st.one_of(st.integers(1, 100), st.sampled_from([1, 15, 16, 17, 64, 65, 129, 300]))


@st.composite
def commons(draw, shape, device):
    common = {
        "is_causal": draw(st.booleans()),
        "scale": draw(st.sampled_from([None, 2 * shape.D**-0.5, -0.4 * shape.D**-0.5, 0.0])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 1.5, 30.0])),
    }
    offset = draw(st.sampled_from(["none", "int", "tensor"]))
    if offset == "int":
        common["query_offset"] = draw(st.sampled_from([0, -5, 23, -shape.Sq, shape.Skv, 10**6]))
    elif offset == "tensor":
        places = st.sampled_from([0, -20, 90, shape.Skv - shape.Sq, 2**31 - 1, -(2**31)])
        offsets = [draw(places) for _ in range(shape.B)]
        common["query_offset"] = torch.tensor(offsets, dtype=torch.int32, device=device)
    if draw(st.integers(0, 3)) == 0:
        size = (shape.B, draw(st.sampled_from([1, shape.Hq])), shape.Sq)
        low = torch.randint(-5, shape.Skv + 5, size)
        length = torch.randint(draw(st.sampled_from([2, 60, shape.Skv + 10])), size)
        bounds = torch.stack([low, low + length], -1).int()
        common["key_bounds"] = bounds.expand(shape.B, shape.Hq, shape.Sq, 2).clone().to(device)
    if draw(st.integers(0, 3)) == 0:
        origins = torch.randint(-40, shape.Skv + 20, (shape.B,), dtype=torch.int32)
        common["key_origin"] = origins.to(device)
    return common


@pytest.mark.parametrize("selector", [*SELECTORS, "scores"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_selection(device, dtype, selector, request, record_property):
    """With scores of the caller's own, their softmax is the estimate."""
    error = DTYPE_ERRORS[dtype] if device == "cuda" else 1e-5

    def case(data):
        torch.manual_seed(data.draw(st.integers(0, 2**16), label="seed"))
        heads_kv, group, batch = (data.draw(st.integers(1, most)) for most in (2, 4, 2))
        head_dim = data.draw(st.sampled_from([8, 24, 64, 72, 128, 160]), label="head dim")
        lengths_of = (data.draw(lengths, label=name) for name in ("queries", "keys"))
        shape = Shape(batch, heads_kv * group, heads_kv, *lengths_of, head_dim)
        memory = data.draw(st.sampled_from(["contiguous", "transposed", "gaps"]), label="memory")
        query, key, _ = shape.make(device, dtype, memory)
        made = "mean" if selector == "scores" else selector
        pattern = data.draw(selections(made), label="pattern")
        if selector == "scores":
            block_q, block_kv = pattern.block_size
            blocks = (-(-shape.Sq // block_q), -(-shape.Skv // block_kv))
            scores = scores_of(data.draw, shape.Hq, *blocks).to(device)
            pattern = dataclasses.replace(pattern, selector=scores)
        common = data.draw(commons(shape, device), label="common")
        check_selection(pattern, query, key, error=error, **common)

    run_cases(case, request, record_property)


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_keys_of_float8_choose_as_what_they_stand_for(
    device, dtype, selector, request, record_property
):
    def case(data):
        torch.manual_seed(data.draw(st.integers(0, 2**16), label="seed"))
        heads_kv, group, batch = (data.draw(st.integers(1, most)) for most in (2, 4, 3))
        head_dim = data.draw(st.sampled_from([8, 24, 64, 72, 128, 160]), label="head dim")
        lengths_of = (data.draw(lengths, label=name) for name in ("queries", "keys"))
        shape = Shape(batch, heads_kv * group, heads_kv, *lengths_of, head_dim)
        memory = data.draw(st.sampled_from(["contiguous", "transposed", "gaps"]), label="memory")
        query, key, _ = shape.make(device, dtype, memory)
        codes = torch.empty_like(key, dtype=torch.float8_e4m3fn).copy_(key)
        by = data.draw(st.sampled_from([None, (), (heads_kv,), (batch, heads_kv)]), label="scale")
        scale = None if by is None else torch.rand(by, device=device) * 2 + 0.1
        key = codes.float() if by is None else codes.float() * scale[..., None, None]
        pattern = data.draw(selections(selector), label="pattern")
        common = data.draw(commons(shape, device), label="common")
        layout = sa.select_blocks(query, codes, pattern, key_scale=scale, **common)
        want = sa.select_blocks(query, key.to(dtype).contiguous(), pattern, **common)
        assert torch.equal(layout.counts, want.counts)
        assert torch.equal(layout.indices, want.indices)

    run_cases(case, request, record_property)
