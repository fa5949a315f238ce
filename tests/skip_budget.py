"""Which tests may be skipped, by engine and reason: what is not listed here fails the run.

An engine refuses what it does not serve, and its test is skipped. So that no hole grows unseen,
every reason is listed with the most tests that it may cost in a run of the whole suite on one GPU.
"""

import re
from collections import Counter

#: Device -> (engine, pattern of the reason) -> most skips, None for any number. An engine of "" is
#: any engine, or none in particular.
BUDGET = {
    "cpu": {
        ("", "CUDA|GPU|compute capability|nvcc"): None,
        ("", "naive engine's tile is the whole row"): 2,
        ("", "compiler|nm \\(binutils\\)|info module is not built"): 20,
        ("", "auditwheel is not installed|setuptools is too old|reads no TOML"): 12,
        ("", "an older transformers"): 4,
        ("", "GiB of free|buffer of .* bytes"): 120,
    },
    "cuda": {
        ("", "needs two CUDA devices"): 500,
        ("", "examples make CPU tensors|threads are the CPU's|contents are read on the CPU"): 60,
        ("", "nvcc not found|compiler|nm \\(binutils\\)"): 20,
        ("", "auditwheel is not installed|setuptools is too old|reads no TOML"): 12,
        ("", "an older transformers"): 4,
        ("naive", "naive engine's tile is the whole row"): 2,
        ("naive", "counts the memory of fused engines|shows what fused kernels do"): 40,
        ("hopper", "takes no float32"): 10,
        ("hopper", "takes no .* with (packed sequences|paged keys)"): 160,
        ("hopper", "takes no .* with keys of float8"): 40,
        ("hopper", "is built for head dims up to 128, not"): 40,  # lists of packed sequences
        ("decode", "takes (no keys of float8 with (dilation|strided)|up to [0-9]+ queries)"): 800,
        ("decode", "takes no (.* with token top-k|global_tokens given as indices)"): 330,
        ("decode", "takes token top-k of up to"): 20,
        ("hopper", "takes no block lists with token top-k"): 80,
        ("hopper", "takes no attn_mask"): 150,
        ("hopper", "takes (attn_mask|alibi_slopes) with block lists at head dims"): 60,
        ("hopper", "takes no alibi_slopes"): 40,
        ("hopper", "takes no key_origin with global_tokens"): 20,
        ("hopper", "multiples of 16 bytes"): 40,
        ("hopper", "query blocks that are multiples of"): 60,
        ("hopper", "takes .*token top-k"): 110,
        ("small", "takes up to [0-9]+ (queries|keys|columns of a head)"): 1750,
        ("small", "takes no (block lists|partial blocks|token top-k|global_tokens given)"): 1600,
        ("small", "takes no (paged keys|keys of float8)"): 700,
        ("small", "takes no (float32|pointers or strides)"): 40,
        ("decode", "takes no float32"): 10,
    },
}


#: And what else may be skipped where another suite runs on the device (``--shared-device``): a run
#: that has it for itself has room for every tensor.
SHARED = {("", "GiB of free device memory|buffer of .* bytes"): 170}


def over_budget(device, skips, shared=False):
    """A sentence for each reason that is not listed or was met too often in (engine, reason)s."""
    budget, found, sentences = BUDGET[device] | (SHARED if shared else {}), Counter(), set()
    for engine, reason in skips:
        key = next((k for k in budget if k[0] in ("", engine) and re.search(k[1], reason)), None)
        if key is None:
            sentences.add(f"{engine or 'a test'} has no budget for the reason: {reason}")
        found[key] += 1
    for key, most in budget.items():
        if most is not None and found[key] > most:
            sentences.add(f"{key[0] or 'any'}: {found[key]} times {key[1]!r}, at most {most}")
    return sorted(sentences)
