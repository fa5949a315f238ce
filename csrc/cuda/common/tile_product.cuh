// acc = A B on a 64 x 64 tile, float32 sums of slabs in ascending order of the depth: the one
// matrix product of the naive engine and of block scores. A and B come element by element from
// functions, so that layouts, views and types stay with the caller.
#pragma once

#include <cstdint>

namespace sparse_attn::cuda {

constexpr int kProductTile = 64;   // rows and columns of a block's tile
constexpr int kProductDepth = 16;  // depth of a slab in shared memory
constexpr int kProductRows = 4;    // a thread's rows and columns of the tile
constexpr int kProductThreads = (kProductTile / kProductRows) * (kProductTile / kProductRows);

/// Row or column `index` of the tile that is this thread's.
__device__ __forceinline__ int product_row(int index) { return threadIdx.x / 16 + 16 * index; }
__device__ __forceinline__ int product_column(int index) { return threadIdx.x % 16 + 16 * index; }

/// `a(row, k)` and `b(k, column)` return 0 outside their tensors. Products with a == 0 are left
/// out, so that a key of weight 0 never counts, whatever its value holds.
template <typename A, typename B>
__device__ void tile_product(int32_t depth, const A& a, const B& b,
                             float (&acc)[kProductRows][kProductRows]) {
  __shared__ float sA[kProductDepth][kProductTile + 1];
  __shared__ float sB[kProductDepth][kProductTile + 1];
  for (auto& row : acc) {
    for (float& x : row) x = 0.0f;
  }
  for (int32_t begin = 0; begin < depth; begin += kProductDepth) {
    for (int i = threadIdx.x; i < kProductTile * kProductDepth; i += kProductThreads) {
      sA[i % kProductDepth][i / kProductDepth] = a(i / kProductDepth, begin + i % kProductDepth);
      sB[i / kProductTile][i % kProductTile] = b(begin + i / kProductTile, i % kProductTile);
    }
    __syncthreads();
    float part[kProductRows][kProductRows] = {};
    for (int k = 0; k < kProductDepth; ++k) {
      for (int r = 0; r < kProductRows; ++r) {
        float weight = sA[k][product_row(r)];
        if (weight == 0.0f) continue;
        for (int c = 0; c < kProductRows; ++c) {
          part[r][c] = fmaf(weight, sB[k][product_column(c)], part[r][c]);
        }
      }
    }
    for (int i = 0; i < kProductRows * kProductRows; ++i) {
      acc[i / kProductRows][i % kProductRows] += part[i / kProductRows][i % kProductRows];
    }
    __syncthreads();
  }
}

}  // namespace sparse_attn::cuda
