// For a tile of query rows: which tiles of keys are visited, which of them need a mask, and where
// all masks are one interval that moves with the row. Follows from pattern.h alone.
#pragma once

#include "pattern.h"

namespace sparse_attn {

/// The extremes of key_bounds over the rows of a query tile: what any row has, what all rows have.
struct Bounds {
  Interval any;
  Interval all;

  /// Takes in the keys of one more row.
  SPARSE_ATTN_HD constexpr void add(Interval keys) {
    all = intersect(all, keys);
    if (!keys.empty()) any = {imin(any.begin, keys.begin), imax(any.end, keys.end)};
  }
  /// Leaves out the keys from `end` on.
  SPARSE_ATTN_HD constexpr void cut(int32_t end) {
    any.end = imin(any.end, end);
    all.end = imin(all.end, end);
  }
};

SPARSE_ATTN_HD constexpr Bounds no_rows(int32_t seq_kv) { return {{seq_kv, 0}, {0, seq_kv}}; }
SPARSE_ATTN_HD constexpr Bounds unbounded(int32_t seq_kv) { return {{0, seq_kv}, {0, seq_kv}}; }

/// What the rows of a query tile see where each one's window is that of the row above, moved by one
/// element: row x of the tile sees the elements that `keys` and `window`, moved by x, share.
struct Sliding {
  Interval window;
  Interval keys;
  SPARSE_ATTN_HD constexpr Interval row(int32_t x) const {
    return intersect(keys, {window.begin + x, window.end + x});
  }
};

/// What a query tile visits, in tiles of `block` elements of each view.
struct Tiles {
  Interval main;        // visited tiles of the main view (range patterns)
  Interval full;        // those of them that every row sees whole: no mask
  Interval lead_left;   // lead tiles before the main ones
  Interval lead_right;  // lead tiles after the main ones (shared axis only)

  // Elements of the main view that some row and that every row sees, for listed runs.
  Interval seen_keys;
  Interval full_keys;

  // Elements of the lead view that, in lead tiles, some row and that every row sees.
  Interval seen_lead;
  Interval full_lead;

  // What rows see, by their windows, of the elements of the main view from `slides_from` on.
  Sliding sliding;
  int32_t slides_from = kUnlimited;

  SPARSE_ATTN_HD constexpr int32_t count() const {
    return main.size() + lead_left.size() + lead_right.size();
  }
  SPARSE_ATTN_HD constexpr bool visits(Interval run) const {
    return !intersect(run, seen_keys).empty();
  }
  SPARSE_ATTN_HD constexpr bool needs_mask(Interval run) const { return !full_keys.holds(run); }
  SPARSE_ATTN_HD constexpr bool slides(Interval run) const { return run.begin >= slides_from; }
  /// Whether a lead tile's elements need a mask.
  SPARSE_ATTN_HD constexpr bool lead_needs_mask(Interval run) const {
    return !full_lead.holds(run);
  }
  /// Whether all rows see the same of a lead tile's elements: those in `full_lead`.
  SPARSE_ATTN_HD constexpr bool lead_is_shared(Interval run) const {
    return full_lead.holds(intersect(run, seen_lead));
  }
};

/// How many rows of a query tile see every key as those of global tokens: none, some or all.
enum class GlobalRows { kNone, kSome, kAll };

SPARSE_ATTN_HD GlobalRows global_rows(const Pattern& pattern, const Slice& slice, Interval rows) {
  int32_t first = slice.position(rows.begin);
  int32_t last = slice.position(rows.end - 1);
  const Interval globals = first_globals(pattern, slice);
  if (globals.holds({first, last + 1})) return GlobalRows::kAll;
  if (!intersect(globals, {first, last + 1}).empty()) return GlobalRows::kSome;
  if (pattern.global_bits == nullptr) return GlobalRows::kNone;
  for (int32_t p = imax(first, 0); p <= imin(last, slice.num_keys - 1); ++p) {
    if (pattern.global_bit(p)) return GlobalRows::kSome;
  }
  return GlobalRows::kNone;
}

/// Tiles visited by rows [rows.begin, rows.end) of the slice (not empty).
SPARSE_ATTN_HD Tiles visited_tiles(const Pattern& pattern, const Slice& slice, Interval rows,
                                   const Bounds& bounds, int32_t block) {
  int32_t first = rows.begin + slice.shift;
  int32_t last = rows.end - 1 + slice.shift;
  Interval any = slice.keys.inside(bounds.any);
  Interval all = slice.keys.inside(bounds.all);

  Interval first_window = window_at(pattern, first);
  Interval last_window = window_at(pattern, last);
  GlobalRows globals = global_rows(pattern, slice, rows);
  if (globals == GlobalRows::kAll) {
    first_window = last_window = {-kUnlimited, kUnlimited};
    first_window.end = end_of_keys(pattern.causal, first, first_window.end);
  }
  Interval seen = intersect(any, {first_window.begin, last_window.end});
  Interval full = intersect(all, {last_window.begin, first_window.end});
  if (globals != GlobalRows::kNone) {
    seen = {any.begin, end_of_keys(pattern.causal, last, any.end)};
  }

  Tiles tiles;
  tiles.seen_keys = seen;
  tiles.full_keys = full;
  if (!seen.empty()) {
    tiles.main = {seen.begin / block, ceil_div(seen.end, block)};
  }
  tiles.full = intersect(
      tiles.main, {ceil_div(imax(full.begin, 0), block), full.empty() ? 0 : full.end / block});
  if (tiles.full.empty()) tiles.full = {tiles.main.end, tiles.main.end};

  bool shared = pattern.shared_axis();
  bool same_keys = any.begin == all.begin && any.end == all.end;
  tiles.sliding = {first_window, all};
  if (same_keys && globals != GlobalRows::kSome && pattern.global_bits == nullptr) {
    tiles.slides_from = shared ? slice.lead.view.length : 0;
  }

  // Leading keys seen by some row. On an axis of its own, keys that the window of every row covers
  // are left to the main view.
  Interval lead_seen = bounds.any;
  const int32_t last_position = slice.position(rows.end - 1);
  lead_seen.end = end_of_keys(pattern.causal, last_position, lead_seen.end);
  if (!shared && pattern.dilation == 1 && pattern.causal) {
    lead_seen.end = imin(lead_seen.end, imax(0, window_at(pattern, last).begin));
  }
  Interval lead = slice.lead.inside(pattern, lead_seen);
  tiles.seen_lead = pattern.global_bits == nullptr ? lead : Interval{0, kUnlimited};
  if (lead.empty()) return tiles;
  Interval lead_tiles = {lead.begin / block, ceil_div(lead.end, block)};
  if (!shared || tiles.main.empty()) {
    tiles.lead_left = lead_tiles;
  } else {
    tiles.lead_left = {lead_tiles.begin, imin(lead_tiles.end, tiles.main.begin)};
    tiles.lead_right = {imax(lead_tiles.begin, tiles.main.end), lead_tiles.end};
  }

  // Leading keys seen by every row, and on an axis of its own before every window; all of a list
  // where none lies in a window.
  Interval lead_full = bounds.all;
  lead_full.end = end_of_keys(pattern.causal, slice.position(rows.begin), lead_full.end);
  if (!shared && !seen.empty()) {
    const Interval windows = {slice.keys.at(seen.begin), slice.keys.at(seen.end - 1) + 1};
    const bool apart = pattern.lead_keys != nullptr && slice.lead.inside(pattern, windows).empty();
    if (!apart) lead_full.end = imin(lead_full.end, windows.begin);
  }
  tiles.full_lead = slice.lead.inside(pattern, lead_full);
  return tiles;
}

}  // namespace sparse_attn
