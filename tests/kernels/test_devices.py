"""Two GPUs: a call runs where its tensors are, whatever device is current, and says so when they
are apart."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from reference import PATTERNS, Shape

import sparse_attn as sa
from sparse_attn.capability import ENGINES

pytestmark = [
    pytest.mark.two_devices,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

SHAPES = {"prefill": Shape(Sq=200, Skv=260), "decode": Shape(Sq=1, Skv=1300)}
SLEEP = 50_000_000  # cycles, more than a queue of host calls takes


@pytest.fixture(autouse=True)
def two_devices(device):
    """Leaves the first device current, whatever a test did."""
    if device != "cuda":
        pytest.skip("shows what GPUs do: run with --device cuda")
    yield
    torch.cuda.set_device(0)


def drawn(name, shape, device):
    """A pattern whose random parts are the same on every device."""
    torch.manual_seed(1)
    return PATTERNS[name](shape, device)


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", PATTERNS)
def test_devices_give_the_same_bits(attend, name, shape, current):
    shape = attend.fit(shape)
    torch.cuda.set_device(current)
    first = shape.make("cuda:0", torch.float16)
    results = []
    for device in ("cuda:0", "cuda:1"):
        tensors = [tensor.to(device) for tensor in first]
        result = attend(drawn(name, shape, device), *tensors, is_causal=True, return_lse=True)
        assert all(str(tensor.device) == device for tensor in result)
        assert torch.cuda.current_device() == current
        results.append([tensor.cpu() for tensor in result])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("name", PATTERNS)
def test_stream_of_the_second_device(attend, name):
    """The call waits for what its device's stream was given before, not for another stream."""
    shape = attend.fit(SHAPES["prefill"])
    source = shape.make("cuda:1", torch.float16)
    pattern = drawn(name, shape, "cuda:1")
    want = attend(pattern, *source)
    late = [torch.zeros_like(tensor) for tensor in source]
    torch.cuda.synchronize(1)
    stream = torch.cuda.Stream("cuda:1")
    with torch.cuda.stream(stream), torch.cuda.device(0):
        assert torch.cuda.current_stream("cuda:1") == stream
        with torch.cuda.device(1):
            torch.cuda._sleep(SLEEP)
        for tensor, values in zip(late, source, strict=True):
            tensor.copy_(values)
        got = attend(pattern, *late)
    stream.synchronize()
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", PATTERNS)
def test_graph_of_the_second_device(attend, name):
    shape = attend.fit(SHAPES["prefill"])
    tensors = shape.make("cuda:1", torch.float16)
    pattern = drawn(name, shape, "cuda:1")
    attend(pattern, *tensors)
    torch.cuda.synchronize(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(1), torch.cuda.graph(graph, stream=torch.cuda.Stream(1)):
        got = attend(pattern, *tensors)
    for tensor in tensors:
        tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    torch.cuda.synchronize(1)
    assert torch.equal(got, attend(pattern, *tensors))


def test_threads_on_different_devices(attend):
    shape = attend.fit(SHAPES["prefill"])
    first = shape.make("cuda:0", torch.float16)
    inputs = {device: [t.to(device) for t in first] for device in ("cuda:0", "cuda:1")}
    patterns = (sa.Full(), sa.Band((40, 0), sinks=3), sa.Strided(9, 8))
    want = [attend(pattern, *first).cpu() for pattern in patterns]

    def right(device):
        return all(
            torch.equal(attend(pattern, *inputs[device]).cpu(), expected)
            for _ in range(50)
            for pattern, expected in zip(patterns, want, strict=True)
        )

    with ThreadPoolExecutor(len(inputs)) as threads:
        assert all(threads.map(right, inputs))


FIRST_ON_THE_SECOND = """
import torch, sparse_attn as sa
for engine in {engines}:
    for dtype in (torch.float32, torch.bfloat16):
        for head_dim in (64, 128, 256):
            for length, keys in ((1, 1300), (300, 1300), (100, 100)):
                query = torch.randn(1, 2, length, head_dim, device="cuda:1").to(dtype)
                key = torch.randn(1, 2, keys, head_dim, device="cuda:1").to(dtype)
                try:
                    second = sa.fused_attention(query, key, key, engine=engine)
                except NotImplementedError as error:
                    print(error)
                    continue
                query, key = query.to("cuda:0"), key.to("cuda:0")
                first = sa.fused_attention(query, key, key, engine=engine)
                assert torch.equal(first.cpu(), second.cpu())
"""


def test_first_calls_of_a_process_on_the_second_device():
    """What is set up once for each device is set up for the device of the call."""
    code = FIRST_ON_THE_SECOND.format(engines=ENGINES["cuda"])
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    refused = ("no float32", "decode takes up to", "small takes up to")  # types and sizes
    assert all(any(words in line for words in refused) for line in run.stdout.splitlines())


def test_tools_run_on_the_second_device():
    shape = SHAPES["prefill"]
    query, key, _ = shape.make("cuda:0", torch.float16)
    mask = torch.rand(2, 4, 13, 17) < 0.5
    results = []
    for device in ("cuda:0", "cuda:1"):
        q, k = query.to(device), key.to(device)
        layouts = [
            sa.select_blocks(q, k, sa.BlockTopK(16, budget_share=0.4, local_blocks=1)),
            sa.BlockLayout.from_mask(mask.to(device), 16, 16),
        ]
        merged = sa.merge_states(
            q, q[..., 0].float(), k[:, :1, :200].expand_as(q), q[..., 1].float()
        )
        tensors = [t for layout in layouts for t in (layout.counts, layout.indices)] + [*merged]
        assert all(str(tensor.device) == device for tensor in tensors)
        assert torch.cuda.current_device() == 0
        results.append([tensor.cpu() for tensor in tensors])
    assert all(map(torch.equal, *results))


def apart(name):
    """A call on cuda:0 with one tensor, `name`, on cuda:1."""
    shape = Shape(2, 4, 2, 34, 67, 64)
    tensors = dict(zip(("query", "key", "value"), shape.make("cuda:0"), strict=True))
    common = {
        "attn_mask": torch.ones(34, 67, dtype=torch.bool),
        "key_bounds": torch.zeros(2, 1, 34, 2, dtype=torch.int32),
        "query_offset": torch.zeros(2, dtype=torch.int32),
        "sink_logits": torch.zeros(4),
        "out": torch.zeros(2, 4, 34, 64),
    }
    if name in common:
        return *tensors.values(), sa.Full(), {name: common[name].to("cuda:1")}
    tokens = torch.tensor([1, 5])
    layout = sa.BlockLayout.from_mask(torch.ones(3, 5, dtype=torch.bool, device="cuda:1"), 16, 16)
    if name in tensors:
        tensors[name] = tensors[name].to("cuda:1")
    pattern = {
        "global_tokens": sa.Band(3, global_tokens=tokens.to("cuda:1")),
        "counts": sa.BlockSparse(layout),
    }.get(name, sa.Full())
    return *tensors.values(), pattern, {}


OTHERS = ("key", "value", "attn_mask", "key_bounds", "query_offset", "sink_logits", "out")


@pytest.mark.parametrize("name", [*OTHERS, "counts", "global_tokens"])
def test_tensors_apart_are_refused(name):
    *tensors, pattern, common = apart(name)
    sentence = f"expected {name} on query's device cuda:0, got cuda:1"
    with pytest.raises(ValueError, match=rf"^sparse_attn::\w+: {sentence}$"):
        sa.sparse_attention(*tensors, pattern, **common)
    answer = sa.can_use(*tensors, pattern, **common)
    assert not answer and sentence in answer.reasons[0]
    torch.cuda.synchronize()


def test_query_apart_is_refused():
    *tensors, pattern, _ = apart("query")
    with pytest.raises(ValueError, match="expected key on query's device cuda:1, got cuda:0"):
        sa.sparse_attention(*tensors, pattern)


def test_states_apart_are_refused():
    out, lse = torch.randn(1, 2, 3, 16, device="cuda:0"), torch.randn(1, 2, 3, device="cuda:0")
    with pytest.raises(ValueError, match="out_b on .* device cuda:0, got cuda:1"):
        sa.merge_states(out, lse, out.to("cuda:1"), lse)
