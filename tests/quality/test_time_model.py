"""The advisor's clock, and the time that a pattern is predicted to take."""

import sys

import pytest
import torch

import sparse_attn as sa


def test_the_time_left_counts_forwards(monkeypatch):
    from sparse_attn.advisor import _clock

    now = [100.0]
    monkeypatch.setattr(_clock.time, "monotonic", lambda: now[0])
    clock = _clock.Clock(None, layers=4, evaluations=10)
    clock.time_forward(lambda: now.append(now.pop() + 2))
    now[0] += 3
    clock.measured(1)  # a layer takes 3 seconds, a forward 2
    assert clock.left() == 3 * 3 + 10 * 2 + 11 * 2
    clock.evaluated()
    assert clock.left() == 9 * 2 + 11 * 2
    for seconds in (1, 1):  # the first forward warmed up
        assert clock.time_forward(lambda own=seconds: now.append(now.pop() + own)) is None
    assert clock.left() == 9 * 1 + 11 * 1
    clock.evaluations = 0
    for forwards in (10, 9, 8, 8):  # the times of dense attention and the policy stay
        clock.validated()
        assert clock.left() == forwards
    hurried = _clock.Clock(1.0, layers=4, evaluations=100)
    hurried.time_forward(lambda: now.append(now.pop() + 2))
    assert hurried.left() == 58 - 11 * 2 + 11 * 2  # the minute, less what has gone
    assert hurried.has_time_for(9, 0.5) is (2 + 18 < 19) and hurried.has_time_for(8, 0.5)
    now[0] += 40
    assert hurried.out_of_time(1.0)() and hurried.left() == 22


@pytest.mark.parametrize(("left", "words"), [(89.4, "about 89 s left"), (90.0, "about 2 min left")])
def test_the_bar_says_how_long_the_rest_takes(left, words):
    pytest.importorskip("tqdm")
    from sparse_attn._progress import Progress

    with Progress(4) as progress:
        progress.step("layer 2", left=left)
        shown = str(progress._bar)
        assert "layer 2" in shown and "25%" in shown and words in shown


def test_costs_are_visited_tiles_by_measured_rates(tmp_path, monkeypatch):
    from sparse_attn.advisor import _rates

    monkeypatch.setenv("SPARSE_ATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(_rates, "_known", {})
    monkeypatch.setattr(_rates, "LENGTH", {"cpu": 512})
    timed = []

    def seconds(tensors, pattern):
        timed.append(type(pattern).__name__)
        tiles = pattern.cost(512, is_causal=True)
        if pattern._region != sa.Full() and timed[-1] != "Band":
            # of lists the pairs count, however many tiles they touch
            tiles = sa.Full().cost(512, is_causal=True) * pattern._region.density(512, 512, True)
            tiles /= sa.Full().density(512, 512, True)
        slowed = 3 if len(timed) in (1, 2) else 1  # by others, for a while
        return (
            slowed * tiles * {"Full": 1.0, "Band": 1.52, "BlockSparse": 2.0, "TopK": 3.0}[timed[-1]]
        )

    monkeypatch.setattr(_rates, "seconds_of_call", seconds)
    query, key = torch.randn(1, 4, 256, 16), torch.randn(1, 2, 256, 16)
    band = sa.Band((63, 0))
    tiles = band.cost(256, is_causal=True) / sa.Full().cost(256, is_causal=True)
    assert _rates.cost(band, query, key, True, [0.1, 0.1]) == pytest.approx([1.5 * tiles] * 2)
    found = _rates.cost(sa.BlockTopK(16), query, key, True, [0.1, 0.3])
    assert found == pytest.approx([0.2, 0.6])
    assert timed == 3 * ["Band", "Full"] + 3 * ["BlockSparse", "Full"]
    monkeypatch.setattr(_rates, "_known", {})  # another process finds them in the file
    assert _rates.cost(band, query, key, True, [0.1]) == pytest.approx([1.5 * tiles])
    assert len(timed) == 12
    _rates.cost(sa.BlockTopK((32, 16)), query, key, True, [0.1])  # other blocks have their own rate
    assert timed[12:] == 3 * ["BlockSparse", "Full"]
    inside = sa.TopK(9, inside=sa.BlockTopK(16))  # scores its blocks: a rate of its own
    assert _rates.cost(inside, query, key, True, [0.1]) == pytest.approx([0.3])
    assert timed[18:] == 3 * ["TopK", "Full"]


def test_without_the_module_that_counts_tiles_no_rate_is_kept(tmp_path, monkeypatch):
    from sparse_attn.advisor import _rates

    monkeypatch.setenv("SPARSE_ATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(_rates, "_known", {})
    monkeypatch.setitem(sys.modules, "sparse_attn._info", None)  # importing it now fails
    monkeypatch.delattr(sa, "_info", raising=False)
    query, key = torch.randn(1, 4, 256, 16), torch.randn(1, 2, 256, 16)
    assert _rates.cost(sa.Band((63, 0)), query, key, True, [0.1, 0.3]) == [0.1, 0.3]
    assert list(tmp_path.iterdir()) == []


def test_token_top_k_is_timed_by_the_keys_that_it_scores(llama, ids, monkeypatch):
    from sparse_attn.advisor import _local

    def cost(pattern, query, key, is_causal, pairs):
        timed.append((pattern, pairs))
        return pairs

    timed = []
    monkeypatch.setattr(_local, "cost", cost)
    patterns = {"top": sa.TopK(4), "band": sa.Band((31, 0))}
    sa.advise(llama, ids, 0.7, by="time", patterns=patterns)
    for pattern, pairs in timed:
        assert (pairs == pytest.approx([1.0, 1.0])) is (pattern != patterns["band"])
    assert set(patterns.values()) <= {pattern for pattern, _ in timed}


@pytest.mark.parametrize(("room", "held"), [(0, False), (4 << 30, True)])
def test_outputs_that_are_large_are_not_held(llama, ids, monkeypatch, room, held):
    from sparse_attn.advisor import _run

    def judge(*args, hold):
        asked.append(hold)
        return made(*args, hold=hold)

    asked, made = [], _run.Judge
    monkeypatch.setattr(_run, "Judge", judge)
    monkeypatch.setattr(_run, "_HELD_BYTES", room)
    sa.advise(llama, ids, 0.7, patterns={"band": sa.Band((31, 0))})
    assert asked[0] is held
