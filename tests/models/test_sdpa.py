"""patch_sdpa: a policy in models that call F.scaled_dot_product_attention themselves."""

import copy
import functools
import inspect
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import sparse_attn as sa

BAND = sa.Band((3, 0), sinks=1)


class Attention(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.qkv = nn.Linear(64, 192)
        self.causal = causal

    def forward(self, x, memory=None, **options):
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if memory is not None:
            k = v = memory.unflatten(-1, (4, 16)).transpose(1, 2)
        causal = self.causal and memory is None
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, **options)
        return x + out.transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, causal=True):
        super().__init__()
        self.layers = nn.ModuleList(Attention(causal) for _ in range(3))

    def forward(self, x, memory=None, **options):
        for layer in self.layers:
            x = layer(x, **options)
        return x if memory is None else self.layers[0](x, memory)


@pytest.fixture
def model(device):
    return Model().to(device).eval()


@pytest.fixture
def tokens(device):
    return torch.randn(2, 40, 64, device=device)


def expected(model, tokens, patterns):
    """The same model under the dense masks of its layers."""
    x = tokens
    for layer, pattern in zip(model.layers, patterns, strict=True):
        layer.causal = False
        x = layer(x, attn_mask=pattern.mask(40, 40, is_causal=True).to(x.device))
        layer.causal = True
    return x


@torch.no_grad()
@pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])
def test_torchs_causal_biases_are_causal(model, tokens, bias):
    with sa.patch_sdpa(model, BAND):
        want = model(tokens)
        for layer in model.layers:
            layer.causal = False
        assert torch.equal(model(tokens, attn_mask=bias(40, 40)), want)


@torch.no_grad()
def test_layers_are_numbered_by_their_calls(model, tokens):
    policy = sa.Policy(BAND, layers={1: sa.Strided(4, 4)}, heads={2: {1: sa.Full()}}, dense_below=0)
    dense = model(tokens)
    with sa.patch_sdpa(model, policy) as patched:
        got = model(tokens)
        assert torch.equal(model(tokens), got)  # counted from 0 in each forward
    by_head = torch.stack([BAND.mask(40, 40, True)] * 4)
    by_head[1] = sa.Full().mask(40, 40, True)

    class Heads:
        def mask(self, *_, **__):
            return by_head

    want = expected(model, tokens, (BAND, sa.Strided(4, 4), Heads()))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert patched.layers == 3 and not patched.left
    assert torch.equal(model(tokens), dense) and "forward" not in vars(model)


@torch.no_grad()
def test_a_patch_says_what_it_met(model, tokens):
    memory = torch.randn(2, 7, 64, device=tokens.device)
    with warnings.catch_warnings(), sa.patch_sdpa(model, sa.TopK(3)) as patched:
        warnings.simplefilter("ignore")
        assert repr(patched) == "PatchedSDPA(Model, TopK(k=3), layers=None, left={})"
        model(tokens, memory)
    left = "'calls whose numbers of queries and keys differ (cross attention, a cache)': 1"
    assert repr(patched) == f"PatchedSDPA(Model, TopK(k=3), layers=3, left={{{left}}})"


@torch.no_grad()
def test_permanent_until_restored(model, tokens):
    dense = model(tokens)
    patched = sa.patch_sdpa(model, BAND)
    assert not torch.allclose(model(tokens), dense)
    with pytest.raises(ValueError, match=r"^sparse_attn\.patch_sdpa: expected a model that is not"):
        sa.patch_sdpa(model, BAND)
    patched.restore()
    patched.restore()
    assert torch.equal(model(tokens), dense)
    sa.patch_sdpa(model, BAND).restore()


@torch.no_grad()
def test_what_it_cannot_map_is_left_and_said(model, tokens):
    memory = torch.randn(2, 9, 64, device=tokens.device)
    x = sa.patch_sdpa(model, BAND)
    with pytest.warns(UserWarning, match="Model: left to torch: calls whose numbers of queries"):
        got = model(tokens, memory)
    assert x.layers == 3 and list(x.left.values()) == [1]
    x.restore()
    want = expected(model, tokens, (BAND,) * 3)
    torch.testing.assert_close(got, model.layers[0](want, memory), rtol=1e-4, atol=1e-5)
    with sa.patch_sdpa(model, BAND) as x, pytest.warns(UserWarning, match=r"dropout_p=0\.5"):
        model(tokens, dropout_p=0.5)
    assert list(x.left.values()) == [3] and x.layers == 0


@torch.no_grad()
@pytest.mark.parametrize("shape", [(12, 16), (2, 12, 16)], ids=str)
def test_keys_that_broadcast_over_heads_are_left(device, shape):
    class Shared(nn.Module):
        def forward(self, x, memory):
            return functional.scaled_dot_product_attention(x, memory, memory)

    model, x, memory = Shared(), torch.randn(3, 2, 12, 16, device=device), torch.randn(shape)
    memory = memory.to(device)
    want = model(x, memory)
    sentence = f"left to torch: tensors of {len(shape)} dimensions, expected"
    with sa.patch_sdpa(model, BAND) as patched, pytest.warns(UserWarning, match=sentence):
        assert torch.equal(model(x, memory), want)
    assert patched.layers == 0


@torch.no_grad()
def test_calls_that_no_engine_serves_are_left(device):
    class Odd(nn.Module):
        def forward(self, x):
            return functional.scaled_dot_product_attention(x, x, x)

    x = torch.randn(1, 2, 8, 20, device=device)
    model = Odd()
    with sa.patch_sdpa(model, BAND), pytest.warns(UserWarning, match="left to torch: .*20"):
        assert torch.equal(model(x), functional.scaled_dot_product_attention(x, x, x))


@torch.no_grad()
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_calls_of_nested_tensors_are_left(layout):
    class Attend(nn.Module):
        def forward(self, x):
            return functional.scaled_dot_product_attention(x, x, x)

    texts, model = [torch.randn(length, 2, 16) for length in (4, 7)], Attend()
    if layout == torch.strided:
        x = torch.nested.nested_tensor([text.transpose(0, 1) for text in texts])
    else:
        x = torch.nested.nested_tensor(texts, layout=layout).transpose(1, 2)
    with sa.patch_sdpa(model, BAND) as patched, pytest.warns(UserWarning, match="nested tensors"):
        got = model(x)
    assert patched.left == {"nested tensors": 1} and patched.layers == 0
    for mine, want in zip(got.unbind(), model(x).unbind(), strict=True):
        assert torch.equal(mine, want)


@torch.no_grad()
def test_a_scale_may_be_what_torch_takes():
    class Attend(nn.Module):
        def forward(self, x):
            return functional.scaled_dot_product_attention(x, x, x, scale=torch.tensor(0.5))

    x, model = torch.randn(1, 2, 32, 16), Attend()
    with sa.patch_sdpa(model, BAND) as patched:
        got = model(x)
    assert patched.layers == 1 and not patched.left
    assert torch.equal(got, sa.sparse_attention(x, x, x, BAND, scale=0.5))


@torch.no_grad()
def test_a_model_without_such_calls_warns_once(monkeypatch, device):
    monkeypatch.setattr("sparse_attn._warn._given", set())
    model, x = nn.Linear(8, 8, device=device), torch.randn(2, 8, device=device)
    with sa.patch_sdpa(model, BAND) as patched:
        with pytest.warns(UserWarning, match="Linear: expected calls of .*, got none: the policy"):
            model(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x)
    assert patched.layers == 0


@torch.no_grad()
@pytest.mark.parametrize("first", ["compiled", "patched"])
def test_compiled_models_follow_the_policy(model, tokens, first):
    torch.compiler.reset()
    dense = model(tokens)
    compiled = torch.compile(model, backend="aot_eager") if first == "compiled" else None
    if compiled is not None:
        torch.testing.assert_close(compiled(tokens), dense)
    with sa.patch_sdpa(model, BAND) as patched:
        if compiled is None:
            compiled = torch.compile(model, backend="aot_eager")
        for _ in range(2):
            torch.testing.assert_close(compiled(tokens), model(tokens))
    assert patched.layers == 3
    torch.testing.assert_close(compiled(tokens), dense)


@torch.no_grad()
def test_a_patched_model_exports(model, tokens):
    with sa.patch_sdpa(model, BAND):
        program = torch.export.export(model, (tokens,), strict=False)
        want = model(tokens)
    torch.testing.assert_close(program.module()(tokens), want)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
@pytest.mark.parametrize("of", ["model", "patch"])
def test_a_copy_of_a_patched_model_is_patched_and_its_own(model, tokens, duplicate, of):
    with torch.no_grad(), sa.patch_sdpa(model, BAND) as patched:
        banded = model(tokens)
        copied = duplicate(patched).model if of == "patch" else duplicate(model)
        torch.testing.assert_close(copied(tokens), banded)
        for weights in copied.parameters():
            weights.zero_()
        torch.testing.assert_close(copied(tokens), tokens)
        torch.testing.assert_close(model(tokens), banded)
        assert inspect.signature(model.forward) == inspect.signature(Model().forward)
    with pytest.raises(ValueError, match=r"that is not patched, got .*forward\.patch\.restore"):
        sa.patch_sdpa(copied, BAND)
    copied.forward.patch.restore()
    assert "forward" not in vars(copied) | vars(model)


def test_wrong_arguments_are_refused(model, tokens):
    with pytest.raises(TypeError, match=r"sparse_attn\.patch_sdpa: expected model"):
        sa.patch_sdpa("model", BAND)
    with pytest.raises(TypeError, match="policy"):
        sa.patch_sdpa(model, "band")
    traced = torch.jit.trace(model, (tokens,))
    with pytest.raises(TypeError, match=r"nn\.Module, got TopLevelTracedModule of torch\.jit"):
        sa.patch_sdpa(traced, BAND)
    torch.testing.assert_close(traced(tokens), model(tokens))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*left to torch")  # said of a head that no call has, too
@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        (dict(num_layers=2), "a policy for Model's 3 layers, got num_layers=2"),
        (dict(num_key_heads=2), "a policy for Model's 4 key heads, got num_key_heads=2"),
        (dict(heads={0: {4: sa.Full()}}), "heads below Model's 4 key heads, got 4"),
    ],
)
def test_a_policy_of_another_shape_is_refused(model, tokens, shape, sentence):
    patched = sa.patch_sdpa(model, sa.Policy(BAND, **shape))
    with pytest.raises(ValueError, match=rf"^sparse_attn\.Policy: expected {sentence}$"):
        model(tokens)
    patched.restore()
    with sa.patch_sdpa(model, sa.Policy(BAND, num_layers=3, num_key_heads=4)):
        model(tokens)


@torch.no_grad()
def test_a_forward_without_layers_fits_every_policy(model, tokens):
    """A decode with a cache of the model's own: no call has as many queries as keys."""
    one, cached = model.layers[0], torch.randn(2, 40, 64, device=tokens.device)
    one.forward = functools.partial(one.forward, memory=cached)
    only = nn.Sequential(one)
    patched = sa.patch_sdpa(only, sa.Policy(BAND, num_layers=3, num_key_heads=2))
    with pytest.warns(UserWarning, match="left to torch: calls whose numbers of queries"):
        only(tokens[:, :1])
    assert patched.layers == 0
