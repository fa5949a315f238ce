"""`SparseMultiheadAttention` and the models that `swap_attention` makes equal torch's own."""

import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import sparse_attn as sa
from sparse_attn.nn import SparseMultiheadAttention

pytestmark = pytest.mark.usefixtures("on_device")

EMBED, HEADS, BATCH, LENGTH = 32, 4, 2, 12
MASKS = ("none", "bool", "additive", "heads")
PADDINGS = ("none", "bool", "additive")


def tokens(*shape, seed=0):
    return torch.randn(
        *shape, generator=torch.Generator(torch.get_default_device()).manual_seed(seed)
    )


def attn_mask(kind, seq_q, seq_kv, batch=BATCH):
    """A mask in torch's sense (true: not attended) that leaves every row its first key."""
    if kind == "none":
        return None
    shape = (batch * HEADS, seq_q, seq_kv) if kind == "heads" else (seq_q, seq_kv)
    blocked = tokens(*shape, seed=3) > 0.5
    blocked[..., 0] = False
    if kind == "additive":
        return tokens(*shape, seed=4).masked_fill(blocked, -torch.inf)
    return blocked


def padding(kind, seq_kv, batch=BATCH):
    if kind == "none":
        return None
    padded = torch.zeros(batch, seq_kv, dtype=torch.bool)
    padded[0, -3:] = True
    return padded if kind == "bool" else torch.zeros(batch, seq_kv).masked_fill(padded, -torch.inf)


def twins(**options):
    """torch's module and ours with its state dict."""
    torch.manual_seed(0)
    dense = nn.MultiheadAttention(EMBED, HEADS, **options).eval()
    if dense.in_proj_bias is not None:
        nn.init.normal_(dense.in_proj_bias)
    ours = SparseMultiheadAttention(EMBED, HEADS, **options).eval()
    ours.load_state_dict(dense.state_dict())
    return dense, ours


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("pad", PADDINGS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch_first", "seq_first"])
def test_masks(batch_first, mask, pad):
    dense, ours = twins(batch_first=batch_first)
    query, memory = tokens(BATCH, 7, EMBED), tokens(BATCH, LENGTH, EMBED, seed=1)
    if not batch_first:
        query, memory = query.transpose(0, 1), memory.transpose(0, 1)
    options = dict(
        attn_mask=attn_mask(mask, 7, LENGTH),
        key_padding_mask=padding(pad, LENGTH),
        need_weights=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about masks of two kinds
        theirs = dense(query, memory, memory, **options)[0]
    close(ours(query, memory, memory, **options)[0], theirs)


@torch.no_grad()
@pytest.mark.parametrize("mask", MASKS)
def test_unbatched(mask):
    dense, ours = twins()
    x = tokens(LENGTH, EMBED)
    options = dict(attn_mask=attn_mask(mask, LENGTH, LENGTH, batch=1), need_weights=False)
    pad = padding("additive" if mask == "additive" else "bool", LENGTH)[0]
    theirs = dense(x, x, x, key_padding_mask=pad, **options)[0]
    close(ours(x, x, x, key_padding_mask=pad, **options)[0], theirs)


@torch.no_grad()
def test_no_bias_and_other_values():
    dense, ours = twins(bias=False, batch_first=True)
    query, key, value = (tokens(BATCH, LENGTH, EMBED, seed=seed) for seed in range(3))
    close(ours(query, key, value, need_weights=False)[0], dense(query, key, value)[0])


@torch.no_grad()
def test_is_causal_hint():
    dense, ours = twins(batch_first=True)
    x = tokens(BATCH, LENGTH, EMBED)
    causal = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    theirs = dense(x, x, x, attn_mask=causal, need_weights=False)[0]
    close(ours(x, x, x, attn_mask=causal, is_causal=True, need_weights=False)[0], theirs)
    close(ours(x, x, x, is_causal=True, need_weights=False)[0], theirs)


@torch.no_grad()
def test_pattern_is_a_mask():
    dense, ours = twins(batch_first=True)
    ours.policy = sa.Policy(sa.Band((2, 1)), dense_below=0)
    x = tokens(BATCH, LENGTH, EMBED)
    theirs = dense(x, x, x, attn_mask=~sa.Band((2, 1)).mask(LENGTH, LENGTH), need_weights=False)[0]
    close(ours(x, x, x, need_weights=False)[0], theirs)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "pattern",
    [
        sa.Band(2, sinks=2),
        sa.Band(2, global_tokens=1),
        sa.Strided(2, 5),
        sa.BlockTopK(16, mass=None, budget_blocks=1, local_blocks=0),
        sa.Policy(sa.Full(), heads={0: {1: sa.Dilated(2, 2, sinks=1)}}),
    ],
    ids=["sinks", "globals", "strided", "block-topk", "by-head"],
)
def test_a_padded_row_equals_its_text_alone(pattern, side, kind, device):
    ours = sa.swap_attention(torch.nn.MultiheadAttention(32, 2, batch_first=True), pattern)
    ours = ours.to(device).eval()
    x = torch.randn(2, 96, 32, device=device)
    text = slice(48, 96) if side == "left" else slice(0, 48)
    padded = torch.ones(2, 96, dtype=torch.bool, device=device)
    padded[0] = padded[1, text] = False
    given = padded if kind == "bool" else torch.zeros(2, 96).to(x).masked_fill(padded, -torch.inf)
    out, _ = ours(x, x, x, key_padding_mask=given, need_weights=False)
    alone, _ = ours(*(x[1:, text],) * 3, need_weights=False)
    torch.testing.assert_close(out[1:, text], alone, atol=1e-5, rtol=1e-5)


def test_a_sequence_of_padding_gives_the_bias():
    _, ours = twins(batch_first=True)
    x = tokens(BATCH, LENGTH, EMBED)
    padded = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padded[0] = True
    out = ours(x, x, x, key_padding_mask=padded, need_weights=False)[0]
    close(out[0], ours.out_proj.bias.expand(LENGTH, EMBED))


class Adapted(nn.Linear):
    """A layer to whose output an adapter adds 1; its weights do not say so."""

    def forward(self, x):
        return super().forward(x) + 1


@torch.no_grad()
@pytest.mark.parametrize("swapped", [False, True])
def test_an_adapter_of_the_last_projection_counts(swapped):
    dense, ours = twins(batch_first=True)
    ours = SparseMultiheadAttention.from_dense(dense, sa.Full()) if swapped else ours
    x = tokens(BATCH, LENGTH, EMBED)
    plain = ours(x, x, x, need_weights=False)[0]
    ours.out_proj.__class__ = Adapted
    close(ours(x, x, x, need_weights=False)[0], plain + 1)


@torch.no_grad()
def test_weights_are_none_with_one_warning():
    _, ours = twins(batch_first=True)
    x = tokens(BATCH, LENGTH, EMBED)
    with pytest.warns(UserWarning, match="need_weights"):
        assert ours(x, x, x, average_attn_weights=False)[1] is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(x, x, x)


@pytest.mark.parametrize(
    "options",
    [dict(kdim=16), dict(vdim=16), dict(add_bias_kv=True), dict(add_zero_attn=True)],
    ids=lambda options: next(iter(options)),
)
def test_options_are_refused_by_name(options):
    name = next(iter(options))
    with pytest.raises(NotImplementedError, match=name):
        SparseMultiheadAttention(EMBED, HEADS, **options)
    model = nn.Sequential(nn.Linear(1, 1), nn.MultiheadAttention(EMBED, HEADS, **options))
    with pytest.raises(NotImplementedError, match=f"swap_attention: 1: not served: {name}="):
        sa.swap_attention(model, sa.Full())
    assert isinstance(model[1], nn.MultiheadAttention)


@pytest.mark.parametrize(("embed_dim", "head_dim"), [(16, 4), (2048, 512)], ids=["4", "512"])
def test_head_dims_that_never_run_are_refused_by_name(embed_dim, head_dim):
    sentence = f": not served: head_dim={head_dim};"
    with pytest.raises(NotImplementedError, match=f"SparseMultiheadAttention{sentence}"):
        SparseMultiheadAttention(embed_dim, 4, device="meta")
    inner = nn.MultiheadAttention(embed_dim, 4, device="meta")
    with pytest.raises(NotImplementedError, match=f"^sparse_attn.swap_attention{sentence}"):
        sa.swap_attention(inner, sa.Full())
    model = nn.Sequential(nn.MultiheadAttention(EMBED, HEADS), inner)
    with pytest.raises(NotImplementedError, match=f"^sparse_attn.swap_attention: 1{sentence}"):
        sa.swap_attention(model, sa.Full())
    assert all(type(module) is nn.MultiheadAttention for module in model)


def test_another_width_is_refused():
    _, ours = twins(batch_first=True)
    x = tokens(BATCH, LENGTH, EMBED)
    with pytest.raises(ValueError, match=f"expected key of embed_dim {EMBED}, got 16"):
        ours(x, x[..., :16], x, need_weights=False)


def test_another_dtype_is_refused_outside_autocast():
    _, ours = twins(batch_first=True)
    x = tokens(BATCH, LENGTH, EMBED)
    with pytest.raises(
        ValueError, match="expected value of the weights' dtype float32, got bfloat16"
    ):
        ours(x, x, x.bfloat16(), need_weights=False)
    with torch.no_grad(), torch.autocast(x.device.type, dtype=torch.bfloat16):
        assert ours(x, x, x.bfloat16(), need_weights=False)[0].isfinite().all()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (dict(key_padding_mask=torch.zeros(BATCH, 5, dtype=torch.bool)), "key_padding_mask"),
        (dict(key_padding_mask=torch.zeros(BATCH, LENGTH, dtype=torch.long)), "key_padding_mask"),
        (dict(attn_mask=torch.zeros(3, LENGTH, LENGTH)), "attn_mask"),
    ],
    ids=["padding shape", "padding dtype", "mask shape"],
)
def test_wrong_masks_are_refused_by_name(wrong, sentence):
    _, ours = twins(batch_first=True)
    x = tokens(BATCH, LENGTH, EMBED)
    with pytest.raises(ValueError, match=f"expected {sentence} bool or additive"):
        ours(x, x, x, need_weights=False, **wrong)


def test_dropout_is_refused_in_training():
    module = SparseMultiheadAttention(EMBED, HEADS, dropout=0.1)
    x = tokens(LENGTH, EMBED)
    with pytest.raises(NotImplementedError, match="dropout=0.1"):
        module.train()(x, x, x)
    module.eval()(x, x, x, need_weights=False)


def encoder(batch_first=True, layers=3):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 48, batch_first=batch_first)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=batch_first).eval()


@contextmanager
def no_fused_path():
    """torch's fused encoder path gives NaN for additive masks; the plain one is the reference."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def swapped(make, policy):
    """A model and its swapped twin of equal weights."""
    return make(), sa.swap_attention(make(), policy)


@torch.no_grad()
@pytest.mark.parametrize("pad", PADDINGS)
@pytest.mark.parametrize("mask", ["none", "bool", "additive"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch_first", "seq_first"])
def test_encoder(batch_first, mask, pad):
    model, ours = swapped(lambda: encoder(batch_first), sa.Full())
    x = tokens(BATCH, LENGTH, EMBED)
    x = x if batch_first else x.transpose(0, 1)
    padded = padding(pad, LENGTH)
    options = dict(mask=attn_mask(mask, LENGTH, LENGTH), src_key_padding_mask=padded)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = ours(x, **options)
        with no_fused_path():
            expected = model(x, **options)
    rows = torch.ones(BATCH, LENGTH, dtype=torch.bool) if padded is None else padded == 0
    rows = rows if batch_first else rows.T
    close(got[rows], expected[rows])


@torch.no_grad()
def test_fused_path_does_not_bypass_the_pattern():
    """In eval mode torch's encoder layer would call a fused kernel with the module's weights."""
    model, ours = swapped(encoder, sa.Band(1))
    x = tokens(BATCH, LENGTH, EMBED)
    close(ours(x), model(x, mask=~sa.Band(1).mask(LENGTH, LENGTH)))
    padded = padding("bool", LENGTH)
    assert not ours(x, src_key_padding_mask=padded).is_nested


@torch.no_grad()
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch_first", "seq_first"])
def test_decoder(batch_first):
    def make():
        torch.manual_seed(0)
        layer = nn.TransformerDecoderLayer(EMBED, HEADS, 48, batch_first=batch_first)
        return nn.TransformerDecoder(layer, 2).eval()

    model, ours = swapped(make, sa.Band((2, 0)))
    x, memory = tokens(BATCH, 7, EMBED), tokens(BATCH, LENGTH, EMBED, seed=1)
    if not batch_first:
        x, memory = x.transpose(0, 1), memory.transpose(0, 1)
    options = dict(memory_key_padding_mask=padding("bool", LENGTH))
    expected = model(x, memory, tgt_mask=~sa.Band((2, 0)).mask(7, 7), **options)
    close(ours(x, memory, **options), expected)
    assert [layer.multihead_attn.policy.pattern for layer in ours.layers] == [sa.Full()] * 2
    assert [layer.self_attn.layer for layer in ours.layers] == [0, 1]
    assert [layer.multihead_attn.layer for layer in ours.layers] == [None] * 2


@torch.no_grad()
def test_a_pattern_across_two_lengths_warns_once(monkeypatch):
    """A pooling head, whose name says nothing of cross attention, and a decode step look alike."""
    monkeypatch.setattr("sparse_attn._warn._given", set())
    probe, x = tokens(BATCH, 1, EMBED), tokens(BATCH, LENGTH, EMBED)

    def pooling(policy):
        return sa.swap_attention(nn.MultiheadAttention(EMBED, HEADS, batch_first=True), policy)

    for policy in (sa.Full(), sa.Policy(sa.Band((2, 0)), decode=sa.Full())):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pooling(policy)(probe, x, x, need_weights=False)
    ours = pooling(sa.Band((2, 0)))
    with pytest.warns(UserWarning, match="1 queries and 12 keys.* cross attention.*only="):
        ours(probe, x, x, need_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(probe, x, x, need_weights=False)


@torch.no_grad()
def test_policy_by_layer():
    model, ours = swapped(encoder, sa.Policy(sa.Band(1), dense_layers=[1], dense_below=0))
    band = ~sa.Band(1).mask(LENGTH, LENGTH)
    x = tokens(BATCH, LENGTH, EMBED)
    expected = model.layers[0](x, src_mask=band)
    expected = model.layers[2](model.layers[1](expected), src_mask=band)
    close(ours(x), expected)


def test_layers_of_the_policy_are_checked():
    with pytest.raises(ValueError, match="3 layers"):
        sa.swap_attention(encoder(), sa.Policy.dense_on_top(sa.Band(1), num_layers=4))
    with pytest.raises(ValueError, match="expected nn.MultiheadAttention in Linear, got none;"):
        sa.swap_attention(nn.Linear(2, 2), sa.Full())


def test_swap_shares_parameters_and_state():
    model = encoder()
    before = dict(model.named_parameters())
    after = dict(sa.swap_attention(model, sa.Full()).named_parameters())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)


def test_a_shared_module_is_one_layer():
    attention = nn.MultiheadAttention(EMBED, HEADS)
    model = nn.ModuleList([attention, attention])
    sa.swap_attention(model, sa.Policy(sa.Band(1), num_layers=1))
    assert model[0] is model[1] and isinstance(model[0], SparseMultiheadAttention)
