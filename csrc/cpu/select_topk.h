// Exact token top-k of one row of scores: the k highest, ties to the lower column, which is the
// lower key. -inf stands for keys that the row does not see.
#pragma once

#include <cstdint>

#include "vector_math.h"

namespace sparse_attn::cpu {

/// Writes the chosen columns, ascending, and returns how many (fewer than k when the row sees
/// fewer). `columns` and `ranks` hold n entries. NaN ranks by its sign, above or below everything.
int32_t select_topk(const VectorMath& math, const float* scores, int32_t n, int32_t k,
                    int32_t* columns, int32_t* ranks);

}  // namespace sparse_attn::cpu
