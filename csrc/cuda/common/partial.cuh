// What a chunk of keys leaves for the merge, per row: m (log2 units), l and the output that
// no sum has divided yet, in float32. Engines that split rows over their keys share it.
#pragma once

#include <cuda_runtime.h>

#include "../../params.h"

namespace sparse_attn::cuda {

/// Partial results in the workspace, of `rows` rows of each of `heads` of the batch * heads_q
/// heads.
struct Partials {
  float* out = nullptr;       // [heads, rows, max_chunks, columns]
  float2* state = nullptr;    // [heads, rows, max_chunks]: m, l
  int32_t* chunks = nullptr;  // [heads, rows], how many chunks were visited; null: all
  int32_t rows = 0;
  int32_t first_head = 0, heads = 0;
  int32_t max_chunks = 0;
  int32_t columns = 0;    // of the output, or more where tiles are wider
  int32_t tile_rows = 0;  // 0: the rows are all queries; else those of query tiles of this height,
                          // from that of the first global row on

  __device__ __forceinline__ int64_t at(int64_t row, int32_t chunk) const {
    return row * max_chunks + chunk;
  }
  /// The query of a head's row 0, where the first global token stands at `position`.
  SPARSE_ATTN_HD constexpr int32_t first_query(int32_t position, int32_t query_offset) const {
    if (tile_rows == 0) return 0;
    return imax(0, position - query_offset) / tile_rows * tile_rows;
  }
};

/// Merges the partial results into out and lse.
Status merge_chunks(const AttentionParams& params, const Partials& partials);

}  // namespace sparse_attn::cuda
