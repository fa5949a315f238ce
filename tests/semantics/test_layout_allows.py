"""`BlockLayout.allows`: rows and keys that the layout does not cover are not seen."""

import pytest
import torch

import sparse_attn as sa

OUTSIDE = [-(2**40), -17, -16, -1, 48, 64, 10**6, 2**40]


def layouts(device):
    """3 x 4 blocks: lists alone, two heads with bits, bits of no block; and of no blocks at all."""
    generator = torch.Generator(device).manual_seed(0)
    blocks = torch.rand(1, 2, 3, 4, generator=generator, device=device) < 0.7
    tokens = torch.rand(2, 40, 50, generator=generator, device=device) < 0.4
    listed = sa.BlockLayout.from_mask(blocks, 16, 16)
    none = torch.zeros(0, 16, 1, dtype=torch.int32, device=device)
    whole = torch.full_like(listed.indices, -1)
    return {
        "lists": (listed, blocks.repeat_interleave(16, 2).repeat_interleave(16, 3)),
        "bits": (
            sa.BlockLayout.from_token_mask(tokens, 16, 16),
            torch.nn.functional.pad(tokens, (0, 14, 0, 8))[None],
        ),
        "no-bits": (
            sa.BlockLayout(listed.counts, listed.indices, 16, 16, 4, whole, none),
            blocks.repeat_interleave(16, 2).repeat_interleave(16, 3),
        ),
        "no-rows": (
            sa.BlockLayout.from_mask(blocks[:, :, :0], 16, 16),
            blocks.new_zeros(1, 2, 0, 64),
        ),
        "no-keys": (
            sa.BlockLayout.from_mask(blocks[..., :0], 16, 16),
            blocks.new_zeros(1, 2, 48, 0),
        ),
    }


@pytest.mark.parametrize("name", ["lists", "bits", "no-bits", "no-rows", "no-keys"])
def test_nothing_is_seen_outside(name, device):
    layout, want = layouts(device)[name]
    row, key = (
        torch.tensor(
            [*OUTSIDE[:4], *range(size), *OUTSIDE[4 if size == 48 else 5 :]], device=device
        )
        for size in (48, 64)
    )
    want = torch.nn.functional.pad(want, (0, 64 - want.shape[3], 0, 48 - want.shape[2]))
    seen = layout.allows(row, key)
    assert torch.equal(seen[:, :, 4:52, 4:68], want)
    assert seen.sum() == want.sum()


def test_a_traced_question_has_the_same_answer(device):
    layout = layouts(device)["bits"][0]
    row, key = torch.arange(-20, 60, device=device), torch.arange(-40, 90, device=device)
    traced = torch.compile(layout.allows, backend="aot_eager", fullgraph=True)(row, key)
    assert torch.equal(traced, layout.allows(row, key))


def test_bits_of_no_block_make_a_mask(device):
    """A layout may carry bits that none of its blocks names."""
    layout, want = layouts(device)["no-bits"]
    pattern = sa.BlockSparse(layout)
    assert torch.equal(pattern.mask(48, 64), want)
    assert pattern.density(48, 64) == pytest.approx(float(want.double().mean()))


def test_what_is_no_tensor_is_refused(device):
    layout = layouts(device)["lists"][0]
    with pytest.raises(TypeError, match=r"^sparse_attn\.BlockLayout: expected row to be a tensor"):
        layout.allows(3, torch.arange(4, device=device))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32], ids=str)
@pytest.mark.parametrize("kind", ["lists", "bits"])
def test_numbers_of_other_dtypes(device, kind, dtype):
    layout = layouts(device)[kind][0]
    row, key = torch.arange(48, device=device), torch.arange(64, device=device)
    assert torch.equal(layout.allows(row.to(dtype), key.to(dtype)), layout.allows(row, key))
    for name, places in {"row": (row.float(), key), "key": (row, key.bool())}.items():
        with pytest.raises(
            ValueError, match=rf"^sparse_attn\.BlockLayout: expected {name} of an int"
        ):
            layout.allows(*places)
