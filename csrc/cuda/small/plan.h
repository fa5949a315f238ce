// What the small engine takes, and how its thread blocks share a call out: by sizes alone, so that
// capability.cpp and the launch say the same.
#pragma once

#include "../../divisor.h"
#include "../../params.h"

namespace sparse_attn::cuda::small {

constexpr int32_t kMostKeys = 128, kMostHeadDim = 128;
/// Of packed sequences: each has thread blocks for as many as the longest may have.
constexpr int32_t kMostPackedQueries = 128;

constexpr int32_t kTileRows = 16;    // query rows of a head, which a warp takes
constexpr int32_t kMostWarps = 8;    // of a thread block
constexpr int32_t kLoadedKeys = 32;  // keys come and are multiplied by so many

/// The head dim and the keys that a kernel is compiled for.
constexpr int32_t kernel_head_dim(int32_t head_dim) {
  return head_dim <= 32 ? 32 : head_dim <= 64 ? 64 : 128;
}
constexpr int32_t kernel_keys(int32_t keys) { return keys <= 32 ? 32 : keys <= 64 ? 64 : 128; }
/// Warps of a thread block, at most, by the keys of its kernel: small ones are many at once.
constexpr int32_t most_warps(int32_t kernel_keys) { return kernel_keys > 64 ? kMostWarps : 4; }

/// The tile of a warp: of which unit, in which place of its thread block. There may be fewer units
/// and fewer tiles.
struct WarpTile {
  int32_t slot, unit, tile;
};

/// A key head of a sequence is a unit: its keys, and the tiles of the query heads that share them.
/// A thread block holds one unit, or several of few tiles; units of many tiles are of several.
struct Grid {
  int32_t tiles = 0;       // of a query head
  int32_t unit_tiles = 0;  // of all heads of a unit
  int32_t units = 0;
  int32_t group = 1;        // query heads of a key head
  int32_t warps = 0;        // of a thread block, for each of its units
  int32_t unit_blocks = 0;  // thread blocks of a unit
  int32_t at_once = 0;      // units of a thread block
  int32_t key_rows = 0;     // room for the keys of a unit
  Divisor by_warps, by_tiles, by_unit_blocks, by_heads_kv;

  SPARSE_ATTN_HD constexpr WarpTile tile_of(int32_t block, int32_t warp) const {
    const int32_t slot = by_warps.divide(warp);
    const int32_t group = by_unit_blocks.divide(block);
    return {slot, group * at_once + slot, (block - group * unit_blocks - slot) * warps + warp};
  }
  SPARSE_ATTN_HD constexpr int32_t threads() const { return 32 * warps * at_once; }
  SPARSE_ATTN_HD constexpr int32_t blocks() const { return ceil_div(units, at_once) * unit_blocks; }
  /// Bytes of a unit's keys, or of its values, whose rows take `pitch`.
  SPARSE_ATTN_HD constexpr int32_t key_bytes(int32_t pitch) const { return key_rows * pitch; }
  SPARSE_ATTN_HD constexpr int32_t shared_bytes(int32_t pitch) const {
    return at_once * (2 * key_bytes(pitch) + warps * kTileRows * pitch);
  }
};

inline Grid plan_grid(const Problem& problem) {
  constexpr int32_t kSharedBytes = 32 << 10;  // of a thread block that holds several units
  const int32_t pitch = kernel_head_dim(problem.widest_dim()) * size_of(problem.dtype);
  Grid grid;
  grid.tiles = ceil_div(problem.seq_q, kTileRows);
  grid.group = problem.group();
  grid.unit_tiles = grid.tiles * grid.group;
  grid.units = problem.batch * problem.heads_kv;
  const int32_t most = most_warps(kernel_keys(problem.seq_kv));
  grid.unit_blocks = ceil_div(grid.unit_tiles, most);
  grid.warps = ceil_div(grid.unit_tiles, grid.unit_blocks);
  grid.key_rows = ceil_div(problem.seq_kv, kLoadedKeys) * kLoadedKeys;
  grid.at_once = 1;
  while (grid.unit_blocks == 1 && 2 * grid.at_once * grid.warps <= most &&
         2 * grid.shared_bytes(pitch) <= kSharedBytes) {
    grid.at_once *= 2;
  }
  grid.by_warps = Divisor(grid.warps);
  grid.by_tiles = Divisor(grid.tiles);
  grid.by_unit_blocks = Divisor(grid.unit_blocks);
  grid.by_heads_kv = Divisor(problem.heads_kv);
  return grid;
}

}  // namespace sparse_attn::cuda::small
