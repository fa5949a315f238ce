"""Errors of Python's own name the class that a user wrote, not the part of it that has a method."""

import inspect

import pytest
import torch

import sparse_attn as sa


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (sa.Policy.dense_on_top, "Policy.dense_on_top"),
        (sa.Policy.dense_every, "Policy.dense_every"),
        (lambda: sa.Policy(sa.Band(3)).table(1, 2), "Policy.table"),
        (sa.BlockLayout.local, "BlockLayout.local"),
        (sa.BlockLayout.bigbird, "BlockLayout.bigbird"),
        (sa.BlockLayout.strided, "BlockLayout.strided"),
        (sa.BlockLayout.local_nd, "BlockLayout.local_nd"),
        (sa.BlockLayout.from_token_mask, "BlockLayout.from_token_mask"),
        (sa.BlockLayout.from_mask_mod, "BlockLayout.from_mask_mod"),
        (lambda: sa.BlockLayout.local(64, 64, 16, 16, 1).plot(colour=3), "BlockLayout.plot"),
        (lambda: sa.Band(3).plot(), "Pattern.plot"),
    ],
    ids=lambda argument: argument if isinstance(argument, str) else "",
)
def test_a_missing_argument_names_what_was_called(call, name):
    with pytest.raises(TypeError, match=rf"^{name}\(\) (missing|got an|takes)"):
        call()


@pytest.mark.parametrize("kind", [sa.Policy, sa.BlockLayout, sa.Band, sa.Advice])
def test_no_public_method_is_called_as_one_of_a_part(kind):
    of_bases = {base.__name__ for base in kind.__mro__ if base.__name__ in dir(sa)}
    for name, method in inspect.getmembers(kind, callable):
        if not name.startswith("_") and method.__module__.startswith("sparse_attn"):
            assert method.__qualname__.split(".")[0] in of_bases, name


def test_a_sketch_with_too_little_capacity_says_what_key_needs():
    key = torch.randn(1, 2, 100, 16)
    sentence = (
        r"^sparse_attn\.KeySketch: expected capacity of at least 100, the tokens of key, got 10$"
    )
    with pytest.raises(ValueError, match=sentence):
        sa.KeySketch(key, capacity=10)
    assert sa.KeySketch(key[:, :, :64], capacity=10).capacity == 64
