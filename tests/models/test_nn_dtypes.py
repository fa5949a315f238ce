"""Parameters of a dtype that no engine serves: the swap refuses them, a later call names them."""

import pytest
import torch
from torch import nn

import sparse_attn as sa
from sparse_attn.nn import SparseMultiheadAttention

pytestmark = pytest.mark.usefixtures("on_device")
HELP = r"\.float\(\) or \.to\(torch\.bfloat16\) of the model$"


def encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def test_a_swap_refuses_parameters_of_float64_by_name():
    model = encoder()
    model.layers[1].double()
    sentence = f"not served: parameters of float64; first call {HELP}"
    with pytest.raises(
        NotImplementedError,
        match=rf"^sparse_attn\.swap_attention: layers\.1\.self_attn: {sentence}",
    ):
        sa.swap_attention(model, sa.Band(3))
    assert not any(isinstance(m, SparseMultiheadAttention) for m in model.modules())
    with pytest.raises(NotImplementedError, match=rf"SparseMultiheadAttention: {sentence}"):
        SparseMultiheadAttention.from_dense(model.layers[1].self_attn, sa.Band(3))
    sa.swap_attention(model.float(), sa.Band(3))
    assert isinstance(model.layers[1].self_attn, SparseMultiheadAttention)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_a_module_moved_to_float64_later_names_itself(dtype):
    model = sa.swap_attention(encoder(), sa.Band(3))
    model.layers[1].self_attn.double()
    x = torch.randn(2, 9, 32, dtype=dtype)
    sentence = (
        r"^sparse_attn\.SparseMultiheadAttention, layer 1: expected parameters of dtype float32, "
        rf"float16 or bfloat16, got float64; call {HELP}"
    )
    with torch.no_grad(), pytest.raises(ValueError, match=sentence):
        model.layers[1].self_attn(x, x, x, need_weights=False)
    assert model.float()(x.float()).isfinite().all()


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        ({"device": "foo"}, "device to be a torch.device or its name, .* got 'foo'"),
        ({"dtype": "half"}, "dtype to be a torch.dtype or None, got str"),
        ({"dtype": torch.int32}, "dtype of floating point, got int32"),
    ],
    ids=["device", "str", "integer"],
)
def test_parameters_of_no_such_kind_are_refused(wrong, sentence):
    with pytest.raises(
        (TypeError, ValueError),
        match=rf"^sparse_attn\.SparseMultiheadAttention: expected {sentence}",
    ):
        SparseMultiheadAttention(32, 4, **wrong)
