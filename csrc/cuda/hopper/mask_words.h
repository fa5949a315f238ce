// The in-tile mask as words: bit j of a word says whether a row sees column j of those that one
// thread holds of a wgmma accumulator row, which are 0, 1, 8, 9, 16, 17, ... behind the thread's
// first: what pattern.h calls seen, 32 columns at a time. Scattered global tokens never come here.
#pragma once

#include "config.h"

namespace sparse_attn::cuda::hopper {

/// What one row sees: intervals of the main and of the lead view.
struct RowLimits {
  Interval keys;
  Interval lead;
};

/// Bits of the columns below `x`.
SPARSE_ATTN_HD uint32_t columns_below(int32_t x) {
  int32_t count = x <= 0 ? 0 : 2 * (x >> 3) + imin(x & 7, 2);
  return count >= 32 ? ~0u : (1u << count) - 1;
}

/// Bits of the columns whose elements lie in `x`, where column 0 is element `first`.
SPARSE_ATTN_HD uint32_t columns_in(Interval x, int32_t first) {
  return columns_below(x.end - first) & ~columns_below(x.begin - first);
}

/// The bits of a row that sees [v - left, v + right] of `count` keys, where column 0 is key
/// `first`.
SPARSE_ATTN_HD uint32_t window_columns(const Pattern& pattern, int32_t v, int32_t count,
                                       int32_t first) {
  const int32_t right = pattern.causal ? imin(pattern.right, 0) : pattern.right;
  const Interval seen = {imax(0, v - pattern.left), imax(0, imin(count, v + right + 1))};
  return columns_in(seen, first);
}

/// A tile of the lead view.
SPARSE_ATTN_HD uint32_t lead_columns(const Pattern& pattern, const Slice& slice,
                                     const RowLimits& row, int32_t first) {
  Seen seen = seen_lead(pattern, slice, {row.keys, row.lead, {}});
  uint32_t word = columns_in(seen.first, first);
  uint32_t counted = word & columns_in(seen.counted, first);
  if (pattern.dilation == 1) return word & ~counted;
  for (uint32_t rest = counted; rest != 0; rest &= rest - 1) {
#ifdef __CUDA_ARCH__
    int32_t column = __ffs(static_cast<int>(rest)) - 1;
#else
    int32_t column = __builtin_ctz(rest);
#endif
    if (in_class(pattern, slice, first + 8 * (column / 2) + column % 2)) word &= ~(1u << column);
  }
  return word;
}

/// A tile of the main view.
SPARSE_ATTN_HD uint32_t main_columns(const Pattern& pattern, const RowLimits& row, int32_t first) {
  if (pattern.lead.length == 0) return columns_in(row.keys, first);
  Seen seen = seen_main(pattern, {row.keys, row.lead, {}});
  return columns_in(seen.first, first) | columns_in(seen.second, first);
}

}  // namespace sparse_attn::cuda::hopper
