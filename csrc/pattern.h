// What a pattern is: which keys a row may see, as views of the rows and keys and as intervals of
// them. Every engine reads this one definition, on the host (g++) and on the device (nvcc); which
// tiles follow from it says visited_tiles.h.
//
//   positions   query i stands at key position p = i + query_offset; keys are j = 0 .. Skv-1
//   classes     dilation d splits rows and keys by residue: class c holds keys c, c+d, c+2d, ...;
//               in class units every window is a plain band: nothing else knows about dilation
//   main view   the keys of the row's class: contiguous tiles (full, causal, band, dilated) or
//               listed tiles (block lists)
//   lead view   undilated leading keys that every row sees: sinks, global columns, strided columns;
//               they count from the sequence's origin, or are listed wherever they lie
//
// A key of both views counts once: where the views share an axis the lead tiles skip the main tiles
// and a main tile allows the union; otherwise a lead tile excludes what the main view allows.
#pragma once

#include <cstdint>

#include "block_list.h"
#include "interval.h"
#include "sequence.h"

namespace sparse_attn {

/// Which keys a query may see; plain data, passed to kernels by value.
struct Pattern {
  // Main window, in taps of `dilation` keys: -left <= t <= right at j = p + t * dilation; no side
  // is negative.
  int32_t left = kUnlimited;
  int32_t right = kUnlimited;
  int32_t dilation = 1;
  bool causal = false;  // j <= p, cuts the lead view too

  // Lead view: keys origin + lead.at(u), 0 <= u < lead.length; or, where they are listed, keys
  // lead_keys[u], 0 <= u < *num_lead_keys, ascending, `lead.length` of them at most.
  View lead;
  const int32_t* lead_keys = nullptr;
  const int32_t* num_lead_keys = nullptr;

  // Global tokens: their rows see every key. Either the first `global_count` positions from the
  // origin on (their columns are the lead view), or a bit per key with the list of key tiles that
  // hold one.
  int32_t global_count = 0;
  const uint32_t* global_bits = nullptr;  // [ceil(Skv / 32)]
  const int32_t* global_tiles = nullptr;  // [num_global_tiles], ascending, in the engine's tiles
  const int32_t* num_global_tiles = nullptr;  // [1]

  BlockList list;    // main view by list when present; window sides are then unlimited
  int32_t topk = 0;  // keep the k highest scores of the allowed keys; 0 keeps all

  /// The last tap of a row's window: under causal none after the row itself.
  SPARSE_ATTN_HD constexpr int32_t last_tap() const { return causal ? 0 : right; }
  /// Taps of a row's window, whether their keys exist or not.
  SPARSE_ATTN_HD constexpr int64_t taps() const { return int64_t{left} + last_tap() + 1; }
  SPARSE_ATTN_HD constexpr bool has_lead() const { return lead.length > 0; }
  /// Whether something counts from the sequence's origin.
  SPARSE_ATTN_HD constexpr bool has_origin() const { return has_lead() || global_count > 0; }
  /// Elements of the lead view in a sequence of `keys` keys, at most, whatever its origin.
  SPARSE_ATTN_HD constexpr int32_t most_lead(int32_t keys) const {
    return imin(lead.length, ceil_div(keys, lead.step));
  }
  /// Lead and main view lie on the same axis, so tiles of one are tiles of the other.
  SPARSE_ATTN_HD constexpr bool shared_axis() const {
    return dilation == 1 && lead.step == 1 && lead_keys == nullptr;
  }
  /// Whether some rows see keys beyond their windows: those of global tokens.
  SPARSE_ATTN_HD constexpr bool has_global_rows() const {
    return global_count > 0 || global_bits != nullptr;
  }
  /// Elements of a main view of `length` that the windows of `rows` rows hold together, at most.
  SPARSE_ATTN_HD constexpr int32_t most_window(int32_t length, int32_t rows = 1) const {
    const int64_t reach = taps() - 1 + rows;
    return reach < length ? imax(static_cast<int32_t>(reach), 0) : length;
  }
  /// ... and that these rows may see.
  SPARSE_ATTN_HD constexpr int32_t most_seen(int32_t length, int32_t rows = 1) const {
    return has_global_rows() ? length : most_window(length, rows);
  }
  /// Residue classes that have rows.
  SPARSE_ATTN_HD constexpr int32_t classes(int32_t seq_q) const { return imin(dilation, seq_q); }
  SPARSE_ATTN_HD bool global_bit(int32_t j) const {
    return global_bits != nullptr && (global_bits[j >> 5] >> (j & 31) & 1u);
  }
};

/// The leading keys of a sequence: elements begin .. view.length - 1 of `view`.
struct Lead {
  View view;
  int32_t begin = 0;

  /// The key of element u.
  SPARSE_ATTN_HD constexpr int32_t at(const Pattern& pattern, int32_t u) const {
    return pattern.lead_keys == nullptr ? view.at(u) : pattern.lead_keys[u];
  }
  /// How many elements of the view are keys before x.
  SPARSE_ATTN_HD constexpr int32_t before(const Pattern& pattern, int32_t x) const {
    if (pattern.lead_keys == nullptr) return view.before(x);
    int32_t low = 0, high = x <= 0 ? 0 : view.length;
    while (low < high) {
      const int32_t middle = (low + high) / 2;
      if (pattern.lead_keys[middle] < x) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
  /// The leading elements whose keys lie in `x`.
  SPARSE_ATTN_HD constexpr Interval inside(const Pattern& pattern, Interval x) const {
    return intersect({before(pattern, x.begin), before(pattern, x.end)}, {begin, view.length});
  }
};

/// An origin whose sums fit int32; one beyond all keys stays there.
SPARSE_ATTN_HD constexpr int32_t near_origin(int32_t origin) {
  return imax(-kMaxLength, imin(origin, kMaxLength));
}

/// The lead view of a sequence whose text begins at key `origin`. On a shared axis its elements are
/// keys; else the view begins with the first leading key that exists.
SPARSE_ATTN_HD constexpr Lead make_lead(const Pattern& pattern, int32_t origin, int32_t keys) {
  const int32_t step = pattern.lead.step;
  if (!pattern.has_lead()) return {{0, step, 0}, 0};
  if (pattern.lead_keys != nullptr) return {{0, 1, *pattern.num_lead_keys}, 0};
  const int32_t in_step = origin % step + (origin % step < 0 ? step : 0);
  origin = near_origin(origin);
  const int32_t first = origin + pattern.lead.offset;
  if (step == 1) {
    const int32_t begin = imax(0, imin(first, keys));
    const int32_t end = imax(begin, imin(first + pattern.lead.length, keys));
    if (pattern.shared_axis()) return {{0, 1, end}, begin};
    return {{begin, 1, end - begin}, 0};
  }
  // Every column that exists; those before the first one of the text do not count.
  const int32_t residue = (in_step + pattern.lead.offset) % step;
  const View view = residue_class(residue, step, keys);
  return {view, view.before(first)};
}

/// One residue class of a (batch, head): a dense band problem on views of the rows and keys.
struct Slice {
  View rows;             // rows i = rows.at(r)
  View keys;             // keys j = keys.at(v), the main view
  Lead lead;             // the lead view
  int32_t origin = 0;    // position at which the text begins, cut so that sums fit
  int32_t shift = 0;     // row r stands at v = r + shift
  int32_t offset = 0;    // query_offset: row i stands at p = i + offset
  int32_t num_keys = 0;  // of the sequence

  SPARSE_ATTN_HD constexpr int32_t position(int32_t r) const { return rows.at(r) + offset; }
};

/// Class `c` of `pattern.dilation` classes of a sequence.
SPARSE_ATTN_HD constexpr Slice make_slice(const Pattern& pattern, int32_t c,
                                          const Sequence& sequence) {
  const int32_t d = pattern.dilation;
  const int32_t position = c + sequence.offset;  // of the class's first row
  const int32_t shift = floor_div(position, d);
  Slice slice;
  slice.rows = residue_class(c, d, sequence.rows);
  slice.keys = residue_class(position - shift * d, d, sequence.keys);
  slice.lead = make_lead(pattern, sequence.origin, sequence.keys);
  slice.origin = near_origin(sequence.origin);
  slice.shift = shift;
  slice.offset = sequence.offset;
  slice.num_keys = sequence.keys;
  return slice;
}

/// Positions of the first global tokens.
SPARSE_ATTN_HD constexpr Interval first_globals(const Pattern& pattern, const Slice& slice) {
  return {imax(0, slice.origin), slice.origin + pattern.global_count};
}

/// Whether the token at position p is global, so that its row sees every key.
SPARSE_ATTN_HD bool is_global_row(const Pattern& pattern, const Slice& slice, int32_t p) {
  return first_globals(pattern, slice).contains(p) ||
         (p >= 0 && p < slice.num_keys && pattern.global_bit(p));
}

/// What one row may see. `keys`, `lead` and `limit` are in elements of their views.
struct Row {
  Interval keys;   // main view: window, causal and bounds; everything for a global row
  Interval lead;   // lead view: causal and bounds
  Interval limit;  // main view: causal and bounds alone, where a global bit counts
};

/// The window of the row that stands at element v of the main view, whether its keys exist or not.
SPARSE_ATTN_HD constexpr Interval window_at(const Pattern& pattern, int32_t v) {
  return {v - pattern.left, v + pattern.last_tap() + 1};
}

/// The keys of a sequence of `num_keys` in the windows of rows that stand at `positions`, and in
/// `wider` taps more on either side.
SPARSE_ATTN_HD constexpr Interval reached_keys(const Pattern& pattern, Interval positions,
                                               int32_t num_keys, int32_t wider = 0) {
  const int64_t left = (int64_t{pattern.left} + wider) * pattern.dilation;
  const int64_t right = (int64_t{pattern.last_tap()} + wider) * pattern.dilation;
  return {cut_to(num_keys, positions.begin - left), cut_to(num_keys, positions.end + right)};
}

/// `bounds` are the keys that exist for the row (key_bounds), all of the sequence without.
SPARSE_ATTN_HD Row make_row(const Pattern& pattern, const Slice& slice, int32_t r,
                            Interval bounds) {
  int32_t p = slice.position(r);
  Interval seen = intersect(bounds, {0, end_of_keys(pattern.causal, p, slice.num_keys)});
  Row row;
  row.limit = slice.keys.inside(seen);
  row.lead = slice.lead.inside(pattern, seen);
  row.keys = row.limit;
  if (!is_global_row(pattern, slice, p)) {
    row.keys = intersect(row.limit, window_at(pattern, r + slice.shift));
  }
  return row;
}

/// What a row sees of a view when a tile of it is visited, in elements of the view: every element
/// of `first` and `second`, and global tokens among `marked`; but no key of the row's class among
/// `counted`, because a main tile has it.
struct Seen {
  Interval first, second;  // may overlap
  Interval marked;
  Interval counted;
};

SPARSE_ATTN_HD Seen seen_main(const Pattern& pattern, const Row& row) {
  if (!pattern.shared_axis()) return {{}, row.keys, {}, {}};
  return {row.lead, row.keys, pattern.global_bits == nullptr ? Interval{} : row.limit, {}};
}

SPARSE_ATTN_HD Seen seen_lead(const Pattern& pattern, const Slice& slice, const Row& row) {
  if (pattern.shared_axis()) {
    // Keys of the window lie in main tiles, which lead tiles leave out.
    return {row.lead, {}, pattern.global_bits == nullptr ? Interval{} : row.limit, {}};
  }
  if (row.keys.empty()) return {row.lead, {}, {}, {}};
  Interval window = {slice.keys.at(row.keys.begin), slice.keys.at(row.keys.end - 1) + 1};
  return {row.lead, {}, {}, slice.lead.inside(pattern, window)};
}

/// Whether element u of the lead view is a key of the slice's class.
SPARSE_ATTN_HD bool in_class(const Pattern& pattern, const Slice& slice, int32_t u) {
  return pattern.dilation == 1 ||
         (slice.lead.view.at(u) - slice.keys.offset) % slice.keys.step == 0;
}

/// Whether `seen` has element x of its view.
SPARSE_ATTN_HD bool sees(const Pattern& pattern, const Slice& slice, const Seen& seen, int32_t x) {
  if (!seen.first.contains(x) && !seen.second.contains(x) &&
      !(seen.marked.contains(x) && pattern.global_bit(x))) {
    return false;
  }
  return !seen.counted.contains(x) || !in_class(pattern, slice, x);
}

/// One query among all keys, for engines that look at a key at a time.
struct Query {
  Slice slice;
  Row row;
};

/// Query i of a sequence; `bounds` are the keys that exist for it.
SPARSE_ATTN_HD Query make_query(const Pattern& pattern, int32_t i, const Sequence& sequence,
                                Interval bounds) {
  Slice slice = make_slice(pattern, i % pattern.dilation, sequence);
  return {slice, make_row(pattern, slice, i / pattern.dilation, bounds)};
}

/// Whether the query sees key j in the main view or in the lead view.
SPARSE_ATTN_HD bool sees_key(const Pattern& pattern, const Query& query, int32_t j) {
  const View& keys = query.slice.keys;
  int32_t v = floor_div(j - keys.offset, keys.step);
  if (keys.at(v) == j && sees(pattern, query.slice, seen_main(pattern, query.row), v)) return true;
  if (!pattern.has_lead()) return false;
  const Lead& lead = query.slice.lead;
  int32_t u = lead.before(pattern, j);
  return u < lead.view.length && lead.at(pattern, u) == j &&
         sees(pattern, query.slice, seen_lead(pattern, query.slice, query.row), u);
}

}  // namespace sparse_attn
