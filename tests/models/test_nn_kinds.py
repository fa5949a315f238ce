"""What `SparseMultiheadAttention` and `swap_attention` say to arguments of a wrong kind."""

import pytest
import torch
from torch import nn

import sparse_attn as sa
from sparse_attn.nn import SparseMultiheadAttention

pytestmark = pytest.mark.usefixtures("on_device")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: SparseMultiheadAttention("32", 4), "embed_dim to be an int, got str"),
        (lambda: SparseMultiheadAttention(32, 4.0), "num_heads to be an int, got float"),
        (lambda: SparseMultiheadAttention(32, 4, layer="0"), "layer to be an int, got str"),
        (lambda: SparseMultiheadAttention(32, 4, sa.Band(3)), "dropout to be a float, got Band"),
        (lambda: SparseMultiheadAttention(32, 4, bias="no"), "bias to be a bool, got str"),
        (lambda: SparseMultiheadAttention(32, 4, batch_first=1), "batch_first to be a bool, got"),
        (lambda: SparseMultiheadAttention(32, 4)([1], [1], [1]), "query to be a tensor, got list"),
        (
            lambda: SparseMultiheadAttention(32, 4)(*torch.ones(3, 2, 32), attn_mask=[0]),
            "attn_mask to be a tensor, got list",
        ),
        (lambda: sa.swap_attention(3, sa.Full()), "model to be an nn.Module, got int"),
        (
            lambda: SparseMultiheadAttention.from_dense(nn.Linear(1, 1), sa.Full()),
            "module to be an nn.MultiheadAttention, got Linear",
        ),
    ],
    ids=[
        "embed_dim",
        "num_heads",
        "layer",
        "dropout",
        "bias",
        "batch_first",
        "query",
        "attn_mask",
        "model",
        "module",
    ],
)
@pytest.mark.filterwarnings("ignore:SparseMultiheadAttention makes no")
def test_wrong_kinds_are_refused_by_name(make, sentence):
    with pytest.raises(TypeError, match=rf"sparse_attn\..*: expected {sentence}"):
        make()
