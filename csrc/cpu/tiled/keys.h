// Where the keys and values of a run lie: in the caller's tensors, or packed to contiguous float32
// rows. Packing makes a product's bits independent of the caller's strides and alignment, converts
// half precision once for all tiles of a head, and turns strided views into contiguous ones.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/tensor_rows.h"
#include "cpu/tiled/bfloat_rows.h"
#include "cpu/tiled/chunks.h"
#include "cpu/vector/vector_math.h"

namespace sparse_attn::cpu {

/// Copies `count` rows to panels, with zeros after them in the last.
inline void copy_panels(const VectorMath& math, const Rows& rows, int64_t count, int32_t head_dim,
                        float* target) {
  for (int64_t row = 0; row < count; row += kPanelKeys, target += kPanelKeys * head_dim) {
    Rows keys = strided(rows, row, 1);
    if (keys.element == Element::kFloat32 && count - row >= kPanelKeys) {
      math.pack_panel(static_cast<const float*>(keys.data), keys.stride, head_dim, target);
      continue;
    }
    float packed[kPanelKeys * kMaxHeadDim];
    int64_t there = count - row < kPanelKeys ? count - row : kPanelKeys;
    copy_rows(math, keys, there, head_dim, packed);
    std::memset(packed + there * head_dim, 0, (kPanelKeys - there) * head_dim * sizeof(float));
    math.pack_panel(packed, head_dim, head_dim, target);
  }
}

/// What packed rows are. A head's row takes as much space in all of them; for bfloat16, that of
/// its elements (bfloat_rows.h).
enum class Form { kRows, kPanels, kBfloatPanels, kBfloatPairs };

inline void copy_as(Form form, const VectorMath& math, const Rows& rows, int64_t count,
                    int32_t head_dim, float* target) {
  if (form == Form::kRows) copy_rows(math, rows, count, head_dim, target);
  if (form == Form::kPanels) copy_panels(math, rows, count, head_dim, target);
  uint16_t* bits = reinterpret_cast<uint16_t*>(target);
  if (form == Form::kBfloatPanels) copy_bfloat_panels(math, rows, count, head_dim, bits);
  if (form == Form::kBfloatPairs) copy_bfloat_pairs(math, rows, count, head_dim, 0, bits);
}

/// The packed rows of one key head; null where the caller's own are used.
struct PackedHead {
  float* key = nullptr;         // [main_rows, head_dim], or panels
  float* value = nullptr;       // [main_rows, value_dim]
  float* side_key = nullptr;    // [side_rows, head_dim]
  float* side_value = nullptr;  // [side_rows, value_dim]
};

/// Space for the packed rows of `heads` heads.
struct PackedHeads {
  float* base = nullptr;
  int64_t key_floats = 0, value_floats = 0, side_key_floats = 0, side_value_floats = 0;

  PackedHeads(const PackCut& cut, const Problem& problem)
      : key_floats(room(cut, cut.key * cut.main_rows, problem.head_dim)),
        value_floats(room(cut, cut.value * cut.main_rows, problem.value_dim)),
        side_key_floats(room(cut, cut.side_rows, problem.head_dim)),
        side_value_floats(room(cut, cut.side_rows, problem.value_dim)) {}
  int64_t head_floats() const {
    return key_floats + value_floats + side_key_floats + side_value_floats;
  }
  PackedHead head(int64_t slot) const {
    PackedHead packed;
    float* next = base + slot * head_floats();
    auto take = [&](float** piece, int64_t floats) {
      if (floats > 0) *piece = next;
      next += floats;
    };
    take(&packed.key, key_floats);
    take(&packed.value, value_floats);
    take(&packed.side_key, side_key_floats);
    take(&packed.side_value, side_value_floats);
    return packed;
  }

 private:
  static int64_t room(const PackCut& cut, int64_t rows, int32_t columns) {
    return round_up(rows * cut.row_floats(columns), 16);
  }
};

/// Keys or values of one head, by axis.
class HeadRows {
 public:
  HeadRows(const Pattern& pattern, const PackCut& cut, int32_t head_dim, const Rows& source,
           const float* main, const float* side)
      : pattern_(pattern),
        cut_(cut),
        head_dim_(head_dim),
        source_(source),
        main_(main),
        side_(side) {}

  /// Rows from element `first` of the axis on. Scattered global tokens that are not packed are one
  /// row at a time. Packed bfloat16 is no rows: those are the caller's then.
  Rows at(Axis axis, const Slice& slice, int32_t first) const {
    if (in_main(axis)) {
      if (main_ == nullptr || cut_.bfloat) {
        return strided(source_, slice.keys.at(first), slice.keys.step);
      }
      return packed(main_, slice.keys.offset * cut_.class_rows + first);
    }
    if (side_ != nullptr) return packed(side_, first);
    if (axis == Axis::kLead)
      return strided(source_, slice.lead.view.at(first), slice.lead.view.step);
    return strided(source_, pattern_.global_tiles[first], 1);
  }

  bool has_panels(Axis axis) const { return (in_main(axis) ? main_ : side_) != nullptr; }

  /// The packed panel that holds element `first` of the axis, and its place there.
  const float* panel(Axis axis, const Slice& slice, int32_t first, int32_t* place) const {
    int64_t row = packed_row(axis, slice, first);
    *place = static_cast<int32_t>(row % kPanelKeys);
    return (in_main(axis) ? main_ : side_) + (row - *place) * cut_.row_floats(head_dim_);
  }

  /// The packed pair of bfloat16 rows that holds element `first` of the axis, and its place there.
  const uint16_t* pair(Axis axis, const Slice& slice, int32_t first, int32_t* place) const {
    int64_t row = packed_row(axis, slice, first);
    *place = static_cast<int32_t>(row % 2);
    return reinterpret_cast<const uint16_t*>((in_main(axis) ? main_ : side_) +
                                             (row - *place) * cut_.row_floats(head_dim_));
  }

 private:
  bool in_main(Axis axis) const {
    return axis == Axis::kMain || (axis == Axis::kLead && pattern_.shared_axis());
  }
  int64_t packed_row(Axis axis, const Slice& slice, int32_t first) const {
    return in_main(axis) ? slice.keys.offset * cut_.class_rows + first : first;
  }
  Rows packed(const float* rows, int64_t first) const {
    return {rows + first * head_dim_, head_dim_, Element::kFloat32};
  }
  const Pattern& pattern_;
  const PackCut& cut_;
  int32_t head_dim_;
  Rows source_;
  const float* main_;
  const float* side_;
};

/// Packing of one key head in units of kPackRows rows that threads share out.
class Packer {
 public:
  static constexpr int64_t kPackRows = 256;

  Packer(const AttentionParams& params, const Pattern& pattern, const PackCut& cut)
      : params_(params), pattern_(pattern), cut_(cut) {}

  int64_t units() const {
    if (cut_.main_rows == 0) return 0;
    return (cut_.key || cut_.value ? main_units() : 0) + side_units();
  }

  void pack(const VectorMath& math, const PackedHead& target, int32_t batch, int32_t head,
            int64_t unit) const {
    Rows key = rows_of(params_.keys.key, params_.problem.dtype, batch, head);
    Rows value = rows_of(params_.keys.value, params_.problem.dtype, batch, head);
    int64_t in_main = cut_.key || cut_.value ? main_units() : 0;
    const Target keys = {cut_.bfloat   ? Form::kBfloatPanels
                         : cut_.panels ? Form::kPanels
                                       : Form::kRows,
                         params_.problem.head_dim};
    const Target values = {cut_.bfloat ? Form::kBfloatPairs : Form::kRows,
                           params_.problem.value_dim};
    if (unit < in_main) {
      Interval reached = reached_keys(batch);
      pack_main(math, keys, key, target.key, unit, reached);
      pack_main(math, values, value, target.value, unit, reached);
    } else {
      const Sequence sequence = params_.sequences.of(batch);
      const View lead = make_lead(pattern_, sequence.origin, sequence.keys).view;
      pack_side(math, keys, key, lead, target.side_key, unit - in_main);
      pack_side(math, values, value, lead, target.side_value, unit - in_main);
    }
  }

 private:
  /// What packed rows are, and their elements.
  struct Target {
    Form form;
    int32_t columns;
  };

  int64_t main_units() const { return (cut_.main_rows + kPackRows - 1) / kPackRows; }
  int64_t side_units() const { return (cut_.side_rows + kPackRows - 1) / kPackRows; }

  /// The keys that the windows of the batch entry's rows reach; all where some row sees others.
  Interval reached_keys(int32_t batch) const {
    if (!params_.features.within(kWindowsAlone)) return {0, params_.problem.seq_kv};
    const int32_t wider = cut_.panels ? 0 : 16;  // tiles for BLAS, whole multiples of 16 keys
    const int32_t offset = params_.sequences.offset(batch);
    return sparse_attn::reached_keys(pattern_, {offset, offset + params_.problem.seq_q},
                                     params_.problem.seq_kv, wider);
  }

  /// Rows of the unit that are reached, class after class; the last rows of a class may be padding.
  void pack_main(const VectorMath& math, Target as, const Rows& source, float* target, int64_t unit,
                 Interval reached) const {
    if (target == nullptr) return;
    int64_t end = (unit + 1) * kPackRows < cut_.main_rows ? (unit + 1) * kPackRows : cut_.main_rows;
    for (int64_t row = unit * kPackRows; row < end;) {
      int32_t residue = static_cast<int32_t>(row / cut_.class_rows);
      int32_t first = static_cast<int32_t>(row % cut_.class_rows);
      View view = residue_class(residue, pattern_.dilation, params_.problem.seq_kv);
      int64_t in_class = cut_.class_rows - first < end - row ? cut_.class_rows - first : end - row;
      Interval wanted = view.inside(reached);
      if (as.form != Form::kRows) wanted.begin = wanted.begin / kPanelKeys * kPanelKeys;
      wanted = intersect(wanted, {first, first + static_cast<int32_t>(in_class)});
      if (as.form != Form::kRows) {
        wanted.end = imin(view.length, ceil_div(wanted.end, kPanelKeys) * kPanelKeys);
      }
      if (!wanted.empty()) {
        int64_t place = row + wanted.begin - first;
        copy_as(as.form, math, strided(source, view.at(wanted.begin), view.step), wanted.size(),
                as.columns, target + place * cut_.row_floats(as.columns));
      }
      row += in_class;
    }
  }

  /// Leading keys or global tokens, 16 at a time.
  void pack_side(const VectorMath& math, Target as, const Rows& source, const View& lead,
                 float* target, int64_t unit) const {
    alignas(64) char gathered[kPanelKeys * kMaxHeadDim * sizeof(float)];
    bool globals = pattern_.num_global_tiles != nullptr;
    int64_t bytes = int64_t{as.columns} * size_of(params_.problem.dtype);
    int64_t rows = globals ? *pattern_.num_global_tiles : lead.length;
    int64_t end = (unit + 1) * kPackRows < rows ? (unit + 1) * kPackRows : rows;
    for (int64_t row = unit * kPackRows; row < end; row += kPanelKeys) {
      int64_t count = end - row < kPanelKeys ? end - row : kPanelKeys;
      for (int64_t i = 0; i < count; ++i) {
        int32_t u = static_cast<int32_t>(row + i);
        int32_t key = globals ? pattern_.global_tiles[u] : lead.at(u);
        std::memcpy(gathered + i * bytes, strided(source, key, 1).data, bytes);
      }
      copy_as(as.form, math, {gathered, as.columns, source.element}, count, as.columns,
              target + row * cut_.row_floats(as.columns));
    }
  }

  const AttentionParams& params_;
  const Pattern& pattern_;
  const PackCut& cut_;
};

}  // namespace sparse_attn::cpu
