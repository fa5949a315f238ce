"""Block selection in plain float64 torch, straight from the definitions: slow and readable.

``estimates`` gives each query block's normalised estimate over key blocks (NaN: always kept);
``check_selection`` compares the lists of ``select_blocks`` with it, where two estimates that differ
by rounding may change places.
"""

import math

import torch
from sketches import sketched, sketched_keys

import sparse_attn as sa

SELECTORS = ("mixed", "mean", "antidiagonal", "minmax", "vertical_slash")
LAST_ROWS = 64
BLOCK = 16
FEW = {"sink_blocks": 1, "local_blocks": 1}  # forced
# By which two estimates may differ on a GPU and change places.
DTYPE_ERRORS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def blocks_of(length, size):
    return [range(start, min(start + size, length)) for start in range(0, length, size)]


class Head:
    """One query head and its key head: what the selectors are made of."""

    def __init__(self, query, key, seen, exists, scale, softcap, block_q, block_kv):
        self.query, self.key = query.double(), key.double()
        self.seen = seen  # (Sq, Skv), keys that each row may see
        self.exists = exists  # (Skv,), keys that some row of the batch entry may see
        self.scale, self.softcap = scale, softcap
        self.rows, self.keys = blocks_of(len(query), block_q), blocks_of(len(key), block_kv)
        self.block_q, self.block_kv = block_q, block_kv

    def score(self, products):
        scores = self.scale * products
        return self.softcap * torch.tanh(scores / self.softcap) if self.softcap else scores

    def hull(self, rows):
        """The keys from the first to the last one that some of the rows may see."""
        found = self.seen[list(rows)].any(0).nonzero().flatten()
        return range(int(found[0]), int(found[-1]) + 1) if len(found) else range(0)

    def touched(self, rows, size):
        """Key blocks of `size` that the rows see, as a mask."""
        hull = self.hull(rows)
        mask = torch.zeros(-(-len(self.key) // size), dtype=torch.bool)
        if hull:
            mask[hull[0] // size : hull[-1] // size + 1] = True
        return mask

    def visible(self, index):
        return self.touched(self.rows[index], self.block_kv)

    def means(self, tensor, size, exists=None):
        """Means of `size` neighbours that exist, and which of them have any."""
        exists = torch.ones(len(tensor)).bool() if exists is None else exists
        parts = [tensor[list(part)][exists[list(part)]] for part in blocks_of(len(tensor), size)]
        means = [part.mean(0) if len(part) else torch.zeros(tensor.shape[1]) for part in parts]
        return torch.stack(means).double(), torch.tensor([len(part) > 0 for part in parts])


def sums_by(weights, size):
    """Sums over runs of `size` neighbours, of which the last may be shorter."""
    return torch.nn.functional.pad(weights, (0, -len(weights) % size)).view(-1, size).sum(-1)


def softmax_by(scores, seen, size):
    """Softmax over what is seen, summed over runs of `size` columns; zeros where nothing is."""
    if not seen.any():
        return torch.zeros(-(-scores.shape[-1] // size)).double()
    return sums_by(torch.softmax(scores.masked_fill(~seen, -math.inf), -1), size)


def normalised(shares):
    total = shares.sum(-1, keepdim=True)
    return torch.where(total == 0, shares, shares / total)


def by_groups(head, groups):
    """Means of block / groups neighbours, softmax over groups of keys, summed by block."""
    queries, _ = head.means(head.query, head.block_q // groups)
    keys, present = head.means(head.key, head.block_kv // groups, head.exists)
    shares = torch.zeros(len(head.rows), len(head.keys)).double()
    for index, members in enumerate(blocks_of(len(head.query), head.block_q // groups)):
        seen = head.touched(members, head.block_kv // groups) & present
        row = softmax_by(head.score(queries[index] @ keys.mT), seen, groups)
        shares[members[0] // head.block_q] += row
    return normalised(shares)


def by_rows(head, rows):
    """Softmax of single rows over the keys they see, summed by block."""
    shares = torch.zeros(len(head.rows), len(head.keys)).double()
    for i in rows:
        row = softmax_by(head.score(head.query[i] @ head.key.mT), head.seen[i], head.block_kv)
        shares[i // head.block_q] += row
    return normalised(shares)


def mixed(head, groups, row_step):
    sampled = range(row_step - 1, len(head.query), row_step)
    return normalised(by_groups(head, groups) + by_rows(head, sampled))


def mean_scores(head):
    queries, _ = head.means(head.query, head.block_q)
    keys, present = head.means(head.key, head.block_kv, head.exists)
    return head.score(queries @ keys.mT).masked_fill(~present, -math.inf)


def of_scores(head, scores):
    """Softmax of scores of blocks over those visible; NaN and infinity stay apart."""
    shares = torch.zeros(len(head.rows), len(head.keys)).double()
    for index in range(len(head.rows)):
        row = scores[index].double()
        unordered = row.isnan() | (row == math.inf)
        seen = head.visible(index)
        if (seen & ~unordered & (row > -math.inf)).any():
            shares[index] = softmax_by(row.masked_fill(unordered, -math.inf), seen, 1)
        shares[index][unordered & seen] = math.nan  # of what the head sees
    return shares


def antidiagonal(head, stride):
    """Squares of `stride` rows and keys by the mean of the products on their antidiagonals."""
    pad = (0, -len(head.key) % stride, 0, -len(head.query) % stride)

    def on_antidiagonals(pairs):
        squares = torch.nn.functional.pad(pairs, pad)
        squares = squares.unflatten(1, (-1, stride)).unflatten(0, (-1, stride)).flip(3)
        return squares.diagonal(dim1=1, dim2=3).sum(-1)

    exists = head.exists.double().expand(len(head.query), -1)
    pairs = on_antidiagonals(exists)
    products = (head.query @ head.key.mT).masked_fill(exists == 0, 0)
    scores = head.score(on_antidiagonals(products) / pairs.clamp(min=1))
    shares = torch.zeros(len(head.rows), len(head.keys)).double()
    for index, members in enumerate(blocks_of(len(head.query), stride)):
        seen = head.touched(members, stride) & (pairs[index] > 0)
        row = softmax_by(scores[index], seen, head.block_kv // stride)
        shares[members[0] // head.block_q] += row
    return normalised(shares)


def minmax(head, keys_of=None):
    """Each row's highest possible score in a block, softmax over blocks.

    `keys_of(part)` are the keys between whose extremes those of a block lie, or their ranges.
    """
    shares = torch.zeros(len(head.rows), len(head.keys)).double()
    scores = torch.full((len(head.query), len(head.keys)), -math.inf).double()
    for at, part in enumerate(head.keys):
        keys = keys_of(part) if keys_of else head.key[list(part)][head.exists[list(part)]]
        if len(keys):
            bounds = head.scale * head.query[:, None] * keys  # (Sq, keys, D)
            tops = bounds.amax(1).sum(-1)
            scores[:, at] = head.softcap * torch.tanh(tops / head.softcap) if head.softcap else tops
    for i, row in enumerate(scores):
        seen = head.touched([i], head.block_kv) & (row > -math.inf)
        shares[i // head.block_q] += softmax_by(row, seen, 1)
    return normalised(shares)


def held_keys(head, sketch, b):
    """Keys that exist, of those that a sketch holds."""
    return head.exists & (torch.arange(len(head.key)) < int(sketch.lengths[b]))


def keep_not_held(head, sketch, b, values):
    """NaN as the values of blocks with keys that the rows see and a sketch does not hold."""
    lacks = torch.arange(len(head.key)) >= int(sketch.lengths[b])
    for index, rows in enumerate(head.rows):
        unknown = head.seen[list(rows)].any(0) & lacks
        values[index][sums_by(unknown.double(), head.block_kv) > 0] = math.nan
    return values


def by_bounds(head, sketch, b, key_head):
    """`minmax`, by the ranges of a sketch where one is given; NaN for blocks with keys it lacks."""
    if sketch is None:
        return minmax(head)
    ranges, group = sketch.ranges[b, key_head].cpu(), 64
    counts = held_keys(head, sketch, b)

    def ranges_of(part):
        starts = range(part[0], part[-1] + 1, group)
        found = [at // group for at in starts if counts[at : min(at + group, part[-1] + 1)].any()]
        return ranges[found].double().flatten(0, 1)

    return keep_not_held(head, sketch, b, minmax(head, ranges_of))


def by_means(head, sketch, b, key_head):
    """`mean`, of sketched keys where a sketch is given; NaN for blocks with keys it lacks."""
    if sketch is None:
        return of_scores(head, mean_scores(head))
    rows = min(len(head.key), sketch.codes.shape[2])
    head.key = torch.zeros(head.key.shape).double()
    head.key[:rows] = sketched_keys(sketch)[b, key_head, :rows]
    head.exists = held_keys(head, sketch, b)
    return of_scores(head, keep_not_held(head, sketch, b, mean_scores(head)))


def by_sketch(head, key, bits):
    """Every row against every sketched key; the sketch is of keys that exist, group by group."""
    found = head.exists.nonzero().flatten()
    head.key = key.double().clone()
    for at in range(0, len(key), 64) if len(found) else ():
        own = range(max(at, int(found[0])), min(at + 64, int(found[-1]) + 1))
        if own:
            head.key[list(own)] = sketched(key[list(own)], bits)
    head.key[~head.exists] = 0
    return by_rows(head, range(len(head.query)))


def vertical_slash(head):
    """Column sums and diagonal sums of the last rows, carried to every block of whole rows."""
    Sq, Skv = head.seen.shape
    column, slash = torch.zeros(Skv).double(), torch.zeros(Sq + Skv).double()  # of i - j + Skv
    for i in range(max(0, Sq - LAST_ROWS), Sq):
        row = softmax_by(head.score(head.query[i] @ head.key.mT), head.seen[i], 1)
        column += row
        slash[i + 1 : i + 1 + Skv] += row.flip(0)
    shares = torch.zeros(len(head.rows), len(head.keys)).double()
    vertical = sums_by(column, head.block_kv)
    # Sums over the diagonals that a row crosses in a whole key block, by that of its first key.
    crossed = torch.nn.functional.pad(slash, (head.block_kv - 1, head.block_q))
    crossed = crossed.unfold(0, head.block_kv, 1).sum(-1)
    for index, rows in enumerate(head.rows):
        places = [rows[0] - keys[0] + Skv for keys in head.keys]
        diagonal = torch.stack([crossed[at : at + head.block_q].sum() for at in places])
        seen = head.visible(index)
        parts = [normalised(part * seen) for part in (vertical, diagonal)]
        shares[index] = sum(parts)
    return normalised(shares)


def estimates(pattern, query, key, seen, scale=None, softcap=0.0):
    """Normalised estimates ``(B, heads, NQ, NKV)`` and visible blocks; NaN is a block to keep.

    `seen` is bool ``(B, Hq, Sq, Skv)``. Heads are those of the keys with ``group="kv"``.
    """
    block_q, block_kv = pattern._blocks
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    groups = pattern._groups
    sketch = pattern.sketch
    bits = 2 if sketch is None else sketch.bits
    batch, heads, Sq, _ = query.shape
    group = heads // key.shape[1]
    exists = seen.any((1, 2))
    found, visible = [], []
    for b in range(batch):
        for h in range(heads):
            head = Head(
                query[b, h], key[b, h // group], seen[b, h], exists[b], scale, softcap,
                block_q, block_kv,
            )  # fmt: skip
            made = {
                "mixed": lambda head=head: mixed(head, groups, pattern.row_step),
                "mean": lambda head=head, at=(b, h // group): by_means(head, sketch, *at),
                "antidiagonal": lambda head=head: antidiagonal(head, pattern.stride),
                "minmax": lambda head=head, at=(b, h // group): by_bounds(head, sketch, *at),
                "vertical_slash": lambda head=head: vertical_slash(head),
                "sketch": lambda head=head, own=key[b, h // group]: by_sketch(head, own, bits),
            }
            if isinstance(pattern.selector, torch.Tensor):
                scores = pattern.selector.cpu()
                scores = scores[b % scores.shape[0], h * scores.shape[1] // heads]
                found.append(of_scores(head, scores))
            else:
                found.append(made[pattern.selector]())
            visible.append(torch.stack([head.visible(n) for n in range(len(head.rows))]))
    shape = (batch, heads, len(visible[0]), -1)
    shares, visible = torch.stack(found).view(shape), torch.stack(visible).view(shape)
    if pattern.group == "kv":
        split = (batch, heads // group, group, len(head.rows), -1)
        unordered = shares.isnan().view(split).any(2)
        shares = normalised(shares.nan_to_num(0)).view(split).amax(2)
        visible = visible.view(split).any(2)
        first, last = visible.int().argmax(-1, True), visible.shape[-1] - 1
        last = last - visible.flip(-1).int().argmax(-1, True)
        at = torch.arange(visible.shape[-1])
        visible = (at >= first) & (at <= last) & visible.any(-1, True)
        shares = normalised(shares).masked_fill(unordered, math.nan)
    return shares, visible


def forced_blocks(pattern, index, Sq, offset, is_causal, num_kv, origin=0):
    """Forced blocks of query block `index`, visible or not, as a mask; sinks are from `origin`."""
    block_q, block_kv = pattern._blocks
    first = (index * block_q + offset) // block_kv
    last = (min((index + 1) * block_q, Sq) - 1 + offset) // block_kv
    at = torch.arange(num_kv)
    local = pattern._local_blocks
    after = 0 if is_causal else local
    around = (at >= min(first, last + 1 - local)) & (at <= last + after)
    first_sink = origin // block_kv
    return around | ((at >= first_sink) & (at < first_sink + pattern.sink_blocks))


def budget_of(pattern, visible):
    if pattern.budget_blocks is not None:
        return min(pattern.budget_blocks, visible)
    if pattern.budget_tokens is not None:
        return min(-(-pattern.budget_tokens // pattern._blocks[1]), visible)
    share = 1.0 if pattern.budget_share is None else pattern.budget_share
    return math.ceil(share * visible)


def check_row(pattern, kept, shares, visible, forced, error):
    """The row keeps what is forced, no worse block than it leaves, and as many as it must."""
    must = (forced | shares.isnan()) & visible
    shares = shares.nan_to_num(0)
    best, left = kept & ~must, visible & ~kept
    assert not (kept & ~visible).any() and kept[must].all()
    if best.any() and left.any():
        assert shares[best].min() >= shares[left].max() - error
    count, least, most = int(kept.sum()), int(must.sum()), budget_of(pattern, int(visible.sum()))
    if pattern.mass is None or pattern.mass == 1:
        assert count == max(least, most)
        return
    assert count <= max(least, most)
    estimated = not isinstance(pattern.selector, torch.Tensor)
    if estimated and shares[visible].sum() == 0:  # nothing tells them apart
        assert count == max(least, most)
        return
    reached, target = shares[kept].sum(), pattern.mass * shares[visible].sum()
    assert reached >= target - error or count == max(least, most)
    if best.any():  # without the last one it was not reached
        assert reached - shares[best].min() < target + error


def check_selection(
    pattern, query, key, is_causal=False, key_bounds=None, query_offset=None, key_origin=None,
    error=1e-6, **scoring,
):  # fmt: skip
    """Every list of ``select_blocks`` follows from the estimates."""
    layout = sa.select_blocks(
        query, key, pattern, is_causal=is_causal, key_bounds=key_bounds,
        query_offset=query_offset, key_origin=key_origin, **scoring,
    )  # fmt: skip
    kept = layout.to_mask().cpu()
    indices, counts = layout.indices.cpu(), layout.counts.cpu()
    assert (kept.sum(-1) == counts).all()
    inside = torch.arange(1, indices.shape[-1]) < counts[..., None]
    assert (indices.diff(dim=-1) > 0)[inside].all()
    query, key = query.cpu(), key.cpu()
    (batch, heads, Sq, _), Skv = query.shape, key.shape[2]
    offset = Skv - Sq if query_offset is None else query_offset
    offsets = offset.tolist() if isinstance(offset, torch.Tensor) else [offset] * batch
    position = torch.arange(Sq)[:, None] + torch.tensor(offsets)[:, None, None, None]
    origins = [0] * batch if key_origin is None else key_origin.tolist()
    column = torch.arange(Skv)
    seen = torch.ones(batch, heads, Sq, Skv, dtype=torch.bool)
    if is_causal:
        seen &= column <= position
    if key_bounds is not None:
        low, high = key_bounds.cpu().long()[..., None, :].unbind(-1)
        seen &= (low <= column) & (column < high)
    shares, visible = estimates(pattern, query, key, seen, **scoring)
    assert kept.shape == shares.shape
    for b, h, index in torch.cartesian_prod(*map(torch.arange, shares.shape[:3])).tolist():
        forced = forced_blocks(
            pattern, index, Sq, offsets[b], is_causal, shares.shape[-1], origins[b]
        )
        row = (b, h, index)
        check_row(pattern, kept[row], shares[row], visible[row], forced, error)
    return kept


def decoding(sketch=None, block=16, tokens=96, **changes):
    """Block top-k by the sketch, with little that is forced."""
    return sa.BlockTopK(
        block, selector="sketch", budget_tokens=tokens, sketch=sketch,
        **{"local_blocks": 1, **changes},
    )  # fmt: skip


def pattern_of(selector="mixed", block=BLOCK, mass=0.7, **changes):
    """Block top-k by mass, with little that is forced."""
    return sa.BlockTopK(block, mass, selector, **{**FEW, **changes})


def by_budget(block=BLOCK, selector="mean", **changes):
    """The same by a budget in `changes`."""
    return sa.BlockTopK(block, None, selector, **{**FEW, **changes})
