"""The cases of the benchmarks: their pairs, the references and the peers' inputs."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks import suites, sweeps
from benchmarks.accuracy import Reference
from benchmarks.cases import LAYOUTS, OPTIONS, Case
from benchmarks.inputs import Inputs, allowed_rows
from benchmarks.masks import (
    Band,
    Blocks,
    BlockTopK,
    Dilated,
    Full,
    Scattered,
    Sketched,
    Spec,
    Strided,
    TopK,
)
from benchmarks.peers import contender

CPU = torch.device("cpu")
SMALL = Case(Full(), 96, heads=2, head_dim=16, dtype="float32")
SPECS: list[tuple[Spec, bool]] = [
    (Full(), True),
    (Full(), False),
    (Band(7, 3), False),
    (Band(7, 3), True),
    (Band(None, 0, sinks=3), False),
    (Band(9, 0, sinks=20), True),
    (Band(5, 5, global_tokens=11), False),
    (Band(5, 0, global_tokens=11), True),
    (Dilated(4, 2, 3), False),
    (Dilated(4, 2, 3), True),
    (Strided(5, 8), True),
    (Blocks(16, 32, 0.4), False),
    (Blocks(16, 16, 0.3), True),
    (Blocks(32, 16, 0.3), True),
    (Blocks(16, 16, 0.5, per="one"), False),
    (Scattered(9, (3, 50, 95)), False),
    (Scattered(9, (3, 50, 95)), True),
]


@pytest.mark.parametrize("spec, causal", SPECS, ids=lambda x: getattr(x, "label", str(x)))
def test_pairs_count_what_the_predicate_allows(spec, causal):
    case = replace(SMALL, spec=spec, causal=causal)
    inputs = Inputs(case, CPU)
    rows = torch.arange(case.rows)
    allowed = [allowed_rows(case, inputs, 0, head, rows) for head in range(case.heads)]
    assert inputs.pairs(case) == int(torch.stack(allowed).sum())


def test_the_pattern_handed_to_the_package_is_the_one_counted():
    for spec, causal in SPECS:
        if not isinstance(spec, Blocks):
            case = replace(SMALL, spec=spec, causal=causal)
            theirs = spec.pattern(None).mask(case.rows, case.length, is_causal=causal)
            mine = allowed_rows(case, Inputs(case, CPU), 0, 0, torch.arange(case.rows))
            assert torch.equal(theirs, mine), spec.label


def test_a_wrong_row_is_found():
    inputs = Inputs(SMALL, CPU)
    reference = Reference(SMALL, inputs)
    out = torch.nn.functional.scaled_dot_product_attention(inputs.query, inputs.key, inputs.value)
    assert reference.compare(out).holds
    out[-1, -1, -1] += 1e-4
    assert not reference.compare(out).holds
    out[-1, -1, -1] = torch.nan
    assert not reference.compare(out).holds


def test_topk_leaves_out_rows_without_a_clear_choice():
    case = replace(SMALL, spec=TopK(4))
    inputs = Inputs(case, CPU)
    inputs.key[0, 0] = inputs.key[0, 0, :1]  # every key of the first head scores alike
    assert [problem.head for problem in Reference(case, inputs).problems] == [1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_groups_of_all_suites_have_names_of_their_own(device):
    names = [group.name for suite in suites.NAMES for group in suites.groups_of(suite, device)]
    assert [name for name, times in Counter(names).items() if times > 1] == ["global tokens"]


STORAGE = {
    "paged/16": {"lengths": (5, 70, 33)},
    "packed": {"lengths": (5, 70, 33)},
    "joined": {},
    "joined pages/32": {},
    "8 bits": {"coarse": True},
    "8 bits/16": {"coarse": True},
}


@pytest.mark.parametrize("queries", [None, 1])
@pytest.mark.parametrize("via", STORAGE)
def test_keys_in_other_places_give_the_same_attention(via, queries):
    case = replace(SMALL, length=70, batch=3, causal=True, dtype="bfloat16", queries=queries)
    case = replace(case, heads=4, kv_heads=2, **STORAGE[via])
    if via.startswith("paged") and queries is None:
        case = replace(case, queries=5)
    inputs = Inputs(case, CPU)
    made = contender(via, case, inputs)
    assert made.engine == "tiled"
    reference = Reference(case, inputs)
    out = made.arrange(made.call())
    assert reference.compare(out).holds
    out[-1, -1, 0] += 0.1
    assert not reference.compare(out).holds


@pytest.mark.parametrize(
    "change",
    [
        {"softcap": 1.0},
        *({"option": option, "causal": True, "queries": 60} for option in OPTIONS),
        {"option": "padding"},
        {"option": "left padding", "spec": Band(9, 3, sinks=4), "queries": 60},
        {"option": "left padding", "spec": Band(9, 9, global_tokens=4), "queries": 60},
        {"option": "left padding", "spec": Strided(5, 8), "queries": 60},
        {"option": "offset", "spec": Dilated(4, 2, 3), "queries": 50},
        {"option": "alibi", "spec": Blocks(16, 32, 0.4), "causal": True},
        {"option": "head bias", "spec": TopK(4), "softcap": 2.0},
        {"option": "bounds", "spec": TopK(4), "queries": 60},
        {"option": "bounds", "spec": BlockTopK(16, 0.3), "queries": 60},
        {"layout": "bshd", "softcap": 1.0},
        {"spec": Sketched(16, 64), "queries": 1, "length": 384},
        {"spec": BlockTopK(16, selector="mixed", mass=0.5, settings=()), "causal": True},
        {"queries": 200},
    ],
    ids=str,
)
def test_the_reference_knows_what_changes_scores(change):
    case = replace(SMALL, batch=2, **change)
    inputs = Inputs(case, CPU)
    reference = Reference(case, inputs)
    out = contender("ours", case, inputs).call()
    assert reference.compare(out).holds
    plain = replace(case, softcap=0.0, option="", spec=Full(), causal=False)
    if plain != case:
        assert not reference.compare(contender("ours", plain, Inputs(plain, CPU)).call()).holds
    rows = torch.arange(case.rows)
    seen = [
        allowed_rows(case, inputs, b, h, rows) for b in range(case.batch) for h in range(case.heads)
    ]
    most = case.spec.k if isinstance(case.spec, TopK) else case.length
    assert inputs.pairs(case) == int(torch.stack(seen).sum(-1).clamp(max=most).sum())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_changes_places_alone(layout):
    case = replace(SMALL, kv_heads=1, layout=layout)
    found, plain = Inputs(case, CPU), Inputs(replace(case, layout="bhsd"), CPU)
    row = {"bhsd": 16, "bshd": 2 * 16, "qkv": 4 * 16}[layout]
    assert torch.equal(found.query, plain.query) and found.query.stride(2) == row
    assert torch.equal(found.value, plain.value) and found.value.stride(3) == 1


def test_uneven_lists_have_the_pairs_of_even_ones():
    even = Blocks(16, 16, 0.2)
    masks = [
        spec.block_mask((32, 32), 4096, 4096, True, CPU, 0)
        for spec in (even, replace(even, spread=20.0))
    ]
    pairs = [even.pairs(mask, 4096, 4096, True) for mask in masks]
    assert 0.97 < pairs[1] / pairs[0] < 1.03
    by_head = masks[1].sum((0, 2, 3)).double()
    assert 15 < by_head[-1] / by_head[0] < 21
    rows = masks[1].sum((0, 1, 3))[64:]
    assert rows[1::2].sum() > 1.8 * rows[::2].sum()


@pytest.mark.parametrize("density", [0.05, 0.25, 0.5, 0.9])
def test_points_of_the_sparsity_curve_have_the_share_they_are_drawn_at(density):
    group = next(g for g in sweeps.report(sweeps.CPU) if g.sweep == "density")
    case = group.entries[0].case
    for entry in sweeps._sparsity(sweeps.CPU, density).entries:
        if entry.name in ("band", "dilated"):
            counts = entry.case.spec.counts(np.arange(case.length), case.length, False)
            share = counts.sum() / case.length**2
            most = 0.5 if entry.name == "dilated" else 1.0
            assert share == pytest.approx(min(density, most), abs=0.005)


def test_every_point_of_the_report_stays_within_its_scale():
    for scale in (sweeps.GPU, sweeps.CPU):
        longest = max(
            e.case.length
            for g in sweeps.report(scale)
            for e in g.entries
            if e.via in ("naive", "math")
        )
        assert longest <= scale.longest_materialised
    assert np.all(np.diff(sweeps.GPU.lengths) > 0)
