"""A user's own pattern: `allows` alone makes a mask, a density and the oracle's attention."""

import re

import pytest
import torch
from reference import Shape

import sparse_attn as sa
from sparse_attn.testing import assert_close_to_reference


class Diagonals(sa.Pattern):
    """Every third key up to the row's own."""

    def allows(self, row, position, key):
        return (key <= position) & ((position - key) % 3 == 0)


class Columns(sa.Pattern):
    """Broadcasts over the rows."""

    def allows(self, row, position, key):
        return key % 5 == 0


class LaterBand(sa.Band):
    """A band with an `allows` of its own."""

    def allows(self, row, position, key):
        return super().allows(row, position, key) & (key >= 7)


OWN = {"diagonals": Diagonals(), "columns": Columns(), "band": LaterBand(4)}


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("pattern", OWN.values(), ids=OWN)
def test_naive_attention_is_the_patterns_own(device, pattern, is_causal):
    query, key, value = Shape(2, 4, 2, 33, 47, 16).make(device)
    common = {"is_causal": is_causal, "return_lse": True}
    got = sa.naive_attention(query, key, value, pattern, **common)
    assert_close_to_reference(got, query, key, value, pattern, **common)
    mask = pattern.mask(33, 47, is_causal).to(device)
    masked = sa.naive_attention(query, key, value, attn_mask=mask, return_lse=True)
    assert torch.equal(got[0], masked[0]) and torch.equal(got[1], masked[1])


@pytest.mark.parametrize("pattern", OWN.values(), ids=OWN)
def test_a_pattern_of_ones_own_names_key_positions(device, pattern):
    query, key, value = Shape(2, 4, 2, 33, 47, 16).make(device)
    common = {"key_origin": torch.tensor([5, -2], device=device)}
    got = sa.naive_attention(query, key, value, pattern, **common)
    assert torch.equal(got, sa.naive_attention(query, key, value, pattern))
    assert_close_to_reference(got, query, key, value, pattern, **common)


@pytest.mark.parametrize("mask", ["none", "bool", "additive"])
@pytest.mark.parametrize("offset", [None, 5, [3, 20]], ids=str)
def test_naive_attention_with_common_arguments(device, mask, offset):
    query, key, value = Shape(2, 4, 2, 33, 47, 16).make(device)
    masks = {
        "none": None,
        "bool": torch.rand(2, 1, 33, 47, device=device) < 0.6,
        "additive": torch.randn(33, 47, device=device),
    }
    if isinstance(offset, list):
        offset = torch.tensor(offset, dtype=torch.int32, device=device)
    common = {"attn_mask": masks[mask], "query_offset": offset, "softcap": 5.0}
    got = sa.naive_attention(query, key, value, Diagonals(), **common)
    assert_close_to_reference(got, query, key, value, Diagonals(), **common)


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("pattern", OWN.values(), ids=OWN)
def test_density_counts_the_mask(pattern, is_causal, monkeypatch):
    monkeypatch.setattr("sparse_attn._pattern._PAIRS", 100)  # some rows a step
    want = pattern.mask(33, 47, is_causal).double().mean()
    assert pattern.density(33, 47, is_causal) == pytest.approx(float(want))


def test_density_makes_no_mask_of_all_pairs():
    pattern, sizes = Diagonals(), []

    class Seen(sa.Pattern):
        def allows(self, row, position, key):
            allowed = pattern.allows(row, position, key)
            sizes.append(allowed.numel())
            return allowed

    Seen().density(5000, 5000)
    assert sum(sizes) == 5000**2 and max(sizes) <= 2**22


@pytest.mark.parametrize("pattern", OWN.values(), ids=OWN)
def test_engines_refuse_what_they_do_not_know(pattern):
    tensors = Shape(1, 2, 1, 9, 9, 16).make("cpu")
    packed = [tensor[0].transpose(0, 1) for tensor in tensors]
    starts = torch.tensor([0, 9])
    name = type(pattern).__name__
    calls = {
        "sparse_attention": lambda: sa.sparse_attention(*tensors, pattern),
        "varlen_attention": lambda: sa.varlen_attention(
            *packed, starts, starts, 9, 9, pattern=pattern
        ),
    }
    for function, call in calls.items():
        sentence = f"^sparse_attn.{function}: not served: {name}, which has no op .*naive_attention"
        with pytest.raises(NotImplementedError, match=sentence):
            call()
    answer = sa.can_use(*tensors, pattern)
    assert not answer and f"{name}, which has no op" in answer.reasons[0]


POLICIES = {
    "pattern": lambda own: sa.Policy(own),
    "decode": lambda own: sa.Policy(sa.Full(), decode=own),
    "layers[2]": lambda own: sa.Policy(sa.Full(), layers={2: own}),
    "heads[1]": lambda own: sa.Policy(sa.Full(), heads={1: {0: sa.Full(), 3: own}}),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_refuses_it_when_it_is_made(name):
    sentence = f"^sparse_attn.Policy: {re.escape(name)} not served: Diagonals, which has no op"
    with pytest.raises(NotImplementedError, match=sentence):
        POLICIES[name](Diagonals())


def test_it_shows_what_it_holds():
    class Every(sa.Pattern):
        def __init__(self, step):
            self.step = step

        def allows(self, row, position, key):
            return key % self.step == 0

    assert repr(Diagonals()) == "Diagonals()" and repr(Every(3)) == "Every(step=3)"


def test_a_wrong_call_is_refused_by_the_op(device):
    query, key, value = Shape(2, 4, 2, 33, 47, 16).make(device)
    wrong = {
        "attn_mask that broadcasts": {"attn_mask": torch.ones(33, 46, device=device).bool()},
        "attn_mask of dtype": {"attn_mask": torch.ones(33, 47, device=device).int()},
        "query_offset of shape": {"query_offset": torch.zeros(3, device=device).int()},
    }
    for sentence, common in wrong.items():
        with pytest.raises(ValueError, match=f"^sparse_attn::naive: expected {sentence}"):
            sa.naive_attention(query, key, value, Diagonals(), **common)
    with pytest.raises(ValueError, match="^sparse_attn::naive: expected query of shape"):
        sa.naive_attention(query[0], key, value, Diagonals())


def test_what_allows_returns_is_checked(device):
    class Weights(sa.Pattern):
        def allows(self, row, position, key):
            return (key <= position).float()

    sentence = "^sparse_attn.Weights: expected allows to return a bool tensor, got float32"
    with pytest.raises(TypeError, match=sentence):
        sa.naive_attention(*Shape(1, 1, 1, 4, 4, 16).make(device), Weights())
    with pytest.raises(TypeError, match=sentence):
        Weights().density(4, 4)


def test_a_subclass_with_nothing_new_keeps_its_op(device):
    class Named(sa.Band):
        """The same band."""

    query, key, value = Shape(1, 1, 1, 9, 9, 16).make(device)
    out = sa.sparse_attention(query, key, value, Named(3))
    assert torch.equal(out, sa.band_attention(query, key, value, 3))


@pytest.mark.parametrize(
    "kind, written",
    [(sa.Band, r"Band\(128\)"), (sa.Full, r"Full\(\)"), (Diagonals, r"Diagonals\(\.\.\.\)")],
    ids=["band", "full", "own"],
)
def test_a_class_in_place_of_a_pattern(kind, written):
    tensors = Shape(1, 1, 1, 9, 9, 16).make("cpu")
    calls = {
        "sparse_attention": lambda: sa.sparse_attention(*tensors, kind),
        "naive_attention": lambda: sa.naive_attention(*tensors, kind),
        "can_use": lambda: sa.can_use(*tensors, kind),
        "Policy": lambda: sa.Policy(kind),
    }
    for owner, call in calls.items():
        sentence = f"^sparse_attn.{owner}: .*got the class {kind.__name__}; write {written}$"
        with pytest.raises(TypeError, match=sentence):
            call()


def test_a_pattern_without_allows_says_so():
    class Nothing(sa.Pattern):
        pass

    sentence = "^sparse_attn.Nothing: expected a method allows, got none"
    with pytest.raises(NotImplementedError, match=sentence):
        Nothing().mask(4, 4)
    with pytest.raises(NotImplementedError, match=sentence):
        sa.naive_attention(*torch.randn(3, 1, 1, 4, 16), Nothing())


class Says(sa.Pattern):
    """Allows what it is given."""

    def __init__(self, *sizes):
        self.allowed = torch.ones(sizes, dtype=torch.bool)

    def allows(self, row, position, key):
        return self.allowed.to(key.device)


@pytest.mark.parametrize("sizes", [(3, 3), (8, 7), (2, 1, 1, 8, 8), (1, 1, 9, 1)], ids=str)
def test_shapes_that_say_nothing_of_the_pairs_are_refused(device, sizes):
    sentence = (
        r"^sparse_attn\.Says: expected allows to return what broadcasts to \(B, Hq, 8, 8\), got"
    )
    pattern = Says(*sizes)
    for ask in (pattern.mask, pattern.density):
        with pytest.raises(ValueError, match=sentence):
            ask(8, 8)
    with pytest.raises(ValueError, match=sentence):
        sa.naive_attention(*torch.randn(3, 1, 2, 8, 16, device=device), pattern)


@pytest.mark.parametrize("sizes", [(3, 1, 8, 8), (1, 3, 8, 8)], ids=["batch", "heads"])
def test_other_batch_entries_or_heads_are_refused(device, sizes):
    sentence = r"Says: expected allows to return what broadcasts to \(2, 4, 8, 8\), got shape"
    with pytest.raises(ValueError, match=sentence):
        sa.naive_attention(*torch.randn(3, 2, 4, 8, 16, device=device), Says(*sizes))


@pytest.mark.parametrize("sizes", [(), (8,), (8, 1), (1, 8), (2, 4, 8, 8)], ids=str)
def test_shapes_that_broadcast_are_masks(device, sizes):
    query, key, value = torch.randn(3, 2, 4, 8, 16, device=device)
    out = sa.naive_attention(query, key, value, Says(*sizes))
    mask = torch.ones(2, 4, 8, 8, dtype=torch.bool, device=device)
    assert torch.equal(out, sa.naive_attention(query, key, value, attn_mask=mask))
