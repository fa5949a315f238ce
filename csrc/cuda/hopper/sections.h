// Keys that the copy engine cannot bring as the kernels read them, those of 8 bits, and pages and
// rows that it brings slowly to many queries, are laid out first (lay_out.h): each sequence's keys
// one after the other, in query's dtype, in the workspace. Where that has no room for all of them a
// call is taken in sections of key heads or of batch entries.
#pragma once

#include <algorithm>
#include <numeric>

#include "../../arena.h"
#include "../../params.h"
#include "../../part.h"
#include "table.h"

namespace sparse_attn::cuda::hopper {

/// Elements of a sector, the unit in which memory is read.
constexpr int32_t kSector = 16;

/// The sections of a call, and of each the room for its keys at the start of the workspace.
class Sections {
  static constexpr int64_t kMostBytes = int64_t{256} << 20;  // or what a key head of an entry takes

 public:
  explicit Sections(const AttentionParams& params)
      : params_(params), packed_(params.sequences.first_keys != nullptr) {
    const Problem& p = params.problem;
    rows_ = packed_ ? params.sequences.packed_keys : p.seq_kv;
    const int64_t row_bytes = int64_t{row_of(p.head_dim) + row_of(p.value_dim)} * size_of(p.dtype);
    const int64_t most = kMostBytes / (imax(rows_, 1) * row_bytes);  // key heads that have room
    heads_ = share_of(p.heads_kv, most);
    entries_ = packed_ ? p.batch : heads_ < p.heads_kv ? 1 : share_of(p.batch, most / p.heads_kv);
    const int64_t rows = int64_t{rows_} * heads_ * (packed_ ? 1 : entries_) * size_of(p.dtype);
    key_bytes_ = Arena::rounded(rows * row_of(p.head_dim));
    value_bytes_ = Arena::rounded(rows * row_of(p.value_dim));
  }

  int32_t count() const {
    const Problem& p = params_.problem;
    return ceil_div(p.heads_kv, heads_) * ceil_div(p.batch, entries_);
  }
  /// Bytes of the keys and values of a section, at most.
  int64_t bytes() const { return key_bytes_ + value_bytes_; }

  /// A section of the call, ...
  AttentionParams part(int32_t section) const {
    const Problem& p = params_.problem;
    const int32_t of_entries = ceil_div(p.heads_kv, heads_);
    const int32_t entry = section / of_entries * entries_, head = section % of_entries * heads_;
    return part_of(params_, {entry, imin(entry + entries_, p.batch)},
                   {head, imin(head + heads_, p.heads_kv)});
  }
  /// ... and the same on keys that are laid out.
  AttentionParams laid_out(AttentionParams part) const {
    const Problem& p = part.problem;
    KeySource& keys = part.keys;
    auto place = [&](void* data, int32_t columns) -> TensorView {
      const int64_t row = row_of(columns), head = rows_ * row;
      return {data, packed_ ? 0 : p.heads_kv * head, head, row};
    };
    keys.key = place(part.workspace, p.head_dim);
    keys.value = place(moved(part.workspace, key_bytes_, 1), p.value_dim);
    keys.dtype = p.dtype;
    keys.table = nullptr;
    part.workspace = moved(part.workspace, bytes(), 1);
    return part;
  }

 private:
  /// Elements from a row of so many columns to the next: rows that end inside a sector are brought
  /// faster at every other sector.
  static int32_t row_of(int32_t columns) {
    const int32_t unit = columns % kSector == 0 ? kSector : 2 * kSector;
    return ceil_div(columns, unit) * unit;
  }
  /// The largest of the fewest equal shares of `items` that are no larger than `most`.
  static int32_t share_of(int32_t items, int64_t most) {
    const auto shares = static_cast<int32_t>(ceil_div64(items, most < 1 ? 1 : most));
    return ceil_div(items, shares);
  }

  const AttentionParams& params_;
  bool packed_;                      // keys: all sequences are laid out as one
  int32_t rows_ = 0;                 // of a key head of an entry
  int32_t entries_ = 1, heads_ = 1;  // of a section, at most
  int64_t key_bytes_ = 0, value_bytes_ = 0;
};

/// Whether a call has so many sections, of which windows reach so few keys, that it is faster to
/// read keys where they lie.
inline bool is_cut_small(const AttentionParams& params) {
  constexpr int32_t kManySections = 4, kFewKeys = 4;  // one of so many
  const Pattern& pattern = params.pattern;
  const int32_t rows = params.problem.seq_q, keys = params.problem.seq_kv, step = pattern.dilation;
  const int64_t reach = pattern.most_window(ceil_div(keys, step), ceil_div(rows, step));
  return params.keys.dtype == Dtype::kFloat8 && Sections(params).count() > kManySections &&
         reach * step * kFewKeys < keys;
}

/// Whether rows enough read each key for its copy to pay, in few sections.
inline bool have_many_readers(const AttentionParams& params, int64_t most_rows) {
  constexpr int64_t kManyRows = 2048;
  constexpr int32_t kManySections = 8;
  return !params.sequences.packed() && !params.pattern.list.present() &&
         std::min(most_rows, params.pattern.taps()) * params.problem.group() >= kManyRows &&
         Sections(params).count() <= kManySections;
}

/// Whether laying out pages pays: the copy engine would bring a key with few others.
inline bool pays_for_pages(const AttentionParams& params) {
  constexpr int32_t kManyKeys = 64;
  const Problem& p = params.problem;
  if (!params.keys.paged() || !have_many_readers(params, p.seq_q)) return false;
  const Entry ragged = find_kernel(p.widest_dim(), {params.features});
  return std::gcd(ragged.keys(), params.keys.page_size) < kManyKeys;
}

/// Whether some rows of a tensor begin inside a sector.
inline bool straddles_sectors(const TensorView& tensor) {
  return (tensor.stride_b | tensor.stride_h | tensor.stride_s) % kSector != 0;
}

/// Whether laying out rows that begin inside sectors pays. The copy engine brings them slowly in
/// narrow slabs, of which wide heads have many; 104 and 168 columns take longer than more do, and
/// pay where twice as many rows read a key.
inline bool pays_for_rows(const AttentionParams& params) {
  constexpr int32_t kWideHead = 128, kNarrowSlab = 32, kSlowHeads[] = {104, 168}, kManyKeys = 1024;
  const Problem& p = params.problem;
  const KeySource& keys = params.keys;
  if (keys.paged() || p.seq_kv < kManyKeys) return false;
  if (!straddles_sectors(keys.key) && !straddles_sectors(keys.value)) return false;
  const int32_t columns = columns_of(find_kernel(p.widest_dim(), {params.features}).head_dim);
  const bool narrow = columns > kWideHead && slab_of(columns) == kNarrowSlab;
  const bool slow = p.widest_dim() == kSlowHeads[0] || p.widest_dim() == kSlowHeads[1];
  const int32_t readers = params.pattern.causal ? p.seq_q / 2 : p.seq_q;
  return (narrow || slow) && have_many_readers(params, narrow ? readers : readers / 2);
}

/// Whether a tile has every so many keys, which no box of a page brings.
inline bool strides_over_pages(const AttentionParams& params) {
  const Pattern& pattern = params.pattern;
  return params.keys.paged() && (pattern.dilation > 1 || pattern.lead.step > 1);
}

/// Whether a call's keys are laid out.
inline bool lays_out(const AttentionParams& params) {
  return params.keys.dtype == Dtype::kFloat8 || strides_over_pages(params) ||
         pays_for_pages(params) || pays_for_rows(params);
}

}  // namespace sparse_attn::cuda::hopper
