"""Swapped models are swapped again, in part or by name, and restored."""

import copy
import re

import pytest
import torch

import sparse_attn as sa


def encoder(layers=3):
    layer = torch.nn.TransformerEncoderLayer(32, 2, 32, batch_first=True)
    return torch.nn.TransformerEncoder(layer, layers).eval()


def output(model):
    tokens = torch.arange(2 * 24 * 32).reshape(2, 24, 32).cos()
    with torch.no_grad():
        return model(tokens)


def test_a_swapped_model_takes_another_policy():
    model = encoder()
    want = output(sa.swap_attention(copy.deepcopy(model), sa.Band(3)))
    sa.swap_attention(model, sa.Band(1))
    first = output(model)
    sa.swap_attention(model, sa.Band(3))
    assert torch.equal(output(model), want) and not torch.equal(first, want)


def test_restore_gives_the_own_modules_back():
    model = encoder()
    want, modules = output(model), [layer.self_attn for layer in model.layers]
    nested = model.use_nested_tensor
    assert nested
    sa.swap_attention(sa.swap_attention(model, sa.Band(1)), sa.Band(3))
    assert sa.restore_attention(model) is model
    assert [layer.self_attn for layer in model.layers] == modules
    assert model.use_nested_tensor == nested and torch.equal(output(model), want)
    for other in (model, torch.nn.MultiheadAttention(32, 2)):
        with pytest.warns(
            UserWarning, match=r"restore_attention: .* got \w+ without .* nothing ch"
        ):
            assert sa.restore_attention(other) is other


def test_judging_a_model_restores_without_a_word(recwarn):
    sa.quality.model(encoder(), {"src": torch.randn(1, 8, 32)}, sa.Band(3), progress=False)
    assert not [w for w in recwarn if "restore" in str(w.message)]


def test_what_was_loaded_into_a_twin_is_restored():
    model, other = encoder(), encoder()
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter)
    sa.swap_attention(model, sa.Band(3))
    model.load_state_dict(other.state_dict(), assign=True)
    torch.testing.assert_close(output(sa.restore_attention(model)), output(other))


def test_a_module_alone():
    dense = torch.nn.MultiheadAttention(32, 2)
    twin = sa.swap_attention(sa.swap_attention(dense, sa.Band(1)), sa.Band(3))
    assert twin.policy.pattern == sa.Band(3) and sa.restore_attention(twin) is dense


@pytest.mark.parametrize("only", ["layers.[02].*", ["layers.0.self_attn", "layers.2.self_attn"]])
def test_layers_by_name(only):
    model = sa.swap_attention(encoder(), sa.Policy(sa.Band(3), num_layers=2), only=only)
    kinds = [type(layer.self_attn).__name__ for layer in model.layers]
    assert kinds == ["SparseMultiheadAttention", "MultiheadAttention", "SparseMultiheadAttention"]
    assert [model.layers[n].self_attn.layer for n in (0, 2)] == [0, 1]


def test_what_else_there_is():
    with pytest.raises(ValueError, match="got none; transformers models take .*apply.*patch_sdpa"):
        sa.swap_attention(torch.nn.Linear(2, 2), sa.Full())
    there = "it has 3: layers.0.self_attn, layers.1.self_attn, layers.2.self_attn$"
    for only in ("head.*", ["x", "y"], []):
        with pytest.raises(ValueError, match=f"under the names {re.escape(repr(only))}, .*{there}"):
            sa.swap_attention(encoder(), sa.Full(), only=only)
    with pytest.raises(ValueError, match=rf"under the names \['x'\], got none; {there}"):
        sa.swap_attention(encoder(), sa.Full(), only=["layers.0.*", "x"])
    with pytest.raises(
        ValueError, match=r"under the names 'x', got none; it has 4: .*2.self_attn, \.\.\.$"
    ):
        sa.swap_attention(encoder(4), sa.Full(), only="x")
    with pytest.raises(ValueError, match=r"it has 1: '' \(the model itself\)$"):
        sa.swap_attention(torch.nn.MultiheadAttention(32, 2), sa.Full(), only="x")
    with pytest.raises(ValueError, match="got none; transformers models take"):
        sa.swap_attention(torch.nn.Linear(2, 2), sa.Full(), only="x")
    with pytest.raises(TypeError, match="only to be a name or a sequence of names, got int"):
        sa.swap_attention(encoder(), sa.Full(), only=3)


def test_a_twin_of_its_own_making_stays():
    model = torch.nn.Sequential(
        sa.nn.SparseMultiheadAttention(32, 2), torch.nn.MultiheadAttention(32, 2)
    )
    own = model[0]
    sa.restore_attention(sa.swap_attention(model, sa.Band(3)))
    assert model[0] is own and type(model[1]) is torch.nn.MultiheadAttention
