"""Layouts from masks of tokens are those masks: partial blocks carry a bit for each pair."""

import pytest
import torch
from reference import Shape
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

import sparse_attn as sa
from sparse_attn import BlockLayout, BlockSparse, layout_bits

SIZES = [(16, 16), (32, 64), (48, 16), (128, 128)]


def token_mask(device, batch=2, heads=3, Sq=70, Skv=95):
    """Random pairs with blocks of all kinds: whole, empty, partial, and whole but for a bit."""
    mask = torch.rand(batch, heads, Sq, Skv) < 0.5
    mask[..., 16:32, 32:48] = True
    mask[..., 20, 40] = False
    mask[..., 32:48, :] = False
    mask[0, 0, 64:] = True
    mask[-1, :, :, 80:] = True  # the last block of every size hangs over the end
    return mask.to(device)


def by_heads(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx >= h * 5) & (kv_idx % 7 != b)


def dense(mask_mod, *sizes):
    return mask_mod(*torch.meshgrid(*map(torch.arange, sizes), indexing="ij"))


@pytest.mark.parametrize("pairs", [2**24, 1], ids=["at-once", "by-strips"])
@pytest.mark.parametrize("block_q, block_kv", SIZES)
def test_from_token_mask(device, block_q, block_kv, pairs, monkeypatch):
    monkeypatch.setattr(layout_bits, "PAIRS", pairs)
    mask = token_mask(device)
    layout = BlockLayout.from_token_mask(mask, block_q, block_kv)
    assert torch.equal(BlockSparse(layout).mask(70, 95), mask)
    blocks = torch.nn.functional.pad(mask, (0, -95 % block_kv, 0, -70 % block_q))
    blocks = blocks.unflatten(-1, (-1, block_kv)).unflatten(-3, (-1, block_q))
    assert torch.equal(layout.to_mask(), blocks.any(-1).any(-2))
    whole = BlockLayout.from_token_mask(mask, block_q, block_kv, whole=True)
    assert whole.bits is None and whole.partial is None
    assert torch.equal(whole.to_mask(), layout.to_mask())


@pytest.mark.parametrize("shape", [(33, 40), (3, 33, 40), (1, 3, 33, 40)], ids=str)
def test_ranks_of_token_masks(device, shape):
    mask = torch.rand(shape, device=device) < 0.5
    layout = BlockLayout.from_token_mask(mask, 16, 16)
    want = mask[(None,) * (4 - mask.dim())]
    assert torch.equal(BlockSparse(layout).mask(33, 40), want)


def test_the_format_of_the_bits(device):
    mask = torch.zeros(32, 64, device=device).bool()
    mask[3, 32 + 31] = mask[5, 1] = True
    layout = BlockLayout.from_token_mask(mask, 32, 64)
    assert layout.bits.shape == (1, 32, 2) and layout.bits.dtype == torch.int32
    assert layout.partial.tolist() == [[[[0]]]] and layout.partial.dtype == torch.int32
    want = torch.zeros(32, 2, dtype=torch.int32, device=device)
    want[3, 1], want[5, 0] = -(2**31), 2
    assert torch.equal(layout.bits[0], want)


def test_whole_blocks_need_no_bits_and_equal_ones_share_them(device):
    causal = torch.ones(130, 130, device=device).tril().bool()
    layout = BlockLayout.from_token_mask(causal, 16, 16)
    assert len(layout.bits) == 2  # on the diagonal, and where it hangs over the end
    assert (layout.partial >= 0).sum() == 9
    blocks = torch.ones(4, 4).tril().bool().repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert BlockLayout.from_token_mask(blocks, 16, 16).bits is None


@pytest.mark.parametrize("pairs", [2**24, 1], ids=["at-once", "by-strips"])
@pytest.mark.parametrize("block_q, block_kv", SIZES[:3])
def test_from_mask_mod(device, block_q, block_kv, pairs, monkeypatch):
    monkeypatch.setattr(layout_bits, "PAIRS", pairs)
    layout = BlockLayout.from_mask_mod(by_heads, 2, 3, 70, 95, block_q, block_kv, device=device)
    assert torch.equal(BlockSparse(layout).mask(70, 95).cpu(), dense(by_heads, 2, 3, 70, 95))


def test_mask_mods_that_read_tensors_of_their_length(device):
    document = (torch.arange(70, device=device) // 27).contiguous()

    def same_document(b, h, q_idx, kv_idx):
        return document[q_idx] == document[kv_idx]

    want = document[:, None] == document
    layout = BlockLayout.from_mask_mod(same_document, None, None, 70, 70, 16, 16, device=device)
    assert torch.equal(BlockSparse(layout).mask(70, 70)[0, 0], want)
    flex = create_block_mask(same_document, 1, 1, 70, 70, device=device, BLOCK_SIZE=16)
    assert BlockLayout.from_flex(flex) == layout


@pytest.mark.parametrize("sizes", [(0, 40), (40, 0), (0, 0)], ids=str)
def test_lengths_of_zero(device, sizes):
    layout = BlockLayout.from_mask_mod(by_heads, 2, 3, *sizes, 16, 16, device=device)
    assert BlockSparse(layout).mask(*sizes).shape == (2, 3, *sizes)
    empty = torch.zeros(2, 3, *sizes, device=device).bool()
    assert BlockLayout.from_token_mask(empty, 16, 16) == layout


@pytest.mark.parametrize("pairs", [2**24, 1], ids=["at-once", "by-groups"])
def test_flex_there_and_back(device, pairs, monkeypatch):
    monkeypatch.setattr("sparse_attn.layout_tokens.PAIRS", pairs)
    flex = create_block_mask(by_heads, 2, 3, 70, 95, device=device, BLOCK_SIZE=(16, 32))
    layout = BlockLayout.from_flex(flex)
    want = dense(by_heads, 2, 3, 70, 95).to(device)
    assert torch.equal(BlockSparse(layout).mask(70, 95), want)
    assert layout == BlockLayout.from_token_mask(want, 16, 32)
    assert BlockLayout.from_flex(layout.to_flex(70, 95)) == layout


def test_a_slice_of_flex_has_blocks_alone(device):
    whole = create_block_mask(
        lambda b, h, q, k: q >= k, None, None, 64, 64, device=device, BLOCK_SIZE=16
    )
    piece = whole[:, :, 1:3]
    if piece.mask_mod.__name__ == "_sliced_mask_mod_error":  # of torch from some version on
        sentence = "block_mask with a mask_mod, got a slice, which has lost"
        with pytest.raises(ValueError, match=sentence):
            BlockLayout.from_flex(piece)
    assert BlockLayout.from_flex(piece, whole=True).counts.tolist() == [[[2, 3]]]
    piece.mask_mod = lambda b, h, q, k: q + 16 >= k
    mask = BlockSparse(BlockLayout.from_flex(piece)).mask(32, 64)[0, 0]
    assert torch.equal(mask, torch.ones(32, 64, dtype=torch.bool, device=device).tril(16))


def test_to_flex_gives_the_same_attention():
    query, key, value = Shape(2, 4, 4, 70, 95, 16).make("cpu")
    layout = BlockLayout.from_token_mask(token_mask("cpu", heads=4), 16, 32)
    want = flex_attention(query, key, value, block_mask=layout.to_flex(70, 95))
    out = sa.naive_attention(query, key, value, BlockSparse(layout))
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("lists", [1, 2, 4])
@pytest.mark.parametrize("bits", [True, False], ids=["bits", "blocks"])
def test_to_flex_of_lists_of_key_heads(lists, bits):
    """FlexAttention counts query heads: those of a group share the list of their key head."""
    query, key, value = Shape(2, 4, 2, 70, 95, 16).make("cpu")
    mask = token_mask("cpu", heads=lists)
    mask[:, -1, :16, 32:] = False  # the lists name other blocks too
    layout = BlockLayout.from_token_mask(mask, 16, 32, whole=not bits)
    flex = layout.to_flex(70, 95, heads=4)
    want = flex_attention(query, key, value, block_mask=flex, enable_gqa=True)
    out = sa.naive_attention(query, key, value, BlockSparse(layout))
    torch.testing.assert_close(out, want)
    mask = BlockSparse(layout).mask(70, 95).repeat_interleave(4 // lists, 1)
    asked = create_mask(BlockSparse(layout).mask_mod(heads=4), 2, 4, 70, 95, device="cpu")
    assert torch.equal(asked, mask)
    assert torch.equal(
        BlockSparse(BlockLayout.from_flex(flex)).mask(70, 95).expand(-1, 4, -1, -1), mask
    )


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
def test_density_counts_pairs(device, is_causal):
    mask = token_mask(device)
    pattern = BlockSparse(BlockLayout.from_token_mask(mask, 32, 32))
    want = pattern.mask(70, 95, is_causal).double().mean()
    assert pattern.density(70, 95, is_causal) == pytest.approx(float(want))
    assert not is_causal or float(want) < float(mask.double().mean())


def test_layouts_are_equal_by_their_pairs(device):
    mask = token_mask(device)
    layout = BlockLayout.from_token_mask(mask, 16, 32)
    assert layout == BlockLayout.from_token_mask(mask.clone(), 16, 32)
    mask[0, 0, 0, 0] ^= True
    assert layout != BlockLayout.from_token_mask(mask, 16, 32)
    assert layout != BlockLayout.from_mask(layout.to_mask(), 16, 32)


def test_lists_and_bits_in_another_order_are_the_same_layout(device):
    mask = torch.rand(1, 2, 70, 95, device=device) < 0.5
    layout = BlockLayout.from_token_mask(mask, 16, 32)
    assert (layout.counts == 3).all()
    turned = {"partial": layout.partial.flip(-1).long(), "bits": layout.bits}
    assert BlockLayout(layout.counts, layout.indices.flip(-1), 16, 32, 3, **turned) == layout
    same = {"partial": layout.partial, "bits": layout.bits}
    assert BlockLayout(layout.counts, layout.indices.flip(-1), 16, 32, 3, **same) != layout


def test_partial_blocks_follow_their_indices(device):
    indices = torch.tensor([[2, 0], [1, 7]], device=device)
    partial = torch.tensor([[1, -1], [0, 99]], device=device)
    bits = torch.arange(2 * 16, dtype=torch.int32, device=device).view(2, 16, 1)
    counts = torch.tensor([2, 1], device=device)
    layout = BlockLayout(counts, indices, 16, 16, 3, partial=partial, bits=bits)
    assert layout.indices.tolist() == [[[[0, 2], [1, 0]]]]
    assert layout.partial.tolist() == [[[[-1, 1], [0, -1]]]]
    bits.zero_()
    assert int(layout.bits.sum()) == sum(range(32))  # no alias


GIVEN = {
    "alone": ({"bits": None}, "partial and bits together"),
    "shape": ({"bits": torch.zeros(1, 16, 2).int()}, r"bits of .* shape \(P, 16, 1\)"),
    "dtype": ({"bits": torch.zeros(1, 16, 1).long()}, "bits of dtype int32 .*got int64"),
    "row": ({"partial": torch.tensor([[1]])}, "partial from -1 to 0, got 1"),
    "low": ({"partial": torch.tensor([[-2]])}, "partial from -1 to 0, got -2"),
    "partial": ({"partial": torch.zeros(2, 1).int()}, "partial of indices' shape"),
}


@pytest.mark.parametrize("change, sentence", GIVEN.values(), ids=GIVEN)
def test_wrong_bits(change, sentence):
    right = {"partial": torch.tensor([[0]]), "bits": torch.zeros(1, 16, 1).int()}
    one, none = torch.tensor([1]), torch.tensor([[0]])
    BlockLayout(one, none, 16, 16, 1, **right)
    with pytest.raises(ValueError, match=f"^sparse_attn.BlockLayout: expected {sentence}"):
        BlockLayout(one, none, 16, 16, 1, **(right | change))


WRONG = {
    "dtype": (
        lambda: BlockLayout.from_token_mask(torch.ones(4, 4), 16, 16),
        "mask of dtype bool, got float32",
    ),
    "rank": (
        lambda: BlockLayout.from_token_mask(torch.ones(1, 1, 1, 4, 4).bool(), 16, 16),
        r"mask of shape \(Sq, Skv\), \(H, Sq, Skv\) or \(B, H, Sq, Skv\), got",
    ),
    "block": (lambda: BlockLayout.from_token_mask(torch.ones(4, 4).bool(), 8, 16), "block_q that"),
    "length": (
        lambda: BlockLayout.from_mask_mod(by_heads, 1, 1, -1, 4, 16, 16),
        "Sq of at least 0",
    ),
    "heads": (lambda: BlockLayout.from_mask_mod(by_heads, 1, 0, 4, 4, 16, 16), "H of at least 1"),
}


@pytest.mark.parametrize("call, sentence", WRONG.values(), ids=WRONG)
def test_wrong_masks(call, sentence):
    with pytest.raises(ValueError, match=f"^sparse_attn.BlockLayout: expected {sentence}"):
        call()


WRONG_MODS = {
    "arity": (
        lambda q, k: q > k,
        r"mask_mod to be a function of \(b, h, q_idx, kv_idx\), got \(q, k\)",
    ),
    "python-bool": (lambda b, h, q, k: True, "mask_mod to return a bool tensor .*, got bool"),
    "int": (lambda b, h, q, k: (q > k).int(), "mask_mod to return a bool .*, got int32"),
    "shape": (lambda b, h, q, k: torch.ones(3).bool(), r"got shape \(3,\) for one pair"),
    "if": (
        lambda b, h, q, k: q > k and k > 3,
        "of tensor operations alone .* got Python's if, and",
    ),
}


@pytest.mark.parametrize("mask_mod, sentence", WRONG_MODS.values(), ids=WRONG_MODS)
def test_wrong_mask_mods(mask_mod, sentence):
    with pytest.raises((TypeError, ValueError), match=f"^sparse_attn.BlockLayout: .*{sentence}"):
        BlockLayout.from_mask_mod(mask_mod, 1, 1, 40, 40, 16, 16)


def test_a_mask_mod_is_a_function():
    with pytest.raises(TypeError, match="mask_mod to be a function of .*got Tensor"):
        BlockLayout.from_mask_mod(torch.ones(4, 4), 1, 1, 4, 4, 16, 16)


NOWHERE = {
    "batch": ((10**30, 1, 64, 64, 16, 16), None, "B of at most 536870911, got 1000"),
    "length": ((1, 1, 64, 2**31, 16, 16), None, "Skv of at most 536870911, got 2147483648"),
    "device": ((1, 1, 64, 64, 16, 16), "gpu", "device to be .* got 'gpu'"),
    "meta": ((1, 1, 64, 64, 16, 16), "meta", "a device on which mask_mod can be asked, got meta"),
}


@pytest.mark.parametrize("sizes, device, sentence", NOWHERE.values(), ids=NOWHERE)
def test_sizes_and_devices_without_a_mask(sizes, device, sentence):
    with pytest.raises(ValueError, match=f"^sparse_attn.BlockLayout: expected {sentence}"):
        BlockLayout.from_mask_mod(lambda b, h, q, k: q > k, *sizes, device=device)


def test_a_token_mask_without_contents():
    mask = torch.ones(64, 64, dtype=torch.bool, device="meta")
    with pytest.raises(ValueError, match="mask with contents, got a meta tensor"):
        BlockLayout.from_token_mask(mask, 16, 16)
