"""The key sketch on the CPU: every instruction set, and runs of keys that threads share."""

import pytest
import torch
from isa import check_with_isa
from reference import DTYPES, Shape
from selection import check_selection, decoding

import sparse_attn as sa

#: Keys that are scored together (csrc/cpu/select/sketch_masses.h).
RUN = 1024

SCRIPT = """
import torch
import sparse_attn as sa
from reference import DTYPES, Shape
from selection import check_selection, decoding

torch.manual_seed(0)
for bits in (2, 4):
    for head_dim in (8, 40, 64, 72, 256):
        for group, rows, dtype in zip((1, 2, 3, 5), (3, 1, 1, 4), [*DTYPES.values()] * 2):
            query, key, _ = Shape(1, 2 * group, 2, rows, 345, head_dim).make("cpu", dtype)
            check_selection(decoding(sa.KeySketch(key, bits)), 2 * query, key, error=1e-5)
            check_selection(decoding(group="kv"), 2 * query, key, True, error=1e-5)
"""


@pytest.mark.parametrize("isa", ["plain", "avx2", "avx512"])
def test_forced_instruction_set(isa):
    check_with_isa(isa, SCRIPT)


@pytest.mark.parametrize("group", ["q", "kv"])
@pytest.mark.parametrize("Skv", [RUN - 1, RUN, RUN + 1, 2 * RUN + 513])
def test_rows_and_runs(Skv, group):
    """More rows than are scored together, on runs whose highest scores are far apart."""
    query, key, _ = Shape(1, 6, 2, 9, Skv, 16).make("cpu")
    key[:, :, RUN // 2 : RUN] *= 3
    bounds = torch.tensor([[40 * row, Skv - 77 * row] for row in range(9)], dtype=torch.int32)
    bounds[3] = torch.tensor([RUN, RUN])
    bounds[4] = torch.tensor([RUN - 5, RUN + 1])
    bounds = bounds.view(1, 1, 9, 2).expand(1, 6, 9, 2).contiguous()
    for key_bounds in (None, bounds):
        pattern = decoding(group=group, sink_blocks=0, local_blocks=0)
        check_selection(pattern, 3 * query, key, key_bounds=key_bounds, error=1e-5)


@pytest.mark.parametrize("keys", [(0, 64), (RUN + 64, RUN + 128), (RUN, 2 * RUN)], ids=str)
def test_a_score_that_is_no_number_keeps_all_that_its_row_sees(keys):
    """Even where numbers are missing in one run alone; other rows choose as if none were."""
    query, key, _ = Shape(1, 4, 2, 1, 3 * RUN, 16).make("cpu")
    clean = sa.select_blocks(query, key, decoding()).to_mask()
    key[:, 1, slice(*keys)] = torch.nan
    kept = sa.select_blocks(query, key, decoding()).to_mask()
    assert kept[:, 2:].all()
    assert torch.equal(kept[:, :2], clean[:, :2]) and not clean.all()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_nothing_depends_on_the_number_of_threads(dtype):
    query, key, _ = Shape(1, 8, 2, 2, 3 * RUN + 100, 64).make("cpu", dtype)
    threads = torch.get_num_threads()

    def results():
        sketch = sa.KeySketch(key[:, :, :90])
        sketch.append(key[:, :, 90:])  # from an open group past several runs to another
        pattern = decoding(sketch, mass=0.8, tokens=2000, group="kv")
        made = decoding(mass=0.8, tokens=2000)
        layouts = [sa.select_blocks(query, key, choice) for choice in (pattern, made)]
        lists = [(layout.counts, layout.indices) for layout in layouts]
        return [sketch.codes, sketch.ranges, sketch._open, *lists[0], *lists[1]]

    try:
        torch.set_num_threads(1)
        one = results()
        torch.set_num_threads(max(threads, 2))
        several = results()
    finally:
        torch.set_num_threads(threads)
    for left, right in zip(one, several, strict=True):
        assert torch.equal(left, right)


def test_appending_fills_one_open_group_and_begins_another():
    _, key, _ = Shape(2, 2, 2, 1, 5 * RUN, 16).make("cpu")
    sketch = sa.KeySketch(key[:, :, :70])
    end = 70
    for tokens in (2 * RUN + 5, 1, RUN + 3, 60, 3):
        sketch.append(key[:, :, end : end + tokens])
        end += tokens
        at_once = sa.KeySketch(key[:, :, :end])
        assert torch.equal(sketch.codes[:, :, :end], at_once.codes[:, :, :end])
        assert torch.equal(sketch.ranges[:, :, : at_once.ranges.shape[2]], at_once.ranges)
