// A tile of query rows of the tiled engine: which rows, what they visit, what each of them sees.
#pragma once

#include <cstdint>

#include "cpu/tiled/plan.h"
#include "params.h"
#include "visited_tiles.h"

namespace sparse_attn::cpu {

/// Rows [rows.begin, rows.end) of a slice for one head, or for the heads of a group.
struct Tile {
  int32_t batch = 0;
  int32_t head = 0;  // first query head
  int32_t num_heads = 1;
  int32_t head_kv = 0;
  int32_t layout_row = 0;  // of block lists
  Slice slice;
  Interval rows;
  Bounds bounds;
  Tiles visited;  // in tiles of one key

  int32_t size() const { return num_heads * rows.size(); }
  int32_t head_of(int32_t row) const { return head + row / rows.size(); }
  /// Row of the slice, and query, of the tile's row.
  int32_t slice_row(int32_t row) const { return rows.begin + row % rows.size(); }
  int32_t query_of(int32_t row) const { return slice.rows.at(slice_row(row)); }
};

/// The extremes of key_bounds over the tile's rows.
inline Bounds bounds_of(const AttentionParams& params, const Tile& tile) {
  if (params.scores.bounds.data == nullptr) return unbounded(params.problem.seq_kv);
  Bounds bounds = no_rows(params.problem.seq_kv);
  for (int32_t row = 0; row < tile.size(); ++row) {
    bounds.add(params.scores.bounds.row(tile.batch, tile.head_of(row), tile.query_of(row),
                                        params.problem.seq_kv));
  }
  return bounds;
}

/// Grows the visited run of the main view to a multiple of 16 keys, which BLAS multiplies fastest,
/// by keys that exist for some row, that causality lets some row see, and that no lead tile holds.
inline void round_up_main(const Pattern& pattern, Tile* tile) {
  Interval& main = tile->visited.main;
  if (main.empty() || pattern.list.present()) return;
  Interval room = tile->slice.keys.inside(tile->bounds.any);
  room.end = end_of_keys(pattern.causal, tile->rows.end - 1 + tile->slice.shift, room.end);
  if (pattern.shared_axis() && pattern.has_lead()) {
    room = intersect(room, {tile->slice.lead.view.length, main.end});
  }
  int32_t missing =
      imin(static_cast<int32_t>(round_up(main.size(), 16)) - main.size(), room.size());
  int32_t before = imax(0, imin(missing, main.begin - room.begin));
  main.begin -= before;
  main.end += imax(0, imin(missing - before, room.end - main.end));
}

/// Tile `index` of the cut for query head `head` and, when heads share tiles, those that follow.
/// Empty where the class ends early.
inline Tile make_tile(const AttentionParams& params, const Pattern& pattern, const QueryCut& cut,
                      int32_t batch, int32_t head, int32_t index) {
  Tile tile;
  tile.batch = batch;
  tile.head = head;
  tile.num_heads = cut.heads_per_tile;
  tile.head_kv = head / params.problem.group();
  int32_t part = index / cut.tiles_per_class;
  int32_t first = index % cut.tiles_per_class * cut.tile_rows;
  const Sequence sequence = params.sequences.of(batch);
  if (pattern.list.present()) {
    tile.layout_row = part;
    tile.slice = make_slice(pattern, 0, sequence);
    int32_t begin = part * pattern.list.block_q;
    int32_t end =
        imin(begin + imin(first + cut.tile_rows, pattern.list.block_q), params.problem.seq_q);
    tile.rows = {begin + first, end};
  } else {
    tile.slice = make_slice(pattern, part, sequence);
    tile.rows = {first, imin(first + cut.tile_rows, tile.slice.rows.length)};
  }
  if (tile.rows.empty()) return tile;
  tile.bounds = bounds_of(params, tile);
  tile.visited = visited_tiles(pattern, tile.slice, tile.rows, tile.bounds, 1);
  round_up_main(pattern, &tile);
  return tile;
}

}  // namespace sparse_attn::cpu
