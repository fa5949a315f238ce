// The key split of float32: the steps of a query tile of few rows are cut into chunks, whose
// results are joined one after the other. From the sequence alone, so a row's bits depend neither
// on batch, heads or device nor on how sequences are packed: thread blocks that share a tile's
// chunks out and one that takes them all have the same. Plain C++, tested on the host.
#pragma once

#include <cstdint>

#include "../../params.h"
#include "tile.h"

namespace sparse_attn::cuda::portable {

/// How many chunks the keys of few rows have. The fewer rows, the more of a device idles without;
/// the more rows, the more a partial result weighs beside its products.
struct ChunkRule {
  int32_t rows;   // of the sequence, up to so many
  int32_t most;   // chunks
  int32_t least;  // keys of a chunk
};
constexpr ChunkRule kChunkRules[] = {{16, 32, 256}, {64, 16, 512}, {256, 8, 1024}};
constexpr int32_t kFewRows = 256;

/// The rule of a sequence with so many rows; of more than kFewRows one chunk of everything.
SPARSE_ATTN_HD ChunkRule rule_of(int32_t rows) {
  constexpr ChunkRule kLow = kChunkRules[0], kMiddle = kChunkRules[1], kFew = kChunkRules[2];
  static_assert(kFew.rows == kFewRows, "the last rule");
  constexpr ChunkRule kWhole = {kMaxLength, 1, kMaxLength};
  return rows <= kLow.rows      ? kLow
         : rows <= kMiddle.rows ? kMiddle
         : rows <= kFew.rows    ? kFew
                                : kWhole;
}

/// The chunks of a query tile.
struct KeyChunks {
  int32_t count = 1;
  int32_t length = kUnlimited;  // steps of each, and of the last one all that are left

  /// The chunk of a step.
  SPARSE_ATTN_HD constexpr int32_t of_step(int32_t at) const {
    return imin(at / length, count - 1);
  }
  /// The steps of a chunk, of `steps` in all.
  SPARSE_ATTN_HD constexpr Interval steps(int32_t chunk, int32_t steps) const {
    return {chunk * length, chunk + 1 == count ? steps : (chunk + 1) * length};
  }
};

/// Cuts the steps of a tile: `range` of its own, and with those of the call's global tokens, which
/// come last and may lie past its keys, `steps`. Only the former tell where chunks end.
SPARSE_ATTN_HD KeyChunks cut_steps(int32_t rows, int32_t range, int32_t steps, int32_t block_kv) {
  const ChunkRule rule = rule_of(rows);
  if (rule.most == 1) return {};
  const int32_t length = imax(rule.least / block_kv, ceil_div(range, rule.most));
  const int32_t count = imin(rule.most, ceil_div(steps, length));
  return count > 1 ? KeyChunks{count, length} : KeyChunks{};
}

/// Steps of a query tile, at most, as far as sizes tell.
inline int64_t most_steps(const AttentionParams& params, const TileShape& tile) {
  const Pattern& pattern = params.pattern;
  const int32_t block = tile.block_kv, seq_kv = params.problem.seq_kv;
  if (pattern.list.present()) {
    return ceil_div64(int64_t{pattern.list.max_count} * pattern.list.block_kv, block);
  }
  const int32_t keys = ceil_div(seq_kv, pattern.dilation);
  const int32_t seen = params.num_global_tokens > 0 ? keys : pattern.most_seen(keys, tile.block_q);
  int64_t steps = ceil_div(keys, block);
  if (seen < keys) steps = imin(ceil_div(keys, block), ceil_div(seen, block) + 1);
  if (pattern.has_lead()) {  // off the tiles' edges it touches one more
    steps += ceil_div(pattern.most_lead(seq_kv), block) + 1;
  }
  return steps + imin(params.num_global_tokens, ceil_div(seq_kv, block));
}

/// The chunks that a query tile of a call has, at most. Packed sequences may be short.
inline int32_t most_chunks(const AttentionParams& params, const TileShape& tile) {
  if (params.problem.dtype != Dtype::kFloat32 || params.pattern.topk > 0) return 1;
  const ChunkRule rule = rule_of(params.sequences.packed() ? 1 : params.problem.seq_q);
  if (rule.most == 1) return 1;
  const int64_t chunks = ceil_div64(most_steps(params, tile), rule.least / tile.block_kv);
  return chunks < rule.most ? imax(1, static_cast<int32_t>(chunks)) : rule.most;
}

/// Columns of a partial result: whole chunks of 16 bytes.
constexpr int32_t partial_columns(int32_t value_dim) { return ceil_div(value_dim, 4) * 4; }

/// The thread blocks that share out the chunks of a query tile: several where `tiles`, of all
/// heads, leave idle some of a device that holds `resident` thread blocks.
inline int32_t plan_split(const AttentionParams& params, const TileShape& tile, int64_t tiles,
                          int32_t resident) {
  constexpr int64_t kWaves = 2;              // of thread blocks, that fill a device
  constexpr int64_t kMostBytes = 256 << 20;  // of partial results
  const Problem& problem = params.problem;
  const int32_t chunks = most_chunks(params, tile);
  if (chunks == 1 || problem.seq_q > kFewRows || tiles >= kWaves * resident) return 1;
  const int64_t rows = int64_t{problem.batch} * problem.heads_q * problem.seq_q;
  const int64_t row_bytes = (partial_columns(problem.value_dim) + 2) * int64_t{sizeof(float)};
  return rows * chunks * row_bytes <= kMostBytes ? chunks : 1;
}

}  // namespace sparse_attn::cuda::portable
