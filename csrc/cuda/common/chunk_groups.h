// Groups of chunks: sums that are taken before the sums of groups are, so that a thread block which
// has all chunks of a group may store one partial result for it.
#pragma once

#include <cstdint>

namespace sparse_attn::cuda {

constexpr int32_t kGroupedChunks = 16;

}  // namespace sparse_attn::cuda
