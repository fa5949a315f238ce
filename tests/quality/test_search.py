"""The advisor's search: the cheapest choice that keeps what is asked, also of other text."""

from dataclasses import replace

import pytest

import sparse_attn as sa
from sparse_attn.advisor._local import Local
from sparse_attn.advisor._run import _margin
from sparse_attn.advisor._search import Search
from sparse_attn.quality._model import PolicyQuality


def search_over(errors, margin=0.0):
    """A search over two units whose output loses what the local errors say."""
    local = Local({"sparse": sa.Band(1), "dense": sa.Full()})
    for unit, error in errors.items():
        local.figures[unit] = {
            "sparse": (error, 0.5, 0.1, 0.1),
            "dense": (0.0, 1.0, 1.0, 1.0),
        }
        local.allowed[unit] = 1 / len(errors)

    def judge(name, choice):
        loss = sum(errors[unit] ** 2 for unit, own in choice.items() if own == "sparse")
        return 1 - loss, loss, margin

    return Search(local, judge)


def test_the_search_spares_the_heads_that_matter():
    search = search_over({(0, 0): 0.5, (0, 1): 0.1, (1, 0): 0.1, (1, 1): 0.1})
    best = search.find(0.95, 12, lambda: False)
    assert best.choice == {(0, 0): "dense", (0, 1): "sparse", (1, 0): "sparse", (1, 1): "sparse"}
    assert search.find(1.5, 12, lambda: False) is None


def test_the_margin_is_kept_on_top():
    errors = {(0, 0): 0.1, (0, 1): 0.1, (1, 0): 0.1}
    assert search_over(errors).find(0.97, 12).pairs == pytest.approx(0.1)
    assert search_over(errors, margin=0.005).find(0.97, 12) is None  # 0.97 is no longer sure
    assert search_over(errors, margin=0.005).find(0.96, 12).pairs == pytest.approx(0.1)


@pytest.mark.parametrize(("by", "want"), [("pairs", "few"), ("time", "fast")])
def test_the_search_makes_its_cost_small(by, want):
    local = Local({"few": sa.Band(1), "fast": sa.Band(2), "dense": sa.Full()})
    local.allowed[0, 0] = 1.0
    local.figures[0, 0] = {  # error, mass, pairs, time
        "few": (0.1, 0.5, 0.1, 0.4),
        "fast": (0.1, 0.5, 0.3, 0.2),
        "dense": (0.0, 1.0, 1.0, 1.0),
    }
    search = Search(local, lambda name, choice: (0.99, 0.01, 0.0), by)
    assert search.find(0.9, 8).choice == {(0, 0): want}
    for name in ("few", "fast"):
        search.try_choice(name, {(0, 0): name})
    assert search.best(0.9).choice == search.most_kept().choice == {(0, 0): want}


@pytest.mark.parametrize(
    ("top1", "kl", "margin"), [(0.99, 0.01, 0.062), (0.92, 0.01, 0.0), (1.0, -1e-9, 0.0)]
)
def test_luck_of_a_text_is_its_margin(top1, kl, margin):
    row = PolicyQuality("p", 0.2, 9.0, top1, kl, 0.1, 0.99, None, 0.5)
    assert _margin(row) == pytest.approx(margin)
    without_tokens = replace(row, top1=None, kl=None, perplexity=None)
    assert _margin(without_tokens) == pytest.approx(0.5 * 2**0.5)


def test_what_other_text_misses_is_asked_for_on_top():
    units = {(layer, 0): 0.1 for layer in range(10)}
    search = search_over({unit: 0.1 + 0.001 * unit[0] for unit in units})
    best = search.find(0.9, 20)
    judged = []

    def other(less):
        def kept(outcome):
            judged.append(outcome.kept)
            return outcome.kept - less

        return kept

    assert search.validated(best, 0.9, other(0.0), 20) is best and len(judged) == 1
    judged.clear()
    safer = search.validated(best, 0.9, other(0.03), 20)
    assert 0.93 <= safer.kept < 0.96 and len(judged) == 2
    judged.clear()
    assert search.validated(best, 0.9, other(0.5), 20) is search.most_kept()
    assert len(judged) <= 4 and judged == sorted(judged)


def test_other_text_that_loses_several_times_as_much_takes_no_dense_attention():
    search = search_over({(layer, 0): 0.05 + 0.001 * layer for layer in range(40)})
    best = search.find(0.9, 20)
    judged = []

    def kept(outcome):
        judged.append(1 - 3 * (1 - outcome.kept))
        return judged[-1]

    safer = search.validated(best, 0.9, kept, 20)
    assert len(judged) == 2 and judged[0] < 0.8 and judged[1] >= 0.9
    assert best.pairs < safer.pairs < search.most_kept().pairs


@pytest.mark.parametrize("by", ["key head", "layer"])
def test_units_weigh_what_they_do_to_the_output(by):
    """Rounding, which dense attention by these kernels has too, weighs nothing."""
    units = [(layer, head) for layer in range(3) for head in range(2)]
    search = search_over(dict.fromkeys(units, 0.1))

    def judge(name, choice):
        hurt = {unit: 9 if unit == (1, 0) else 1 for unit, own in choice.items() if own != "dense"}
        loss = 0.5 + sum(0.01 * times for times in hurt.values())
        return 1 - loss, loss, 0.0

    search.judge = judge
    parts = (
        [(unit,) for unit in units]
        if by == "key head"
        else [tuple(units[i : i + 2]) for i in (0, 2, 4)]
    )
    search.weigh("sparse", parts, lambda: False)
    hurt = {(1, 0): 9.0} if by == "key head" else {(1, 0): 5.0, (1, 1): 5.0}
    assert search.weights == pytest.approx(dict.fromkeys(units, 1.0) | hurt)
