// What a chunk leaves behind for the merge, per row: m (log2 units), l and the output that no sum
// has divided yet, in float32.
#pragma once

#include <cstdint>

namespace sparse_attn::cuda::decode {

/// Partial results in the workspace, rows = batch * heads_q * seq_q.
struct Partials {
  float* out = nullptr;       // [rows, max_chunks, D]
  float2* state = nullptr;    // [rows, max_chunks]: m, l
  int32_t* chunks = nullptr;  // [rows], how many chunks were visited
  int32_t max_chunks = 0;
  int32_t head_dim = 0;

  __device__ __forceinline__ int64_t at(int64_t row, int32_t chunk) const {
    return row * max_chunks + chunk;
  }
};

}  // namespace sparse_attn::cuda::decode
