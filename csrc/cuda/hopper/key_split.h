// The key split of query tiles with global rows. Such a tile visits every key, hundreds of key
// tiles where its neighbours visit ten, and would run long after them: its keys are cut into
// chunks, whose partial results are merged behind the kernel. Plain C++, from sizes alone: where a
// chunk ends depends on the length of the keys, never on batch, heads or device, so neither do a
// row's bits.
#pragma once

#include "../../params.h"

namespace sparse_attn::cuda::hopper {

struct TileShape {
  int32_t block_q, block_kv;
  int32_t head_dim = 0;
};

struct KeySplit {
  int32_t tiles = 0;        // query tiles of a head that are split, from that of position 0 on
  int32_t chunks = 0;       // of each one's keys
  int32_t chunk_tiles = 0;  // key tiles of a chunk

  SPARSE_ATTN_HD constexpr int32_t items() const { return tiles * chunks; }
  /// Rows of a head that have partial results.
  constexpr int32_t rows(TileShape tile) const { return tiles * tile.block_q; }
};

constexpr int32_t kMostSplitGlobals =
    256;  // more fill a device, and their workspace would be large
constexpr int32_t kMostChunks = 16;
constexpr int32_t kLeastChunkTiles = 32;

inline KeySplit plan_key_split(const AttentionParams& params, TileShape tile) {
  const Pattern& pattern = params.pattern;
  const int32_t globals = pattern.global_count;
  // Under causal a global row sees no more keys than its position.
  if (globals == 0 || globals > kMostSplitGlobals || pattern.causal) return {};
  if (pattern.left >= params.problem.seq_kv && pattern.right >= params.problem.seq_kv)
    return {};  // all see all
  const int32_t key_tiles = ceil_div(params.problem.seq_kv, tile.block_kv);
  KeySplit split;
  split.chunk_tiles = imax(kLeastChunkTiles, ceil_div(key_tiles, kMostChunks));
  split.chunks = ceil_div(key_tiles, split.chunk_tiles);
  if (split.chunks <= 1) return {};
  const int32_t row_tiles = ceil_div(params.problem.seq_q, tile.block_q);
  split.tiles = ceil_div(globals - 1, tile.block_q) + 1;  // wherever the first global row lies
  if (!params.sequences.offsets_on_device() && params.sequences.key_origins == nullptr) {
    const int32_t offset = params.sequences.offset(0);
    const Interval rows = {imax(0, -offset), imin(globals - offset, params.problem.seq_q)};
    if (rows.empty()) return {};
    split.tiles = ceil_div(rows.end, tile.block_q) - rows.begin / tile.block_q;
  }
  split.tiles = imin(split.tiles, row_tiles);
  return split;
}

}  // namespace sparse_attn::cuda::hopper
