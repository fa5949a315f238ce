"""Export a layer for a program without Python: ``python export.py layer.pt2``.

The package holds code that AOTInductor compiled, and calls the ops of ``sparse_attn`` by name;
`main.cpp` opens their library and runs it. It prints the sum that the program should find.
"""

import sys

import torch
from torch import nn

import sparse_attn as sa


class Layer(nn.Module):
    """Causal attention to a window and four sink tokens, between two projections."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, of the shape (batch, length, width) of the tokens."""
        batch, length, width = tokens.shape
        projected = self.project(tokens).view(batch, length, 3 * self.heads, -1)
        query, key, value = projected.transpose(1, 2).chunk(3, dim=1)
        out = sa.band_attention(query, key, value, (31, 0), sinks=4, is_causal=True)
        return self.out(out.transpose(1, 2).reshape(batch, length, width))


def main(path: str) -> None:
    """Write the package, and print the sum of its output for the tokens that `main.cpp` makes."""
    torch.manual_seed(0)
    layer = Layer().eval()
    tokens = torch.linspace(-1, 1, 2 * 200 * 64).reshape(2, 200, 64)
    with torch.no_grad():
        length = torch.export.Dim("length", min=2, max=4096)
        exported = torch.export.export(layer, (tokens,), dynamic_shapes=({1: length},))
        torch._inductor.aoti_compile_and_package(exported, package_path=path)
        print(f"{layer(tokens).sum().item():.4f}")


if __name__ == "__main__":
    main(sys.argv[1])
