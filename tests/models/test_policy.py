"""A policy says which pattern runs: by layer, key length, decode; and prints itself."""

import copy
import dataclasses
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch

import sparse_attn as sa

CAUSAL = sa.Band((7, 0))
SKETCH = sa.BlockTopK(16, selector="sketch", budget_tokens=64)
KEPT = dataclasses.replace(SKETCH, sketch=sa.KeySketch(torch.zeros(1, 1, 32, 16)))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (sa.Band((7, 0)), 16),
        (sa.Band((3, 11)), 24),
        (sa.Band((None, 4)), 10),
        (sa.Band((None, None)), 0),
        (sa.Dilated((7, 0), 3), 48),
        (sa.Full(), 0),
        (sa.Strided(8, 8), 0),
        (sa.TopK(8), 0),
        (sa.BlockTopK(), 0),
    ],
    ids=repr,
)
def test_default_dense_below_is_twice_the_reach(pattern, expected):
    assert sa.Policy(pattern).dense_below == expected


@pytest.mark.parametrize(
    ("pattern", "dense"),
    [
        (sa.Band(7), sa.Full()),
        (sa.Band((7, 0)), sa.Band((None, 0))),
        (sa.Band((0, 7)), sa.Band((0, None))),
        (sa.Band((None, 0)), sa.Band((None, 0))),
        (sa.Band((7, 0), sinks=4), sa.Band((None, 0), sinks=4)),
        (sa.Dilated((7, 0), 3), sa.Band((None, 0))),
        (sa.Dilated(7, 3), sa.Full()),
        (sa.Strided(8, 8), sa.Band((None, 0))),
        (sa.TopK(8), sa.Full()),
    ],
    ids=repr,
)
def test_dense_keeps_the_sides(pattern, dense):
    policy = sa.Policy(pattern, dense_layers=[1], decode=sa.Full(), dense_below=20)
    assert policy.choose(0, 64, 64) is pattern
    assert policy.choose(1, 64, 64) == dense
    assert policy.choose(0, 19, 19) == dense
    assert policy.choose(0, 20, 20) is pattern
    assert policy.choose(0, 1, 64) == dense


@pytest.mark.parametrize("pattern", [CAUSAL, sa.Dilated((7, 0), 2), sa.Strided(8, 8)], ids=repr)
def test_dense_never_looks_ahead(pattern):
    policy = sa.Policy(pattern, dense_layers=[0], decode=sa.Full())
    assert not policy.choose(0, 64, 64).mask(64, 64).triu(1).any()
    assert policy.choose(0, 64, 64).mask(64, 64).tril().sum() == 64 * 65 // 2


def test_decode():
    assert sa.Policy(CAUSAL).choose(0, 1, 64) is CAUSAL
    assert sa.Policy(CAUSAL, decode=sa.TopK(4)).choose(0, 1, 64) == sa.TopK(4)
    assert sa.Policy(CAUSAL, decode=sa.TopK(4)).choose(0, 2, 64) is CAUSAL
    one_token = sa.Policy(CAUSAL, decode=sa.TopK(4), dense_below=0)
    assert one_token.choose(0, 1, 1) is CAUSAL


def test_a_sketch_decodes():
    policy = sa.Policy(sa.Full(), decode=SKETCH)
    assert policy.choose(0, 1, 64) is SKETCH and policy.choose(0, 2, 64) == sa.Full()


@pytest.mark.parametrize(
    ("layers", "share", "expected"),
    [(10, 0.2, (8, 9)), (12, 0.2, (9, 10, 11)), (5, 0.2, (4,)), (4, 1.0, (0, 1, 2, 3)), (4, 0, ())],
)
def test_dense_on_top(layers, share, expected):
    assert sa.Policy.dense_on_top(CAUSAL, layers, share).dense_layers == expected


@pytest.mark.parametrize(
    ("layers", "n", "expected"), [(16, 8, (7, 15)), (7, 3, (2, 5)), (7, 8, ()), (2, 1, (0, 1))]
)
def test_dense_every(layers, n, expected):
    assert sa.Policy.dense_every(CAUSAL, layers, n).dense_layers == expected


def test_table_has_a_line_for_a_run_of_layers():
    lines = str(sa.Policy.dense_on_top(sa.TopK(4), 10)).splitlines()
    assert [line.split() for line in lines] == [
        ["layers", "pattern", "decode"],
        ["0-7", "TopK(k=4)", "TopK(k=4)"],
        ["8-9", "Full()", "Full()"],
    ]


def test_table_says_what_is_dense_below():
    policy = sa.Policy(CAUSAL, dense_layers=[2])
    assert str(policy).splitlines()[-1] == f"below 16 keys: {sa.Band((None, 0))}"
    assert "from 3" in str(policy)
    assert "3-5" in policy.table(6)
    with pytest.raises(ValueError, match="dense_layers"):
        policy.table(2)


@pytest.mark.parametrize(
    ("make", "kind", "sentence"),
    [
        (lambda: sa.Policy("band"), TypeError, "pattern"),
        (lambda: sa.Policy(CAUSAL, dense_layers=3), TypeError, "dense_layers to be .*, got int$"),
        (lambda: sa.Policy(CAUSAL, dense_layers=b"x"), TypeError, "dense_layers to.*, got bytes$"),
        (lambda: sa.Policy(CAUSAL, dense_layers="12"), TypeError, "dense_layers to.*, got str$"),
        (
            lambda: sa.Policy(CAUSAL, dense_layers=torch.tensor(3)),
            TypeError,
            "dense_layers to be an iterable of ints, got Tensor$",
        ),
        (lambda: sa.Policy(CAUSAL, dense_layers=[-1]), ValueError, "dense_layers"),
        (lambda: sa.Policy(CAUSAL, dense_below=-1), ValueError, "dense_below"),
        (lambda: sa.Policy(CAUSAL, dense_below=np.ones(2)), TypeError, "dense_below to be an int"),
        (lambda: sa.Policy(CAUSAL, decode=3), TypeError, "decode"),
        (lambda: sa.Policy(CAUSAL, dense_layers=[4], num_layers=4), ValueError, "dense_layers"),
        (lambda: sa.Policy.dense_on_top(CAUSAL, 4, 1.5), ValueError, "share from 0 to 1,"),
        (lambda: sa.Policy.dense_every(CAUSAL, 4, 0), ValueError, "n of at least 1"),
        (lambda: sa.Policy.dense_on_top(CAUSAL, 2**40), ValueError, "num_layers of at most 65536"),
        (lambda: sa.Policy.dense_every(CAUSAL, 2**40), ValueError, "num_layers of at most 65536"),
        (lambda: sa.Policy(CAUSAL, num_layers=2**40), ValueError, "num_layers of at most 65536"),
        (lambda: sa.Policy(CAUSAL).choose("a", 4, 4), TypeError, "layer to be an int"),
        (lambda: sa.Policy(CAUSAL).choose(0, 4, -4), ValueError, "Skv of at least 0"),
        (lambda: sa.Policy(CAUSAL).table("x"), TypeError, "num_layers to be an int"),
        (lambda: sa.Policy(CAUSAL).check_model("x", 2), TypeError, "num_layers to be an int"),
        (lambda: sa.Policy(CAUSAL).check_model(2, "x"), TypeError, "num_key_heads to be an int"),
        (lambda: sa.Policy(CAUSAL, layers={"0": CAUSAL}), TypeError, "a layer's number to be an"),
        (lambda: sa.Policy(CAUSAL, decode=KEPT), ValueError, "decode without a KeySketch.*got one"),
        (lambda: sa.Policy(SKETCH), ValueError, "pattern that serves a whole prompt.*decode="),
        (lambda: sa.Policy(sa.TopK(4, inside=SKETCH)), ValueError, "pattern that serves a whole"),
        (lambda: sa.Policy(CAUSAL, layers={2: SKETCH}), ValueError, r"layers\[2\] that serves"),
        (lambda: sa.Policy(CAUSAL, heads={2: {0: SKETCH}}), ValueError, r"heads\[2\] that serves"),
    ],
    ids=[
        "pattern",
        "layers",
        "layers-bytes",
        "layers-str",
        "layers-tensor",
        "negative",
        "below",
        "below-array",
        "decode",
        "beyond",
        "share",
        "n",
        "many-on-top",
        "many-every",
        "many",
        "choose",
        "length",
        "table",
        "model-layers",
        "model-heads",
        "layer",
        "kept-sketch",
        "sketch",
        "sketch-inside",
        "sketch-layer",
        "sketch-head",
    ],
)
def test_wrong_arguments_are_refused_by_name(make, kind, sentence):
    with pytest.raises(kind, match=rf"sparse_attn\.Policy.*{sentence}"):
        make()


@pytest.mark.parametrize(
    "change",
    [
        lambda policy: policy.layers.update({2: sa.Full()}),
        lambda policy: policy.layers.setdefault(2, sa.Full()),
        lambda policy: policy.heads.pop(1),
        lambda policy: policy.heads.__setitem__(2, {}),
        lambda policy: policy.heads[1].clear(),
    ],
    ids=["update", "setdefault", "pop", "item", "head"],
)
def test_tables_stay_as_they_are(change):
    policy = sa.Policy(CAUSAL, layers={0: sa.Full()}, heads={1: {0: sa.Full()}})
    for same in (policy, copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert same == policy and same.patterns() == policy.patterns()
        with pytest.raises(TypeError, match=r"^sparse_attn: expected the patterns of a Policy or"):
            change(same)
    other = dataclasses.replace(policy, layers={**policy.layers, 2: sa.TopK(3)})
    assert other.choose(2, 64, 64) == sa.TopK(3) and other.heads == policy.heads


def test_choose_compiles_with_dynamic_lengths():
    torch._dynamo.reset()
    policy = sa.Policy(CAUSAL, decode=sa.Full())

    @torch.compile(fullgraph=True, dynamic=True, backend="eager")
    def reach(x):
        return x * (1 if policy.choose(0, x.shape[0], x.shape[0]) is policy.pattern else 2)

    assert reach(torch.ones(64)).sum() == 64
    assert reach(torch.ones(8)).sum() == 16


@pytest.mark.parametrize("share", [0.2, Fraction(1, 5), np.float32(0.2)], ids=repr)
def test_a_share_of_any_real_kind(share):
    assert sa.Policy.dense_on_top(CAUSAL, 10, share).dense_layers == (8, 9)


def test_replace_finds_dense_below_again_unless_it_was_given():
    policy = dataclasses.replace(sa.Policy(CAUSAL), pattern=sa.Band((99, 0)))
    assert policy == sa.Policy(sa.Band((99, 0))) and policy.dense_below == 200
    given = sa.Policy(CAUSAL, dense_below=5)
    assert dataclasses.replace(given, pattern=sa.Band((99, 0))).dense_below == 5


def test_paths_that_hold_no_policy_are_sentences(tmp_path):
    policy = sa.Policy(sa.Band(3))
    with pytest.raises(TypeError, match=r"Policy\.load: expected path to be a path, got int"):
        sa.Policy.load(3)
    with pytest.raises(TypeError, match=r"Policy\.save: expected path to be a path, got NoneType"):
        policy.save(None)
    sentence = (
        r"Policy\.save: expected a file that can be written, got .*nowhere.p.json \(No such file"
    )
    with pytest.raises(FileNotFoundError, match=sentence):
        policy.save(tmp_path / "nowhere" / "p.json")
    with pytest.raises(IsADirectoryError, match=r"Policy\.save: expected a file .* \(Is a dir"):
        policy.save(tmp_path)


def test_a_class_in_place_of_a_policy():
    model = torch.nn.TransformerEncoderLayer(32, 2, batch_first=True)
    calls = {
        "Policy": lambda kind: sa.swap_attention(model, kind),
        "quality.model": lambda kind: sa.quality.model(model, torch.ones(1, 4, 32), {"p": kind}),
    }
    for owner, call in calls.items():
        for kind, written in ((sa.Policy, r"Policy\(Band\(128\)\)"), (sa.Band, r"Band\(128\)")):
            sentence = f"^sparse_attn.{owner}: .*got the class {kind.__name__}; write {written}$"
            with pytest.raises(TypeError, match=sentence):
                call(kind)
