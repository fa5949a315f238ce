// A sketch of keys: every key in 2 or 4 bits a channel. Over a group of tokens each channel has its
// least and greatest value, and a token's code is round((k - least) / (greatest - least) * levels)
// (docs/design.md, "Key sketch"). Plain data, read on the host and on the device.
#pragma once

#include <cmath>

#include "params.h"

namespace sparse_attn {

constexpr int32_t kSketchGroup = 64;     // tokens of a group; fewer where pages are smaller
constexpr int32_t kSketchChannels = 64;  // a token's row of codes has a multiple of them

/// Where the codes and ranges lie: entries are batch entries, or pages.
struct SketchView {
  uint32_t* codes = nullptr;  // [entries, Hkv, rows, row_words()]
  void* ranges = nullptr;     // [entries, Hkv, rows / group, 2, D], of the keys' type: least first
  // [B], tokens held; of pages [entries, rows / group], those of a group from its start; null: all.
  const int32_t* lengths = nullptr;
  bool paged = false;  // entries are pages
  int32_t bits = 2;
  int32_t rows = 0;  // tokens of an entry, a multiple of the group
  int32_t group = kSketchGroup;
  int32_t heads = 0, head_dim = 0;

  SPARSE_ATTN_HD constexpr bool present() const { return codes != nullptr; }
  SPARSE_ATTN_HD constexpr int32_t levels() const { return (1 << bits) - 1; }
  SPARSE_ATTN_HD constexpr int32_t codes_of_word() const { return 32 / bits; }
  SPARSE_ATTN_HD constexpr int32_t row_words() const {
    return ceil_div(head_dim, kSketchChannels) * kSketchChannels / codes_of_word();
  }
  /// The bit of a word at which its code `i` begins. Neighbours lie in different halves, so that a
  /// mask makes a pair of 16-bit numbers.
  SPARSE_ATTN_HD constexpr int32_t bit_of(int32_t i) const { return i / 2 * bits + i % 2 * 16; }

  /// How many of a batch entry's first `keys` tokens may be held; all of these are, unless entries
  /// are pages.
  SPARSE_ATTN_HD int32_t held(int64_t b, int32_t keys) const {
    return lengths == nullptr || paged ? keys : imax(0, imin(lengths[b], imin(keys, rows)));
  }
  /// Where the group of key j ends, of keys before `end`.
  SPARSE_ATTN_HD constexpr int32_t end_of_group(int32_t j, int32_t end) const {
    return imin((j / group + 1) * group, end);
  }
  /// Where the length of a page's group stands, that of token `row`.
  SPARSE_ATTN_HD int64_t length_at(int64_t page, int32_t row) const {
    return page * (rows / group) + row / group;
  }
  /// A token's codes, and the ranges of its group, in elements.
  SPARSE_ATTN_HD int64_t codes_at(int64_t entry, int64_t head, int32_t row) const {
    return ((entry * heads + head) * rows + row) * row_words();
  }
  SPARSE_ATTN_HD int64_t ranges_at(int64_t entry, int64_t head, int32_t row) const {
    return ((entry * heads + head) * (rows / group) + row / group) * 2 * head_dim;
  }
  /// The code of an element; 0 where the range is empty or the element is no number.
  SPARSE_ATTN_HD uint32_t code(float x, float least, float greatest) const {
    const float level = (x - least) / (greatest - least) * static_cast<float>(levels());
    if (!(level > 0.0f)) return 0;
    return level < static_cast<float>(levels()) ? static_cast<uint32_t>(rintf(level)) : levels();
  }
  /// What a code stands for, or the mean of several.
  SPARSE_ATTN_HD float number(float code, float least, float greatest) const {
    return least + code * ((greatest - least) / static_cast<float>(levels()));
  }
};

/// New keys after those that a sketch holds. The tokens of its last group that is not full are
/// kept as they are, so that its ranges follow from all of them whenever it grows.
struct SketchAppendParams {
  SketchView sketch;
  TensorView key;              // [B, Hkv, tokens, D]
  void* open_keys = nullptr;   // [B, Hkv, kSketchGroup, D], of the last group
  int32_t* lengths = nullptr;  // [B], which grow
  int32_t batch = 0, tokens = 0;
  Dtype dtype = Dtype::kFloat32;
  void* stream = nullptr;
  int32_t device = 0;

  /// Tokens of a batch entry before and after the call.
  SPARSE_ATTN_HD Interval added(int64_t b) const {
    const int32_t held = sketch.held(b, sketch.rows);
    return {held, held + imin(tokens, sketch.rows - held)};
  }
};

/// The groups of a paged cache that hold the slots are sketched again, from their first row to the
/// greatest of the slots.
struct SketchPagesParams {
  SketchView sketch;           // an entry is a page
  int32_t* lengths = nullptr;  // of its groups, that are written
  TensorView cache;            // [pages, Hkv, page_size, D], of `dtype` or float8
  bool float8 = false;
  ScaleView scale;                 // of float8, [Hkv]
  const int64_t* slots = nullptr;  // [num_slots]; those outside the cache stand for nothing
  int64_t num_slots = 0, pages = 0;
  Dtype dtype = Dtype::kFloat32;  // of the ranges
  void* stream = nullptr;
  int32_t device = 0;

  SPARSE_ATTN_HD bool exists(int64_t slot) const { return slot >= 0 && slot < pages * sketch.rows; }
  /// Whether slot `at` of the list says where its group ends: none of that group is greater, and
  /// none before it in the list is equal.
  SPARSE_ATTN_HD bool ends_group_beside(int64_t at, int64_t other) const {
    const int64_t end = (slots[at] / sketch.group + 1) * sketch.group;
    if (slots[other] == slots[at]) return other >= at;
    return slots[other] < slots[at] || slots[other] >= end;
  }
};

}  // namespace sparse_attn
