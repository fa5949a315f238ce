// Groups of chunks: sums that are taken before the sums of groups are, so that a thread block which
// has all chunks of a group may store one partial result for it.
#pragma once

#include "../../interval.h"

namespace sparse_attn::cuda {

constexpr int32_t kInARow = 1 << 30;  // the group of chunks that have none: any number of them
constexpr int32_t kGroup = 16;
constexpr int32_t kSmallGroup = 4, kSmallestGroup = 2;  // of long texts

/// Chunks of a group of a text that has `chunks` of them, a power of 2. Long texts have up to 32
/// groups: as few partial results, and more chunks where there are thread blocks for them.
SPARSE_ATTN_HD constexpr int32_t group_size(int32_t chunks) {
  if (chunks <= kGroup) return kInARow;
  return chunks <= 32 ? kGroup : chunks <= 64 ? kSmallestGroup : kSmallGroup;
}

}  // namespace sparse_attn::cuda
