"""The patterns that the advisor tries: the usual ones, and a user's by name."""

import pytest
import torch

import sparse_attn as sa
from sparse_attn.advisor._candidates import candidates, named


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("by", ["pairs", "time"])
@pytest.mark.parametrize("length", [64, 512, 1024])
def test_usual_candidates_are_served(length, by, is_causal):
    found = candidates(length, by, is_causal)
    assert any(isinstance(pattern, sa.BlockTopK) for pattern in found.values())
    query = torch.randn(1, 2, length, 16)
    for pattern in found.values():
        assert sa.can_use(query, query, query, pattern, is_causal=is_causal)


def test_a_first_token_sees_all_keys_in_the_usual_bands_of_an_encoder():
    found = candidates(512, "pairs", False)
    bands = [pattern for pattern in found.values() if isinstance(pattern, sa.Band)]
    assert found["band 32 + 32, 4 sinks, 1 global"] == sa.Band(32, sinks=4, global_tokens=1)
    assert len(bands) == 3
    for band in bands:
        seen = band.mask(512, 512)
        assert seen[0].all() and seen[:, 0].all() and not seen[-1].all()


def test_patterns_of_a_list_that_read_alike_are_all_tried():
    blocks = torch.ones(4, 4).tril().bool()
    layouts = [sa.BlockLayout.from_mask(mask, 16, 16) for mask in (blocks, blocks.triu(-1))]
    patterns = [sa.BlockSparse(layout) for layout in layouts]
    found = named("advise", patterns, 64, "pairs")
    assert list(found.values()) == [*patterns, sa.Full()]
    assert list(found) == [repr(patterns[0]), f"{patterns[1]!r} (2)", "dense"]


@pytest.mark.parametrize(
    "patterns", ["band", torch.ones(2), sa.Band(3)], ids=["str", "tensor", "one"]
)
def test_what_is_no_list_is_refused_whole(patterns):
    sentence = "expected patterns to be a list of patterns, or a mapping of name to pattern, got"
    with pytest.raises(
        TypeError, match=rf"^sparse_attn\.advise: {sentence} {type(patterns).__name__}"
    ):
        named("advise", patterns, 64, "pairs")
