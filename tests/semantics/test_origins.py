"""Which patterns count from where a text begins, so that padded texts tell them."""

import pytest
import torch

import sparse_attn as sa
from sparse_attn._origins import counts_from_origin, text_arguments

LAYOUT = sa.BlockLayout.local(32, 32, 16, 16, 1)
KEY_POSITIONS = {
    "full": sa.Full(),
    "window": sa.Band((7, 0)),
    "taps": sa.Dilated((7, 0), 2),
    "layout": sa.BlockSparse(LAYOUT),
    "topk": sa.TopK(3),
    "topk-in-layout": sa.TopK(3, sa.BlockSparse(LAYOUT)),
    "by-head": sa.ByHead({0: sa.Full()}, rest=sa.Band(3)),
}
TEXT_POSITIONS = {
    "sinks": sa.Band((7, 0), sinks=2),
    "globals": sa.Band(7, global_tokens=1),
    "taps-and-sinks": sa.Dilated((7, 0), 2, sinks=1),
    "columns": sa.Strided(4, 8),
    "chosen-blocks": sa.BlockTopK(),
    "topk-in-chosen-blocks": sa.TopK(3, sa.BlockTopK()),
    "by-head": sa.ByHead({0: sa.Full()}, rest=sa.Strided(4, 8)),
}


class Unknown(sa.Pattern):
    """A pattern of a later kind, of which nobody has said how it counts."""

    def allows(self, row, position, key):
        return key < 3


@pytest.mark.parametrize("name", KEY_POSITIONS)
def test_of_key_positions(name):
    assert not counts_from_origin(KEY_POSITIONS[name])


@pytest.mark.parametrize("name", TEXT_POSITIONS)
def test_of_text_positions(name):
    assert counts_from_origin(TEXT_POSITIONS[name])


def test_an_unknown_pattern_is_told_where_texts_begin():
    padding = torch.arange(8).ge(3)[None, None, None]
    said = text_arguments(Unknown(), padding, seq_q=2)
    assert said["key_origin"].tolist() == [3]
    assert said["key_bounds"].tolist() == [[[[3, 8], [3, 8]]]]
