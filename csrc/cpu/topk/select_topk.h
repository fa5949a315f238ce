// Exact token top-k of one row whose scores come chunk by chunk: the k highest, ties to the lower
// column, which is the lower key. -inf stands for keys that the row does not see.
#pragma once

#include <cstdint>

#include "cpu/vector/vector_math.h"

namespace sparse_attn::cpu {

/// How many candidates a row gathers before it drops low ones, how many it may keep then, and what
/// it has room for: a chunk past the limit, and vectors that are written whole.
struct TopkRoom {
  int32_t k = 0;
  int32_t limit = 0;
  int32_t most = 0;
  int64_t stride = 0;
  TopkRoom() = default;
  TopkRoom(int32_t k, int64_t columns, int32_t chunk);
};

/// The columns of a row that may be among its k highest.
struct TopkRow {
  float* scores = nullptr;  // [stride]
  int32_t* columns = nullptr;
  int32_t count = 0;
  float threshold = kMinusInfinity;  // what is not above it is out

  /// Takes in the next n columns, which count from `first`.
  void add(const VectorMath& math, const TopkRoom& room, const float* chunk, int32_t n,
           int32_t first);
  /// Leaves the k highest, ascending by column, or all when the row sees fewer.
  void finish(const VectorMath& math, const TopkRoom& room);
};

}  // namespace sparse_attn::cpu
