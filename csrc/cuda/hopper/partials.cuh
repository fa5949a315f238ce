// What a chunk of keys leaves of its rows for the merge: m (log2 units), l and the output that no
// sum has divided yet, in float32. They lie by strips, the 16 rows of a head that one warp holds,
// and the output of a strip as its threads hold it, so that a warp stores 512 bytes at once.
#pragma once

#include <cuda_runtime.h>

#include "../../params.h"
#include "../common/join.cuh"
#include "deal.h"
#include "key_split.h"

namespace sparse_attn::cuda::hopper {

using Join = cuda::Join<false>;

constexpr int kStripRows = 16;

/// Partial results in the workspace, of `heads` of the batch * heads_q heads.
struct Partials {
  float4* out = nullptr;      // [strips, max_chunks, columns / 8, 32]: rows g, g + 8 of lane 4g + t
  float2* state = nullptr;    // [strips, max_chunks, 16]: m, l
  int32_t* counts = nullptr;  // [strips]
  int32_t strips = 0;         // of a (head, class)
  int32_t first_head = 0, heads = 0;
  int32_t max_chunks = 0;
  int32_t columns = 0;
  int32_t tile_rows = 0;  // 0: the rows are all queries; else those of query tiles of this height,
                          // from that of the first global row on

  /// How many chunks, or groups, of a tile are stored, and whether they are of one group.
  struct StoredChunks {
    static constexpr int32_t kOneGroup = 1 << 15;

    int32_t number;
    bool one_group;

    SPARSE_ATTN_HD constexpr static StoredChunks of(int32_t code) {
      return {code & ~kOneGroup, (code & kOneGroup) != 0};
    }
    SPARSE_ATTN_HD constexpr int32_t group() const { return one_group ? kMostChunks : kLeastGroup; }
    SPARSE_ATTN_HD constexpr int32_t code() const { return number | (one_group ? kOneGroup : 0); }
  };

  /// Where a chunk's strip begins, in strips.
  SPARSE_ATTN_HD constexpr int64_t at(int32_t strip, int32_t chunk) const {
    return int64_t{strip} * max_chunks + chunk;
  }
  /// The output of this lane in columns 8i to 8i + 7 of a chunk's strip.
  __device__ __forceinline__ float4* out_at(int64_t at, int32_t i, int32_t lane) const {
    return out + (at * (columns / 8) + i) * 32 + lane;
  }
  /// The query of a head's row 0, where the text begins at position `origin`.
  SPARSE_ATTN_HD constexpr int32_t first_query(int32_t origin, int32_t query_offset) const {
    if (tile_rows == 0) return 0;
    return first_split_row(origin, query_offset, tile_rows);
  }
  /// Bytes of a strip with so many chunks of so many columns.
  static constexpr int64_t strip_bytes(int32_t chunks, int32_t columns) {
    const int64_t chunk_bytes = columns * sizeof(float) + sizeof(float2);
    return kStripRows * chunks * chunk_bytes + sizeof(int32_t);
  }
};

/// Merges the partial results into out and lse.
Status merge_chunks(const AttentionParams& params, const Partials& partials);

/// The same of the pieces of a deal, on so many multiprocessors.
Status merge_pieces(const AttentionParams& params, const Partials& partials, const Deal& deal,
                    const HeadPacking& packing, int32_t multiprocessors);

}  // namespace sparse_attn::cuda::hopper
