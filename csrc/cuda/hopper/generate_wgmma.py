"""Write the wgmma instructions as C++ wrappers: one struct per element type and width.

Run by CMake with the header's path. ``Wgmma<type, N>`` computes D (64 x N) += A (64 x 16) B (16 x
N) in float32. ``ss`` takes A from shared memory and overwrites D unless `accumulate`; ``rs`` takes
A from registers. ``kTransposed`` says that the rows of B in shared memory are the summed dimension.
``WgmmaSparse<type, N>`` computes D (64 x N) += A (64 x 32) B (32 x N), where of every four elements
of a row of A two are stored, and ``places`` says which ones (PTX ISA, "Sparse matrix storage").
The fragment layouts are those of PTX ISA, "Register Fragments and Shared Memory Matrix Layouts".
"""

import sys
from pathlib import Path

WIDTHS = range(16, 257, 16)
SPARSE_WIDTHS = (64, 128)
TYPES = (("kBFloat16", "bf16"), ("kFloat16", "f16"))

HEADER = """// Written by generate_wgmma.py.
#pragma once

#include <cstdint>

#include "params.h"

namespace sparse_attn::cuda::ptx {

template <Dtype kDtype, int N>
struct Wgmma;

template <Dtype kDtype, int N>
struct WgmmaSparse;
"""

FOOTER = """
}  // namespace sparse_attn::cuda::ptx
"""

WRAPPER = """
template <>
struct Wgmma<Dtype::{dtype}, {n}> {{
  __device__ __forceinline__ static void ss(float (&d)[{count}], uint64_t a, uint64_t b,
                                            bool accumulate) {{
    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{i2}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{ptx}.{ptx} {{{registers}}}, %{i0}, %{i1}, "
        "p, 1, 1, 0, 0;\\n}}"
        : {outputs}
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }}
  template <bool kTransposed>
  __device__ __forceinline__ static void rs(float (&d)[{count}], uint32_t a0, uint32_t a1,
                                            uint32_t a2, uint32_t a3, uint64_t b) {{
    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, 1, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{ptx}.{ptx} {{{registers}}}, "
        "{{%{i0}, %{i1}, %{i2}, %{i3}}}, %{i4}, p, 1, 1, %{i5};\\n}}"
        : {outputs}
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(kTransposed ? 1 : 0));
  }}
}};
"""

SPARSE_WRAPPER = """
template <>
struct WgmmaSparse<Dtype::{dtype}, {n}> {{
  /// kPair says which two lanes of every four have the places: the first two, or the last two.
  template <int kPair>
  __device__ __forceinline__ static void ss(float (&d)[{count}], uint64_t a, uint64_t b,
                                            uint32_t places, bool accumulate) {{
    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{i4}, 0;\\n"
        "wgmma.mma_async.sp.sync.aligned.m64n{n}k32.f32.{ptx}.{ptx} {{{registers}}}, %{i0}, %{i1}, "
        "%{i2}, %{i3}, p, 1, 1, 0, 0;\\n}}"
        : {outputs}
        : "l"(a), "l"(b), "r"(places), "n"(kPair), "r"(static_cast<int32_t>(accumulate)));
  }}
}};
"""


def wrapper(template: str, dtype: str, ptx: str, n: int) -> str:
    """Return the struct of one element type and width."""
    count = n // 2
    inputs = {f"i{k}": count + k for k in range(6)}
    return template.format(
        dtype=dtype,
        ptx=ptx,
        n=n,
        count=count,
        registers=", ".join(f"%{i}" for i in range(count)),
        outputs=", ".join(f'"+f"(d[{i}])' for i in range(count)),
        **inputs,
    )


def main(path: str) -> None:
    """Write the header to `path`."""
    wrappers = [wrapper(WRAPPER, *names, n) for names in TYPES for n in WIDTHS]
    wrappers += [wrapper(SPARSE_WRAPPER, *names, n) for names in TYPES for n in SPARSE_WIDTHS]
    Path(path).write_text(HEADER + "".join(wrappers) + FOOTER)


if __name__ == "__main__":
    main(sys.argv[1])
