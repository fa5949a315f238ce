"""An encoder of torch with its attention swapped by name: the same output, in less time.

No pattern yet: `sa.Full()` sees all keys, so only the kernels change. Run it from the checkout with
``PYTHONPATH=. python examples/encoder.py``.
"""

from __future__ import annotations

import copy
import statistics

import torch

import sparse_attn as sa
from benchmarks.timing import Timer, interleaved

LENGTHS = {"cpu": (1024, 4096), "cuda": (4096, 16384)}


@torch.no_grad()
def main() -> None:
    """Print the times and the difference of the outputs at two lengths."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layer = torch.nn.TransformerEncoderLayer(384, 12, 1536, batch_first=True)
    own = torch.nn.TransformerEncoder(layer, num_layers=2).eval().to(device)
    swapped = sa.swap_attention(copy.deepcopy(own), sa.Full())
    timer = Timer(device)
    for length in LENGTHS[device.type]:
        tokens = torch.randn(1, length, 384, device=device)
        before, after = own(tokens), swapped(tokens)
        difference = float((after - before).norm() / before.norm())
        calls = {"own": lambda x=tokens: own(x), "swapped": lambda x=tokens: swapped(x)}
        times = interleaved(timer.samples(calls, 5.0), rounds=5)
        one, other = (statistics.median(times[name]) for name in calls)
        print(
            f"{length} tokens: {one:.0f} ms before, {other:.0f} ms after ({one / other:.2f}x); "
            f"the output differs by {difference:.1e}"
        )


if __name__ == "__main__":
    main()
