// Where the keys and values of a run lie: in the caller's tensors, or packed to contiguous float32
// rows. Packing makes a product's bits independent of the caller's strides and alignment, converts
// half precision once for all tiles of a head, and turns strided views into contiguous ones.
#pragma once

#include <cstdint>

#include "chunks.h"
#include "vector_math.h"

namespace sparse_attn::cpu {

inline Rows rows_of(const TensorView& view, Dtype dtype, int64_t batch, int64_t head) {
  const char* data = static_cast<const char*>(view.data);
  return {data + (batch * view.stride_b + head * view.stride_h) * size_of(dtype), view.stride_s,
          static_cast<Element>(dtype)};
}

/// Rows first, first + step, ... of `rows`.
inline Rows strided(const Rows& rows, int64_t first, int64_t step) {
  int64_t bytes = rows.element == Element::kFloat32 ? 4 : 2;
  return {static_cast<const char*>(rows.data) + first * rows.stride * bytes, rows.stride * step,
          rows.element};
}

/// Copies `count` rows to contiguous float32 rows.
inline void copy_rows(const VectorMath& math, const Rows& rows, int64_t count, int32_t head_dim,
                      float* target) {
  if (rows.stride == head_dim) {
    math.to_float(rows.element, rows.data, target, count * head_dim);
    return;
  }
  for (int64_t row = 0; row < count; ++row) {
    math.to_float(rows.element, strided(rows, row, 1).data, target + row * head_dim, head_dim);
  }
}

/// The packed rows of one key head; null where the caller's own are used.
struct PackedHead {
  float* key = nullptr;  // [main_rows, head_dim]
  float* value = nullptr;
  float* side_key = nullptr;  // [side_rows, head_dim]
  float* side_value = nullptr;
};

/// Space for the packed rows of `heads` heads.
struct PackedHeads {
  float* base = nullptr;
  int64_t main_floats = 0, side_floats = 0;
  bool has_key = false, has_value = false;

  PackedHeads(const PackCut& cut, int32_t head_dim)
      : main_floats(round_up(cut.main_rows * head_dim, 16)),
        side_floats(round_up(cut.side_rows * head_dim, 16)),
        has_key(cut.key),
        has_value(cut.value) {}
  int64_t head_floats() const { return (has_key + has_value) * main_floats + 2 * side_floats; }
  PackedHead head(int64_t slot) const {
    PackedHead packed;
    float* next = base + slot * head_floats();
    if (has_key) packed.key = next;
    next += has_key * main_floats;
    if (has_value) packed.value = next;
    next += has_value * main_floats;
    if (side_floats == 0) return packed;
    packed.side_key = next;
    packed.side_value = next + side_floats;
    return packed;
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
  /// row at a time.
  Rows at(Axis axis, const Slice& slice, int32_t first) const {
    bool shared = axis == Axis::kLead && pattern_.shared_axis();
    if (axis == Axis::kMain || shared) {
      if (main_ == nullptr) return strided(source_, slice.keys.at(first), slice.keys.step);
      return packed(main_, slice.keys.offset * cut_.class_rows + first);
    }
    if (side_ != nullptr) return packed(side_, first);
    if (axis == Axis::kLead) return strided(source_, pattern_.lead.at(first), pattern_.lead.step);
    return strided(source_, pattern_.global_tiles[first], 1);
  }

 private:
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
    Rows key = rows_of(params_.key, params_.dtype, batch, head);
    Rows value = rows_of(params_.value, params_.dtype, batch, head);
    int64_t in_main = cut_.key || cut_.value ? main_units() : 0;
    if (unit < in_main) {
      pack_main(math, key, target.key, unit);
      pack_main(math, value, target.value, unit);
    } else {
      pack_side(math, key, target.side_key, unit - in_main);
      pack_side(math, value, target.side_value, unit - in_main);
    }
  }

 private:
  int64_t main_units() const { return (cut_.main_rows + kPackRows - 1) / kPackRows; }
  int64_t side_units() const { return (cut_.side_rows + kPackRows - 1) / kPackRows; }

  /// Rows of the unit, class after class; the last row of a class may be padding.
  void pack_main(const VectorMath& math, const Rows& source, float* target, int64_t unit) const {
    if (target == nullptr) return;
    int64_t end = (unit + 1) * kPackRows < cut_.main_rows ? (unit + 1) * kPackRows : cut_.main_rows;
    for (int64_t row = unit * kPackRows; row < end;) {
      int32_t residue = static_cast<int32_t>(row / cut_.class_rows);
      int32_t first = static_cast<int32_t>(row % cut_.class_rows);
      View view = residue_class(residue, pattern_.dilation, params_.seq_kv);
      int64_t in_class = cut_.class_rows - first < end - row ? cut_.class_rows - first : end - row;
      int64_t count = view.length - first < in_class ? view.length - first : in_class;
      if (count > 0) {
        copy_rows(math, strided(source, view.at(first), view.step), count, params_.head_dim,
                  target + row * params_.head_dim);
      }
      row += in_class;
    }
  }

  void pack_side(const VectorMath& math, const Rows& source, float* target, int64_t unit) const {
    bool globals = pattern_.num_global_tiles != nullptr;
    int64_t rows = globals ? *pattern_.num_global_tiles : pattern_.lead.length;
    int64_t end = (unit + 1) * kPackRows < rows ? (unit + 1) * kPackRows : rows;
    for (int64_t row = unit * kPackRows; row < end; ++row) {
      int32_t u = static_cast<int32_t>(row);
      int32_t key = globals ? pattern_.global_tiles[u] : pattern_.lead.at(u);
      copy_rows(math, strided(source, key, 1), 1, params_.head_dim,
                target + row * params_.head_dim);
    }
  }

  const AttentionParams& params_;
  const Pattern& pattern_;
  const PackCut& cut_;
};

}  // namespace sparse_attn::cpu
