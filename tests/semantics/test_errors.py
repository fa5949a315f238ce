"""Every wrong call raises one sentence with the argument, what was expected and what came; the next
call is right."""

import math

import pytest
import torch
from reference import Shape
from torch.nn.attention.bias import causal_lower_right

import sparse_attn as sa

NAN, INF = math.nan, math.inf


class Call:
    """A right call that a case changes in one place."""

    def __init__(self, device):
        self.query, self.key, self.value = Shape(2, 4, 2, 34, 67, 64).make(device)
        self.device = device

    def ints(self, *shape):
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def ones(self, *shape):
        return torch.ones(shape, device=self.device)

    def layout(self, num_q=3, num_kv=5, heads=1, batch=1):
        mask = torch.ones(batch, heads, num_q, num_kv, device=self.device).bool()
        return sa.BlockLayout.from_mask(mask, 16, 16)

    def out_over_bits(self):
        out, lists = self.ones(2, 4, 34, 64), self.layout()
        bits = out.view(torch.int32).view(-1, 16, 1)
        lists = (lists.counts, lists.indices, 16, 16, 5, lists.indices, bits)
        layout = sa.BlockLayout._trusted(*lists)
        return sa.block_sparse_attention(self.query, self.key, self.value, layout, out=out)

    def out_over_scores(self):
        out = self.ones(2, 4, 34, 64)
        pattern = sa.BlockTopK(16, None, out[:, :, :3, :5], budget_blocks=1)
        return sa.sparse_attention(self.query, self.key, self.value, pattern, out=out)

    def band(self, query=None, key=None, value=None, **common):
        tensors = [
            mine if given is None else given
            for mine, given in zip(
                (self.query, self.key, self.value), (query, key, value), strict=True
            )
        ]
        return sa.band_attention(*tensors, (9, 0), **common)


WRONG = {
    "query-rank": (
        lambda c: c.band(query=c.query[0]),
        r"query of shape .* got shape \(4, 34, 64\)",
    ),
    "key-rank": (
        lambda c: c.band(key=c.key[None]),
        r"key of shape .* got shape \(1, 2, 2, 67, 64\)",
    ),
    "value-rank": (
        lambda c: c.band(value=c.value[0, 0]),
        r"value of shape .* got shape \(67, 64\)",
    ),
    "query-dtype": (lambda c: c.band(query=c.query.double()), "query of dtype .* got float64"),
    "query-of-8-bits": (
        lambda c: c.band(query=c.query.to(torch.float8_e4m3fn)),
        "query of dtype float32, float16 or bfloat16, got float8_e4m3fn",
    ),
    "key-dtype": (lambda c: c.band(key=c.key.half()), "key of query's dtype float32, got float16"),
    "value-dtype": (lambda c: c.band(value=c.value.int()), "value of dtype .* got int32"),
    "heads": (lambda c: c.band(query=c.query[:, :3]), "multiple of the 2 key heads, got 3"),
    "head-dim": (
        lambda c: c.band(*(t[..., :12] for t in (c.query, c.key, c.value))),
        "head_dim that is a multiple of 8 up to 256, got 12",
    ),
    "large-head-dim": (
        lambda c: c.band(*Shape(D=264).make(c.device)),
        "head_dim that is a multiple of 8 up to 256, got 264",
    ),
    "key-head-dim": (
        lambda c: c.band(key=c.key[..., :32]),
        r"key of .* got shape \(2, 2, 67, 32\)",
    ),
    "batch": (lambda c: c.band(key=c.key[:1]), r"key of shape .* got shape \(1, 2, 67, 64\)"),
    "value-length": (lambda c: c.band(value=c.value[:, :, 1:]), r"value of shape \(2, 2, 67, 64\)"),
    "value-head-dim": (
        lambda c: c.band(value=c.value[..., :12]),
        "value with a head_dim that is a multiple of 8 up to 256, got 12",
    ),
    "out-head-dim": (
        lambda c: c.band(value=c.value[..., :8], out=c.query),
        r"out of shape \(2, 4, 34, 8\), got shape \(2, 4, 34, 64\)",
    ),
    "last-stride": (
        lambda c: c.band(query=c.query.repeat_interleave(2, -1)[..., ::2]),
        r"query with a contiguous last dimension, got stride 2; query.contiguous\(\) has one",
    ),
    "mask-shape": (
        lambda c: c.band(attn_mask=c.ones(34, 66).bool()),
        r"attn_mask that broadcasts to \(2, 4, 34, 67\), got shape \(34, 66\)",
    ),
    "mask-of-keys": (
        lambda c: c.band(attn_mask=c.ones(2, 67).bool()),
        r"got shape \(2, 67\); a mask \(B, Skv\) of keys goes in as mask\[:, None, None, :\]$",
    ),
    "mask-of-entries": (
        lambda c: c.band(attn_mask=c.ones(2, 34, 67).bool()),
        r"got shape \(2, 34, 67\); a mask \(B, Sq, Skv\) goes in as mask\[:, None\]$",
    ),
    "mask-of-numbers": (
        lambda c: c.band(attn_mask=c.ints(2, 1, 1, 67)),
        r"got int32; a mask of 0 and 1 goes in as mask.bool\(\)$",
    ),
    "turned": (
        lambda c: c.band(*(t.transpose(1, 2) for t in (c.query, c.key, c.value))),
        r"got 34; tensors \(B, S, H, D\) go in as .transpose\(1, 2\)$",
    ),
    "mask-rank": (lambda c: c.band(attn_mask=c.ones(1, 1, 1, 1, 67)), "attn_mask that broadcasts"),
    "mask-dtype": (
        lambda c: c.band(attn_mask=c.ints(34, 67)),
        "attn_mask of dtype bool or float32, got int32",
    ),
    "mask-half": (
        lambda c: c.band(attn_mask=c.ones(34, 67).half()),
        "attn_mask of dtype bool or float32, got float16$",
    ),
    "mask-beside-half": (
        lambda c: c.band(
            *(t.half() for t in (c.query, c.key, c.value)), attn_mask=c.ones(34, 67).bfloat16()
        ),
        "attn_mask of dtype bool, float32 or query's float16, got bfloat16$",
    ),
    "bounds-shape": (
        lambda c: c.band(key_bounds=c.ints(2, 34, 2)),
        r"key_bounds of shape \(2, 1, 34, 2\), got shape \(2, 34, 2\)",
    ),
    "bounds-heads": (lambda c: c.band(key_bounds=c.ints(2, 2, 34, 2)), r"shape \(2, 4, 34, 2\)"),
    "bounds-dtype": (
        lambda c: c.band(key_bounds=c.ones(2, 1, 34, 2)),
        "key_bounds of an integer dtype, got float32",
    ),
    "offset-shape": (lambda c: c.band(query_offset=c.ints(3)), r"query_offset of shape \(2\)"),
    "offset-scalar": (
        lambda c: c.band(query_offset=c.ints()),
        r"of shape \(2\), got shape \(\); one offset for all batch entries is an int$",
    ),
    "offset-dtype": (
        lambda c: c.band(query_offset=c.ones(2)),
        "query_offset of an integer dtype, got fl",
    ),
    "sink-shape": (lambda c: c.band(sink_logits=c.ones(2)), r"sink_logits of shape \(4\)"),
    "sink-dtype": (lambda c: c.band(sink_logits=c.ints(4)), "sink_logits of dtype .* got int32"),
    "scale-nan": (lambda c: c.band(scale=NAN), "scale that is a finite float32, got nan"),
    "scale-inf": (lambda c: c.band(scale=-INF), "scale that is a finite float32, got -inf"),
    "scale-large": (lambda c: c.band(scale=1e39), r"scale that is a finite float32, got 1e\+39"),
    "scale-beyond-floats": (
        lambda c: c.band(scale=-(10**400)),
        "scale that is a finite float32, got -inf",
    ),
    "scale-beyond-log2": (
        lambda c: c.band(scale=-3.4e38),
        r"scale of at most 2.3e\+38 in size, got",
    ),
    "softcap": (
        lambda c: c.band(softcap=-1.0),
        "softcap that is 0 or a positive, finite, normal float32, got -1",
    ),
    "softcap-nan": (lambda c: c.band(softcap=NAN), "softcap that is 0 or .* got nan"),
    "softcap-large": (lambda c: c.band(softcap=1e39), r"softcap that is 0 or .* got 1e\+39"),
    "softcap-beyond-floats": (
        lambda c: c.band(softcap=10**400),
        "softcap that is 0 or .* got inf",
    ),
    "softcap-tiny": (lambda c: c.band(softcap=1e-46), "softcap that is 0 or .* got 1e-46"),
    "cache-of-bytes": (
        lambda c: sa.fused_attention(c.query, c.key.byte(), c.value),
        r"key of dtype .* or float8_e4m3fn, got uint8; .* cache\.view\(torch\.float8_e4m3fn\)",
    ),
    "engine": (lambda c: c.band(engine="fast"), "engine to be one of auto, .* got fast"),
    "out-shape": (lambda c: c.band(out=c.ones(2, 4, 35, 64)), r"out of shape \(2, 4, 34, 64\)"),
    "out-rank": (lambda c: c.band(out=c.ones(1)), r"out of shape .* got shape \(1\)"),
    "out-dtype": (
        lambda c: c.band(out=c.ones(2, 4, 34, 64).half()),
        "out of query's dtype float32, got float16",
    ),
    "out-stride": (
        lambda c: c.band(out=c.ones(2, 4, 64, 34).mT),
        "out with a contiguous last dimension, got stride 34",
    ),
    "out-is-query": (lambda c: c.band(out=c.query), "out that does not overlap query"),
    "out-expanded": (
        lambda c: c.band(out=c.ones(2, 4, 1, 64).expand(2, 4, 34, 64)),
        "out without overlapping elements, got overlapping strides",
    ),
    "out-over-query": (
        lambda c: c.band(out=c.query.view(2, 34, 4, 64).transpose(1, 2)),
        "out that does not overlap query, got an overlapping out",
    ),
    "out-over-bits": (Call.out_over_bits, "out that does not overlap bits"),
    "out-over-scores": (Call.out_over_scores, "out that does not overlap scores"),
    "global-dtype": (
        lambda c: c.band(global_tokens=c.ones(3)),
        "global_tokens of an integer dtype, got float32",
    ),
    "global-rank": (lambda c: c.band(global_tokens=c.ints(1, 3)), "global_tokens of shape"),
    "layout-rows": (
        lambda c: sa.block_sparse_attention(c.query, c.key, c.value, c.layout(num_q=4)),
        "a layout of 3 query blocks for 34 queries in blocks of 16, got 4",
    ),
    "layout-rows-of-one-head": (
        lambda c: sa.block_sparse_attention(
            c.query[:1, :1], c.key[:1, :1], c.value[:1, :1], c.layout(num_q=4)
        ),
        "a layout of 3 query blocks for 34 queries in blocks of 16, got 4",
    ),
    "layout-keys": (
        lambda c: sa.block_sparse_attention(c.query, c.key, c.value, c.layout(num_kv=4)),
        "a layout of 5 key blocks for 67 keys .* got 4",
    ),
    "layout-of-tokens": (
        lambda c: sa.block_sparse_attention(c.query, c.key, c.value, c.layout(num_kv=67)),
        "a layout of 5 key blocks .* got 67; BlockLayout.from_token_mask takes a mask of tokens",
    ),
    "layout-heads": (
        lambda c: sa.block_sparse_attention(c.query, c.key, c.value, c.layout(heads=3)),
        r"counts of shape .* got shape \(1, 3, 3\)",
    ),
    "layout-batch": (
        lambda c: sa.block_sparse_attention(c.query, c.key, c.value, c.layout(batch=3)),
        r"counts of shape .* got shape \(3, 1, 3\)",
    ),
    "window": (
        lambda c: sa.band_attention(c.query, c.key, c.value, -3),
        "window's left side of at least 0, got -3",
    ),
    "dilation": (
        lambda c: sa.dilated_attention(c.query, c.key, c.value, 3, 0),
        "dilation of at least 1, got 0",
    ),
    "stride": (
        lambda c: sa.strided_attention(c.query, c.key, c.value, 3, -1),
        "stride of at least 1, got -1",
    ),
    "k": (lambda c: sa.topk_attention(c.query, c.key, c.value, 0), "k of at least 1, got 0"),
    "block-size": (
        lambda c: sa.block_topk_attention(c.query, c.key, c.value, block_size=20),
        "block_size that is a positive multiple of 16, got 20",
    ),
    "dropout": (
        lambda c: sa.fused_attention(c.query, c.key, c.value, dropout_p=0.1),
        r"dropout_p of 0 \(inference only\), got 0.1",
    ),
    "naive-engine": (
        lambda c: sa.naive_attention(c.query, c.key, c.value, engine="tiled"),
        "engine auto or naive, got",
    ),
    "merge-shape": (
        lambda c: sa.merge_states(c.query, c.ones(2, 4, 34), c.key, c.ones(2, 4, 34)),
        r"out_b of shape \(2, 4, 34, 64\), got shape \(2, 2, 67, 64\)",
    ),
    "merge-lse": (
        lambda c: sa.merge_states(c.query, c.ones(2, 4, 34, 1), c.query, c.ones(2, 4, 34)),
        r"lse_a of shape \(2, 4, 34\), got shape \(2, 4, 34, 1\)",
    ),
    "merge-dtype": (
        lambda c: sa.merge_states(c.query, c.ones(2, 4, 34).half(), c.query, c.ones(2, 4, 34)),
        "lse_a of dtype float32, got float16",
    ),
    "merge-head-dim": (
        lambda c: sa.merge_states(
            c.ones(1).expand(1, 1, 1, 2**32 + 64), c.ones(1, 1, 1), c.query, c.ones(1, 1, 1)
        ),
        "out_a of head_dim up to 536870911, got 4294967360",
    ),
}


@pytest.mark.parametrize("wrong, sentence", WRONG.values(), ids=WRONG)
def test_wrong_calls(device, wrong, sentence):
    call = Call(device)
    with pytest.raises(ValueError, match=sentence) as caught:
        wrong(call)
    message = str(caught.value)
    assert message.startswith("sparse_attn") and "\n" not in message
    assert "expected " in message and "got " in message
    assert torch.isfinite(call.band()).all()


KINDS = {
    "query": (lambda c: c.band(query=[1]), "query to be a tensor, got list"),
    "value": (lambda c: c.band(value="v"), "value to be a tensor, got str"),
    "mask": (lambda c: c.band(attn_mask=[True]), "attn_mask to be a tensor or None, got list"),
    "causal": (lambda c: c.band(is_causal=1), "is_causal to be a bool, got int"),
    "scale": (lambda c: c.band(scale="1"), "scale to be a float or None, got str"),
    "bool-scale": (lambda c: c.band(scale=True), "scale to be a float or None, got bool"),
    "bounds": (lambda c: c.band(key_bounds=(0, 5)), "key_bounds to be a tensor or None, got tuple"),
    "offset": (
        lambda c: c.band(query_offset=1.5),
        "query_offset to be an int or a tensor, got float",
    ),
    "softcap": (lambda c: c.band(softcap=None), "softcap to be a float, got NoneType"),
    "sinks": (lambda c: c.band(sink_logits=1.0), "sink_logits to be a tensor or None, got float"),
    "lse": (lambda c: c.band(return_lse=None), "return_lse to be a bool, got NoneType"),
    "out": (lambda c: c.band(out=3), "out to be a tensor or None, got int"),
    "engine": (lambda c: c.band(engine=None), "engine to be a str, got NoneType"),
    "window": (
        lambda c: sa.band_attention(c.query, c.key, c.value, "9"),
        "window to be an int or a pair .*, got str",
    ),
    "layout": (
        lambda c: sa.block_sparse_attention(c.query, c.key, c.value, None),
        "layout to be a BlockLayout, got NoneType",
    ),
    "pattern": (
        lambda c: sa.sparse_attention(c.query, c.key, c.value, "band"),
        "pattern to be a pattern such as sparse_attn.Band, got str",
    ),
    "select": (lambda c: sa.select_blocks(c.query, c.key, sa.Full()), "a BlockTopK, got Full"),
    "causal-bias": (
        lambda c: c.band(attn_mask=causal_lower_right(34, 34)),
        "attn_mask to be a tensor of values or None, got CausalBias; write is_causal=True",
    ),
    "merge": (lambda c: sa.merge_states(1, 2, 3, 4), "out_a to be a tensor, got int"),
}


@pytest.mark.parametrize("wrong, sentence", KINDS.values(), ids=KINDS)
def test_wrong_kinds(device, wrong, sentence):
    call = Call(device)
    with pytest.raises(TypeError, match=sentence) as caught:
        wrong(call)
    assert str(caught.value).startswith("sparse_attn.")
    assert torch.isfinite(call.band()).all()


def test_unknown_keywords(device):
    with pytest.raises(TypeError, match=r"band_attention\(\) got an unexpected .* 'dropout'"):
        Call(device).band(dropout=0.1)


def test_tensors_of_other_backends(device):
    call = Call(device)
    sentence = r"^sparse_attn::band: not served: tensors of torch's backend Sparse\w+$"
    with pytest.raises(NotImplementedError, match=sentence):
        call.band(call.query.to_sparse())


def test_nested_tensors(device):
    rows = [torch.randn(length, 4, 64, device=device) for length in (5, 34)]
    sentence = r"^sparse_attn::band: not served: tensors of (torch's backend Nested\w+|this class)$"
    for layout in (torch.strided, torch.jagged):
        query = torch.nested.nested_tensor(rows, layout=layout).transpose(1, 2)
        with pytest.raises(NotImplementedError, match=sentence):
            sa.band_attention(query, query, query, (9, 0))


def test_negated_views_are_read_but_not_written(device):
    """torch negates such views later, and has no rule for an op that may write into none."""
    call = Call(device)
    out = torch._neg_view(torch.zeros_like(call.query))
    sentence = r"^sparse_attn::band_out: not served: to write into a negated view"
    for common in ({}, {"return_lse": True}):
        with pytest.raises(NotImplementedError, match=sentence):
            call.band(out=out, **common)
    assert torch.equal(call.band(torch._neg_view(call.query)), call.band(-call.query))


def test_two_forms_of_the_offset_are_refused_by_the_op(device):
    call = Call(device)
    with pytest.raises(RuntimeError, match="query_offset as an int or as a tensor, got both"):
        torch.ops.sparse_attn.fused(
            call.query, call.key, call.value, query_offset=3, query_offsets=call.ints(2)
        )


def test_cuda_tensors_beside_cpu_tensors(device):
    if device != "cuda":
        pytest.skip("needs CUDA")
    call = Call(device)
    with pytest.raises(ValueError, match="key on query's device cuda:0, got cpu"):
        call.band(key=call.key.cpu())
    with pytest.raises(ValueError, match="attn_mask on query's device cuda:0, got cpu"):
        call.band(attn_mask=torch.ones(34, 67).bool())


def test_out_between_the_heads_of_a_fused_projection_is_fine(device):
    buffer = torch.randn(2, 34, 5, 64, device=device).transpose(1, 2)
    query, out, key, value = buffer[:, :2], buffer[:, 2:4], buffer[:, 4:], buffer[:, 4:]
    want = sa.band_attention(query, key, value, 3)
    assert sa.band_attention(query, key, value, 3, out=out) is out
    assert torch.equal(out, want)
    with pytest.raises(ValueError, match="out that does not overlap query"):
        sa.band_attention(query, key, value, 3, out=buffer[:, 1:3])
