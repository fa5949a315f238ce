// Block lists: the key blocks that a row of query blocks visits, in runs of keys, and the bits of
// blocks of which not every pair is seen. Nothing in a list is trusted.
#pragma once

#include <cstdint>
#ifdef SPARSE_ATTN_DEBUG
#include <cstdio>
#endif

#include "interval.h"

namespace sparse_attn {

/// Reports a malformed entry, in debug builds alone.
SPARSE_ATTN_HD void report_list([[maybe_unused]] const char* what, [[maybe_unused]] int32_t value) {
#ifdef SPARSE_ATTN_DEBUG
  printf("sparse_attn: block list: %s %d\n", what, value);
#endif
}

/// The key blocks listed for one row of query blocks, ascending, in runs of `length` keys.
/// Entries are never trusted: those that name no block are empty runs.
struct ListedRuns {
  const int32_t* blocks = nullptr;
  int32_t count = 0;      // of runs
  int32_t length = 0;     // of a run
  int32_t per_block = 1;  // runs of a block
  int32_t num_kv = 0;     // blocks
  int32_t shift = 0;      // per_block is 2^shift; -1 where it is no power of 2

  /// The entry of the list that run r is of.
  SPARSE_ATTN_HD int32_t entry_of(int32_t r) const {
    return shift >= 0 ? r >> shift : r / per_block;
  }
  /// Keys of run r; the last block may reach past Skv.
  SPARSE_ATTN_HD Interval keys(int32_t r) const {
    int32_t entry = entry_of(r);
    int32_t block = blocks[entry];
    if (block < 0 || block >= num_kv) {
      report_list("skips the entry", block);
      return {kUnlimited, kUnlimited};
    }
    int32_t begin = ((block - entry) * per_block + r) * length;
    return {begin, begin + length};
  }
};

/// Which pairs of a partial block are seen: bit k % 32 of word k / 32 of a row is key k of the
/// block.
struct BlockBits {
  const uint32_t* words = nullptr;  // [block_q, row_words]; null: the block is seen whole
  int32_t row_words = 0;

  SPARSE_ATTN_HD bool present() const { return words != nullptr; }
  SPARSE_ATTN_HD const uint32_t* row(int32_t r) const { return words + int64_t{r} * row_words; }
  /// Whether row r of the block sees key k of it.
  SPARSE_ATTN_HD bool sees(int32_t r, int32_t k) const {
    return !present() || (row(r)[k >> 5] >> (k & 31) & 1u);
  }
};

/// Key blocks listed per row of query blocks. Counts are never trusted either: they are clamped.
struct BlockList {
  const int32_t* counts = nullptr;   // [B|1, Hq|Hkv|1, num_q]
  const int32_t* indices = nullptr;  // [B|1, Hq|Hkv|1, num_q, max_count]
  int64_t count_stride_b = 0, count_stride_h = 0;
  int64_t index_stride_b = 0, index_stride_h = 0, index_stride_q = 0;
  int32_t block_q = 0, block_kv = 0;
  int32_t num_q = 0, num_kv = 0, max_count = 0;
  int32_t heads_per_list = 1;  // query heads that share a list, those of a key head or one

  // Blocks that a list holds as a rule; 0: up to max_count. Work is cut by it, no result is.
  int32_t expected = 0;

  // Partial blocks; null where all are seen whole.
  const int32_t* partial = nullptr;  // of indices' shape and strides: a row of bits, or -1
  const uint32_t* bits = nullptr;    // [num_bits, block_q, ceil(block_kv / 32)]
  int32_t num_bits = 0;

  SPARSE_ATTN_HD bool present() const { return counts != nullptr; }
  SPARSE_ATTN_HD bool has_bits() const { return partial != nullptr; }
  /// Whether the `group` query heads of a key head have one list, or none.
  SPARSE_ATTN_HD bool is_shared_by(int32_t group) const {
    return !present() || heads_per_list >= group || (count_stride_h == 0 && index_stride_h == 0);
  }
  /// The row of bits of run r's block; -1 where the block is seen whole, or no such row exists.
  SPARSE_ATTN_HD int32_t bits_row(const ListedRuns& runs, int32_t r) const {
    if (!has_bits()) return -1;
    const int32_t said = partial[runs.blocks - indices + runs.entry_of(r)];
    if (said >= 0 && said < num_bits) return said;
    if (said != -1) report_list("skips the row of bits", said);
    return -1;
  }
  /// The bits in a row that `bits_row` names.
  SPARSE_ATTN_HD BlockBits bits_at(int32_t row) const {
    const int32_t words = ceil_div(block_kv, 32);
    if (row < 0) return {};
    return {bits + int64_t{row} * block_q * words, words};
  }
  SPARSE_ATTN_HD ListedRuns runs(int64_t batch, int64_t head, int32_t row, int32_t length) const {
    if (heads_per_list > 1) head = static_cast<int32_t>(head) / heads_per_list;
    // Of sequences that differ in length some may have more blocks than the list has rows.
    int32_t said = row < num_q ? counts[batch * count_stride_b + head * count_stride_h + row] : 0;
    int32_t count = imin(imax(said, 0), max_count);
    if (count != said) report_list("clamps the count", said);
    const int32_t* blocks =
        indices + batch * index_stride_b + head * index_stride_h + row * index_stride_q;
    int32_t per_block = block_kv / length, shift = 0;
    while (1 << shift < per_block) ++shift;
    if (1 << shift != per_block) shift = -1;
    return {blocks, count * per_block, length, per_block, num_kv, shift};
  }
};

}  // namespace sparse_attn
