// The keys that a tile of query rows visits, cut into chunks of columns: contiguous runs of the
// lead and main views, runs gathered from block lists, and scattered global tokens. With tiles of
// one key visited_tiles is exact, so nothing outside the rows' windows and bounds is ever read.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/tiled/tile.h"

namespace sparse_attn::cpu {

/// Where a run's elements count: the main view, the lead view, or the list of global tokens.
enum class Axis { kMain, kLead, kGlobal };

struct ChunkRun {
  int32_t begin = 0;
  int32_t length = 0;
  BlockBits bits;     // of a partial block ...
  int32_t block = 0;  // ... that begins with this element
  Interval interval() const { return {begin, begin + length}; }
};

/// Columns of a tile of scores, run after run.
struct Chunk {
  static constexpr int32_t kMaxRuns = 32;
  static constexpr int32_t kMaxColumns = 512;
  Axis axis = Axis::kMain;
  int32_t num_runs = 0;
  int32_t columns = 0;
  bool partial = false;  // some run is of a partial block
  ChunkRun runs[kMaxRuns];

  /// Adds elements, of a partial block that begins with `block` where it has bits.
  void add(Interval x, BlockBits bits = {}, int32_t block = 0) {
    columns += x.size();
    partial |= bits.present();
    ChunkRun* last = num_runs > 0 ? &runs[num_runs - 1] : nullptr;
    const bool plain = last != nullptr && !last->bits.present() && !bits.present();
    if (plain && last->interval().end == x.begin) {
      last->length += x.size();
    } else {
      runs[num_runs++] = {x.begin, x.size(), bits, block};
    }
  }
};

/// Cuts an interval into chunks of nearly equal size.
template <class Visit>
void for_each_piece(Axis axis, Interval x, int32_t chunk_keys, const Visit& visit) {
  if (x.empty()) return;
  int32_t pieces = ceil_div(x.size(), chunk_keys);
  int32_t step = static_cast<int32_t>(round_up(ceil_div(x.size(), pieces), 16));
  for (int32_t begin = x.begin; begin < x.end; begin += step) {
    Chunk chunk;
    chunk.axis = axis;
    chunk.add({begin, imin(begin + step, x.end)});
    visit(chunk);
  }
}

/// Gathers the listed blocks of the tile's layout row; entries that name no block are skipped.
template <class Visit>
void for_each_listed(const BlockList& list, const Tile& tile, int32_t chunk_keys,
                     const Visit& visit) {
  Chunk chunk;
  ListedRuns runs = list.runs(tile.batch, tile.head, tile.layout_row, list.block_kv);
  for (int32_t r = 0; r < runs.count; ++r) {
    const Interval block = runs.keys(r);
    const BlockBits bits = list.bits_at(list.bits_row(runs, r));
    Interval keys = intersect(block, tile.visited.seen_keys);
    while (!keys.empty()) {
      Interval piece = {keys.begin, imin(keys.end, keys.begin + chunk_keys - chunk.columns)};
      chunk.add(piece, bits, block.begin);
      keys.begin = piece.end;
      if (chunk.columns == chunk_keys || chunk.num_runs == Chunk::kMaxRuns) {
        visit(chunk);
        chunk = Chunk();
      }
    }
  }
  if (chunk.columns > 0) visit(chunk);
}

/// Positions in the list of global tokens whose keys lie in `keys`.
inline Interval globals_inside(const Pattern& pattern, Interval keys) {
  if (pattern.num_global_tiles == nullptr || keys.empty()) return {0, 0};
  const int32_t* list = pattern.global_tiles;
  const int32_t* end = list + *pattern.num_global_tiles;
  return {static_cast<int32_t>(std::lower_bound(list, end, keys.begin) - list),
          static_cast<int32_t>(std::lower_bound(list, end, keys.end) - list)};
}

/// Visits every chunk of the tile, in ascending order of each axis.
template <class Visit>
void for_each_chunk(const Pattern& pattern, const Tile& tile, int32_t chunk_keys,
                    const Visit& visit) {
  const Tiles& visited = tile.visited;
  if (pattern.list.present()) {
    for_each_listed(pattern.list, tile, chunk_keys, visit);
    return;
  }
  for_each_piece(Axis::kLead, visited.lead_left, chunk_keys, visit);
  for_each_piece(Axis::kMain, visited.main, chunk_keys, visit);
  for_each_piece(Axis::kLead, visited.lead_right, chunk_keys, visit);
  if (pattern.num_global_tiles == nullptr) return;
  // Global tokens that no tile above has visited: between the runs, which ascend.
  Interval seen = tile.bounds.any;
  const int32_t last = tile.slice.position(tile.rows.end - 1);
  seen.end = end_of_keys(pattern.causal, last, seen.end);
  for (Interval run : {visited.lead_left, visited.main, visited.lead_right}) {
    if (run.empty()) continue;
    Interval before = intersect(seen, {seen.begin, run.begin});
    for_each_piece(Axis::kGlobal, globals_inside(pattern, before), chunk_keys, visit);
    seen.begin = imax(seen.begin, run.end);
  }
  for_each_piece(Axis::kGlobal, globals_inside(pattern, seen), chunk_keys, visit);
}

}  // namespace sparse_attn::cpu
