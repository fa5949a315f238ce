// How tiles of 16-bit numbers lie in shared memory for the products of a warpgroup: in slabs, whose
// rows are as long as the widest swizzle (PTX ISA, "wgmma").
#pragma once

namespace sparse_attn::cuda {

constexpr int kWarpgroup = 128;  // threads
constexpr int kSlabRowBytes = 128;
constexpr int kSlabColumns = kSlabRowBytes / 2;

}  // namespace sparse_attn::cuda
