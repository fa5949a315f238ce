// The in-tile mask as words: bit j of a word says whether a row sees column j of those that one
// thread holds of a wgmma accumulator row, which are 0, 1, 8, 9, 16, 17, ... after the thread's
// first: what pattern.h calls seen, 32 columns at a time. Scattered global tokens never come here.
#pragma once

#include "config.h"

namespace sparse_attn::cuda::hopper {

/// The lowest `count` bits.
SPARSE_ATTN_HD uint32_t low_bits(uint32_t count) { return count >= 32 ? ~0u : (1u << count) - 1; }

/// Bits of the columns below `x`.
SPARSE_ATTN_HD uint32_t columns_below(int32_t x) {
  return x <= 0 ? 0 : low_bits(2 * (x >> 3) + imin(x & 7, 2));
}

/// Bits of the columns whose elements lie in `x`, where column 0 is element `first`.
SPARSE_ATTN_HD uint32_t columns_in(Interval x, int32_t first) {
  return columns_below(x.end - first) & ~columns_below(x.begin - first);
}

/// How many of their columns of a tile's row lie below `x`, for each of the four threads a byte.
SPARSE_ATTN_HD uint32_t counts_below(int32_t x) {
  constexpr uint32_t kTwoEach = 0x02020202u;
  x = imax(0, imin(x, 128));
  const uint32_t rest = x & 7, thread = rest / 2 * 8;  // the thread that has one of its two or none
  return (x >> 3) * kTwoEach + (kTwoEach & low_bits(thread)) + ((rest & 1) << thread);
}

/// The columns of a tile whose elements lie in `x`, where the tile begins with element `first`.
SPARSE_ATTN_HD RowMask row_columns(Interval x, int32_t first) {
  const uint32_t begin = counts_below(x.begin - first), end = counts_below(x.end - first);
  RowMask mask;
  for (int i = 0; i < RowMask::kWords; ++i) {
    mask.word[i] = low_bits(end >> 8 * i & 0xff) & ~low_bits(begin >> 8 * i & 0xff);
  }
  return mask;
}

/// Brings bits of 32 keys into the order of threads: byte t holds those of the columns 2t and 2t +
/// 1 of every 8. Pairs of bits are transposed as a matrix of 4 x 4, by two exchanges.
SPARSE_ATTN_HD uint32_t by_thread(uint32_t keys) {
  uint32_t change = (keys ^ keys >> 6) & 0x00cc00ccu;
  keys ^= change ^ change << 6;
  change = (keys ^ keys >> 12) & 0x0000f0f0u;
  return keys ^ change ^ change << 12;
}

/// The same for thread t alone, in the top byte: a product brings its pairs of bits together.
SPARSE_ATTN_HD uint32_t top_of_thread(uint32_t keys, int32_t t) {
  return (keys >> 2 * t & 0x03030303u) * 0x01041040u;
}

/// Which columns of a box of `rows` keys a row of a partial block sees, for thread t: bits of
/// `words` from `shift` on, which is 0 unless the box is of 16 keys. Bits past the box may be set.
SPARSE_ATTN_HD uint32_t thread_bits(const uint32_t* words, int32_t shift, int32_t rows, int32_t t) {
  uint32_t bits = 0;
  for (int32_t w = 0; w < 4; ++w) {
    if (w * 32 >= rows) break;
    bits |= top_of_thread(words[w] >> shift, t) >> 24 << 8 * w;
  }
  return bits;
}

/// The same for all four threads: keeps those of a row's columns.
SPARSE_ATTN_HD void keep_bits(const uint32_t* words, int32_t shift, int32_t rows,
                              RowMask* columns) {
  RowMask bits = {};
  for (int32_t w = 0; w < 4; ++w) {
    if (w * 32 >= rows) break;
    const uint32_t keys = by_thread(words[w] >> shift);
    for (int i = 0; i < RowMask::kWords; ++i) bits.word[i] |= (keys >> 8 * i & 0xff) << 8 * w;
  }
  for (int i = 0; i < RowMask::kWords; ++i) columns->word[i] &= bits.word[i];
}

/// Takes from `word`, of lead elements from `first` on, those that a main tile has.
SPARSE_ATTN_HD uint32_t without_class(const Pattern& pattern, const Slice& slice, uint32_t word,
                                      Interval counted, int32_t first) {
  for (uint32_t rest = word & columns_in(counted, first); rest != 0; rest &= rest - 1) {
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
