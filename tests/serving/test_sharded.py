"""sharded_attention: shards of a sequence over ranks give what one rank gives for all of it."""

import os
import re
import socket
import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

import sparse_attn as sa

pytestmark = pytest.mark.skipif(
    not dist.is_available() or sys.platform != "linux", reason="needs torch.distributed"
)

PATTERNS = {
    "full": sa.Full(),
    "band": sa.Band((9, 0)),
    "band-both-sides": sa.Band((5, 7)),
    "band-sinks": sa.Band((9, 0), sinks=3),
    "band-unlimited": sa.Band((None, 2), sinks=50),
    "dilated": sa.Dilated((4, 1), 3, sinks=2),
    "strided": sa.Strided(8, 5),
    "by-head": sa.ByHead({0: sa.Band((9, 0), sinks=1)}, rest=sa.Full()),
}
COMMON = {
    "plain": {},
    "causal": {"is_causal": True},
    "scores": {
        "is_causal": True,
        "scale": 0.3,
        "softcap": 5.0,
        "sink_logits": torch.tensor([0.5, -1.0, 2.0, -torch.inf]),
        "alibi_slopes": torch.tensor([0.1, 0.2, 0.0, 0.4]),
    },
}
#: Queries and keys of each rank: even, uneven, ranks without any, more keys than queries, and more
#: queries than keys, of which the first see none under causal.
SHARDS = {
    2: [
        ([32, 32], [32, 32]),
        ([7, 41], [20, 28]),
        ([0, 24], [33, 0]),
        ([1, 0], [40, 25]),
        ([40, 20], [12, 20]),
    ],
    3: [([20, 9, 19], [16, 16, 16]), ([30, 0, 1], [5, 40, 0])],
}


def compare(rank, shards, cases):
    torch.manual_seed(0)
    rows, keys = (sum(lengths) for lengths in shards)
    whole = torch.randn(2, 4, rows, 16), *torch.randn(2, 2, 2, keys, 16)
    own = [
        tensor.split(lengths, 2)[rank]
        for tensor, lengths in zip(whole, (shards[0], shards[1], shards[1]), strict=True)
    ]
    for name, pattern in PATTERNS.items():
        for kind, common in COMMON.items():
            got = sa.distributed.sharded_attention(*own, pattern, return_lse=True, **common)
            want = sa.sparse_attention(*whole, pattern, return_lse=True, **common)
            want = [tensor.split(shards[0], 2)[rank] for tensor in want]
            same = all(map(lambda a, b: torch.allclose(a, b, atol=3e-6), got, want))
            cases[f"{name}, {kind}, {shards}"] = same and got[0].dtype == own[0].dtype


def on_rank(rank, ranks, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    cases = {}
    for shards in SHARDS[ranks]:
        compare(rank, shards, cases)
    torch.save(cases, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.parametrize("ranks", SHARDS)
def test_shards_equal_the_whole(ranks, tmp_path):
    torch.multiprocessing.spawn(on_rank, (ranks, free_port(), tmp_path), nprocs=ranks)
    for rank in range(ranks):
        cases = torch.load(tmp_path / f"{rank}.pt")
        assert len(cases) == len(SHARDS[ranks]) * len(PATTERNS) * len(COMMON)
        assert not [case for case, same in cases.items() if not same]


def test_ranks_send_no_more_than_is_reached():
    from sparse_attn.distributed import _reached

    assert _reached(sa.Band((9, 0), sinks=4), (100, 150), True) == [(0, 4), (91, 150)]
    assert _reached(sa.Band((9, 3)), (100, 150), False) == [(91, 153)]
    assert _reached(sa.Dilated((4, 0), 3), (100, 150), False) == [(88, 150)]
    assert _reached(sa.Strided(8, 5), (100, 150), False) == [(0, 150)]


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("rows", [0, 8])
@pytest.mark.parametrize("pattern", [sa.Full(), sa.ByHead({1: sa.Band(3)})], ids=repr)
def test_wrong_tensors(one_rank, pattern, rows):
    """In the words of a call, whether or not a key is reached."""
    sharded_attention = sa.distributed.sharded_attention
    query, (key, value) = torch.randn(2, 4, rows, 16), torch.randn(2, 2, 2, 9, 16)
    heads = r"sparse_attn::\w+: expected sink_logits of shape \(4\), got shape "
    for shape, got in (((1,), "(1)"), ((2,), "(2)"), ((1, 4), "(1, 4)"), ((), "()")):
        with pytest.raises(ValueError, match=rf"^{heads}{re.escape(got)}$"):
            sharded_attention(query, key, value, pattern, sink_logits=torch.zeros(shape))
    with pytest.raises(ValueError, match=r"^sparse_attn::\w+: expected sink_logits on query's dev"):
        sharded_attention(query, key, value, pattern, sink_logits=torch.zeros(4, device="meta"))
    for wrong in (value[:, :1], value[:, :, :8], value.double()):
        with pytest.raises(ValueError, match=r"^sparse_attn::\w+: expected value of"):
            sharded_attention(query, key, wrong, pattern)
    assert (
        sharded_attention(query, key, value, pattern, sink_logits=torch.zeros(4)).shape
        == query.shape
    )


def test_what_is_no_group_of_this_rank_is_refused(one_rank):
    tensors = torch.randn(3, 1, 2, 8, 16)
    for group in (3, dist.GroupMember.NON_GROUP_MEMBER):
        with pytest.raises(TypeError, match=r"sharded_attention: expected group to be a"):
            sa.distributed.sharded_attention(*tensors, sa.Band(3), group=group)
    alone = sa.distributed.sharded_attention(*tensors, sa.Band(3), group=dist.group.WORLD)
    assert torch.equal(alone, sa.distributed.sharded_attention(*tensors, sa.Band(3)))


@pytest.mark.parametrize(
    ("pattern", "common", "error", "sentence"),
    [
        (sa.TopK(3), {}, NotImplementedError, "not served: TopK over shards; Full, Band"),
        (sa.Band(3, global_tokens=1), {}, NotImplementedError, "Band with global tokens over"),
        (sa.Band, {}, TypeError, "got the class Band; write"),
        (sa.Band(3), {"key_origin": torch.zeros(1)}, NotImplementedError, "key_origin over shards"),
        (sa.Band(3), {}, ValueError, "expected a process group .*got none"),
        (sa.Full(), {"colour": 1}, TypeError, "an unexpected keyword argument .colour."),
        (sa.Full(), {"scale": "x"}, TypeError, "expected scale to be a float or None, got str"),
    ],
    ids=str,
)
def test_what_is_not_served(pattern, common, error, sentence):
    tensors = torch.randn(3, 1, 2, 8, 16)
    with pytest.raises(error, match=rf"^sparse_attn\.sharded_attention: .*{sentence}"):
        sa.distributed.sharded_attention(*tensors, pattern, **common)
