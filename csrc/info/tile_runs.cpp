// The walk of an engine over the tiles of a call, without any arithmetic.
#include "info/tile_runs.h"

#include <set>

#include "visited_tiles.h"

namespace sparse_attn {
namespace {

/// A bit for each key that is a global token, and the key tiles that hold one.
struct Globals {
  std::vector<uint32_t> bits;
  std::set<int32_t> tiles;

  Globals(const std::vector<int32_t>& tokens, int32_t seq_kv, int32_t tile) {
    if (!tokens.empty()) bits.assign(ceil_div(seq_kv, 32), 0);
    for (int32_t j : tokens) {
      if (j < 0 || j >= seq_kv) continue;
      bits[j / 32] |= 1u << j % 32;
      tiles.insert(j / tile);
    }
  }
};

/// Collects the runs of tiles that a call visits.
class RunCollector {
 public:
  RunCollector(const Pattern& pattern, TileSize tile, const Globals& globals)
      : pattern_(pattern), tile_(tile), globals_(globals) {}

  /// Visits the tiles of the query tile `rows` of a residue class.
  void visit(const Slice& slice, Interval rows) {
    const Tiles tiles = visited_tiles(pattern_, slice, rows, unbounded(slice.num_keys), tile_.keys);
    const View& main = slice.keys;
    add(slice, rows, main, {tiles.main.begin, tiles.full.begin}, true);
    add(slice, rows, main, tiles.full, false);
    add(slice, rows, main, {tiles.full.end, tiles.main.end}, true);
    for (Interval lead : {tiles.lead_left, tiles.lead_right}) {
      for (int32_t t = lead.begin; t < lead.end; ++t) {
        const bool masked = tiles.lead_needs_mask({t * tile_.keys, (t + 1) * tile_.keys});
        add(slice, rows, slice.lead.view, {t, t + 1}, masked);
      }
    }
    const int32_t last = slice.position(rows.end - 1);
    for (int32_t t : globals_.tiles) {
      const bool other =
          tiles.main.contains(t) || tiles.lead_left.contains(t) || tiles.lead_right.contains(t);
      const bool reached = t * tile_.keys < end_of_keys(pattern_.causal, last, slice.num_keys);
      if (!other && reached) add(slice, rows, main, {t, t + 1}, true);
    }
  }

  std::vector<TileRun> runs;

 private:
  /// Adds tiles of a view of the keys, joined with those before where they go on.
  void add(const Slice& slice, Interval rows, const View& view, Interval tiles, bool masked) {
    if (tiles.empty()) return;
    const int32_t begin = tiles.begin * tile_.keys;
    const int32_t end = imin(tiles.end * tile_.keys, view.length);
    TileRun run = {
        slice.rows.at(rows.begin), slice.rows.step, rows.size(), view.at(begin), view.step,
        imax(0, end - begin),      tiles.size(),    masked};
    if (!runs.empty()) {
      TileRun& before = runs.back();
      const bool same = before.row == run.row && before.row_step == run.row_step &&
                        before.key_step == run.key_step && before.masked == masked;
      if (same && before.key + before.keys * before.key_step == run.key) {
        before.keys += run.keys;
        before.tiles += run.tiles;
        return;
      }
    }
    runs.push_back(run);
  }

  const Pattern& pattern_;
  TileSize tile_;
  const Globals& globals_;
};

}  // namespace

std::vector<TileRun> tile_runs(Pattern pattern, int32_t seq_q, int32_t seq_kv, TileSize tile,
                               const std::vector<int32_t>& global_tokens) {
  const Globals globals(global_tokens, seq_kv, tile.keys);
  if (!globals.bits.empty()) pattern.global_bits = globals.bits.data();
  RunCollector collector(pattern, tile, globals);
  const Sequence sequence = {seq_q, seq_kv, lower_right(seq_q, seq_kv)};
  for (int32_t c = 0; c < pattern.classes(seq_q); ++c) {
    const Slice slice = make_slice(pattern, c, sequence);
    for (int32_t r = 0; r < slice.rows.length; r += tile.rows) {
      collector.visit(slice, {r, imin(r + tile.rows, slice.rows.length)});
    }
  }
  return collector.runs;
}

}  // namespace sparse_attn
