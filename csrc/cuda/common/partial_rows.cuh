// What a chunk of keys leaves for the merge, per row: m (log2 units), l and the output that
// no sum has divided yet, in float32.
#pragma once

#include <cuda_runtime.h>

#include "../../params.h"
#include "chunk_groups.h"

namespace sparse_attn::cuda {

/// The chunks of a row that have a place, and how many of them are a group.
struct RowChunks {
  int32_t count, group;
};

/// Partial results in the workspace, of `rows` rows of each of `heads` heads of all batch entries.
struct PartialRows {
  float* out = nullptr;         // [heads, rows, max_chunks, columns]
  float2* state = nullptr;      // [heads, rows, max_chunks]: m, l
  RowChunks* chunks = nullptr;  // [heads, rows]
  int32_t rows = 0;
  int32_t heads = 0;
  int32_t max_chunks = 0;
  int32_t columns = 0;      // of the output
  int32_t group = kInARow;  // of chunks, the smallest that a row may have
  bool gaps = false;        // some may be empty, l is 0 and nothing was stored as their output

  __device__ __forceinline__ int64_t at(int64_t row, int32_t chunk) const {
    return row * max_chunks + chunk;
  }
};

/// Merges the partial results into out and lse.
Status merge_chunks(const AttentionParams& params, const PartialRows& partials);

}  // namespace sparse_attn::cuda
