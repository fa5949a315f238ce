// The in-tile mask as words: bit j of a word says whether a row sees column j of those that one
// thread holds of a wgmma accumulator row, which are 0, 1, 8, 9, 16, 17, ... behind the thread's
// first: what pattern.h calls seen, 32 columns at a time. Scattered global tokens never come here.
#pragma once

#include "config.h"

namespace sparse_attn::cuda::hopper {

/// Bits of the columns below `x`.
SPARSE_ATTN_HD uint32_t columns_below(int32_t x) {
  int32_t count = x <= 0 ? 0 : 2 * (x >> 3) + imin(x & 7, 2);
  return count >= 32 ? ~0u : (1u << count) - 1;
}

/// Bits of the columns whose elements lie in `x`, where column 0 is element `first`.
SPARSE_ATTN_HD uint32_t columns_in(Interval x, int32_t first) {
  return columns_below(x.end - first) & ~columns_below(x.begin - first);
}

/// `word` of lead elements from `first` on, without those among `counted` that a main tile has.
SPARSE_ATTN_HD uint32_t without_counted(const Pattern& pattern, const Slice& slice, uint32_t word,
                                        Interval counted, int32_t first) {
  uint32_t rest = word & columns_in(counted, first);
  if (pattern.dilation == 1) return word & ~rest;
  for (; rest != 0; rest &= rest - 1) {
#ifdef __CUDA_ARCH__
    int32_t column = __ffs(static_cast<int>(rest)) - 1;
#else
    int32_t column = __builtin_ctz(rest);
#endif
    if (in_class(pattern, slice, first + 8 * (column / 2) + column % 2)) word &= ~(1u << column);
  }
  return word;
}

}  // namespace sparse_attn::cuda::hopper
