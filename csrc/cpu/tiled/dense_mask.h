// What joins the scores of a row in a chunk's columns, as float32 terms: attn_mask (0 and -inf from
// a bool mask) and ALiBi's slopes. A mask that is one row for all queries is read once per chunk.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/tiled/visible.h"
#include "part.h"

namespace sparse_attn::cpu {

class DenseMask {
 public:
  /// `buffer` holds a chunk's columns.
  DenseMask(const AttentionParams& params, const Pattern& pattern, const VectorMath& math,
            float* buffer)
      : mask_(params.scores.mask),
        alibi_(params.scores.alibi),
        pattern_(pattern),
        math_(math),
        buffer_(buffer) {}

  bool present() const { return masks() || slopes(); }

  /// Forgets the row in the buffer; to be called before a new chunk.
  void begin_chunk() { loaded_ = nullptr; }

  /// The terms of the tile's row, [chunk.columns].
  const float* row(const Tile& tile, const Chunk& chunk, int32_t row) {
    if (lies_ready(tile, chunk)) return ready_row(tile, chunk, row);
    if (!masks()) std::fill_n(buffer_, chunk.columns, 0.0f);
    if (masks()) load_mask(tile, chunk, row);
    if (slopes()) {
      add_slopes(tile, chunk, row);
      loaded_ = nullptr;
    }
    return buffer_;
  }

  /// Begins to load a row's terms, which nothing else would: rows are far apart.
  void expect(const Tile& tile, const Chunk& chunk, int32_t row) const {
    if (row >= tile.size() || !lies_ready(tile, chunk)) return;
    const float* terms = ready_row(tile, chunk, row);
    for (int32_t column = 0; column < chunk.columns; column += 16) {
      __builtin_prefetch(terms + column);
    }
  }

  /// Whether one row serves the whole tile and hides every key of the chunk.
  bool hides_all(const Tile& tile, const Chunk& chunk) {
    if (!masks() || mask_.stride_q != 0 || (mask_.stride_h != 0 && tile.num_heads > 1)) {
      return false;
    }
    const float* terms = row(tile, chunk, 0);
    for (int32_t column = 0; column < chunk.columns; ++column) {
      if (terms[column] != kMinusInfinity) return false;
    }
    return true;
  }

 private:
  bool masks() const { return mask_.kind != MaskKind::kNone; }
  bool slopes() const { return alibi_.slopes != nullptr; }

  /// Elements of attn_mask before the row's.
  int64_t offset(const Tile& tile, int32_t row) const {
    return tile.batch * mask_.stride_b + tile.head_of(row) * mask_.stride_h +
           tile.query_of(row) * mask_.stride_q;
  }

  /// Whether the chunk's terms are float32 that lie together in attn_mask.
  bool lies_ready(const Tile& tile, const Chunk& chunk) const {
    return mask_.kind == MaskKind::kFloat32 && mask_.stride_k == 1 && !slopes() &&
           chunk.num_runs == 1 && chunk.axis == Axis::kMain && tile.slice.keys.step == 1;
  }

  const float* ready_row(const Tile& tile, const Chunk& chunk, int32_t row) const {
    return static_cast<const float*>(mask_.data) + offset(tile, row) +
           tile.slice.keys.at(chunk.runs[0].begin);
  }

  /// Loads the row of attn_mask to the buffer, unless it lies there.
  void load_mask(const Tile& tile, const Chunk& chunk, int32_t row) {
    const char* start = static_cast<const char*>(mask_.data) + offset(tile, row) * bytes();
    if (start == loaded_) return;
    loaded_ = start;
    float* target = buffer_;
    for (int32_t i = 0; i < chunk.num_runs; ++i) {
      load(tile.slice, chunk.axis, chunk.runs[i], start, target);
      target += chunk.runs[i].length;
    }
  }

  /// Adds -slope * |p - j| to the buffer.
  void add_slopes(const Tile& tile, const Chunk& chunk, int32_t row) {
    const int32_t position = tile.slice.position(tile.slice_row(row));
    float* target = buffer_;
    for (int32_t i = 0; i < chunk.num_runs; ++i) {
      for (int32_t x = 0; x < chunk.runs[i].length; ++x) {
        const int32_t key = key_of(tile.slice, chunk.axis, chunk.runs[i].begin + x);
        *target++ += alibi_.bias(tile.batch, tile.head_of(row), position, key);
      }
    }
  }

  int32_t key_of(const Slice& slice, Axis axis, int32_t element) const {
    if (axis == Axis::kGlobal) return pattern_.global_tiles[element];
    return axis == Axis::kLead ? slice.lead.view.at(element) : slice.keys.at(element);
  }

  int64_t bytes() const { return size_of(mask_.kind); }

  void load(const Slice& slice, Axis axis, const ChunkRun& run, const char* start, float* target) {
    if (axis == Axis::kGlobal) {
      for (int32_t i = 0; i < run.length; ++i) {
        copy(start + pattern_.global_tiles[run.begin + i] * mask_.stride_k * bytes(), 0, 1,
             target + i);
      }
      return;
    }
    bool lead = axis == Axis::kLead;
    int64_t first = lead ? slice.lead.view.at(run.begin) : slice.keys.at(run.begin);
    int64_t step = lead ? slice.lead.view.step : slice.keys.step;
    copy(start + first * mask_.stride_k * bytes(), step * mask_.stride_k, run.length, target);
  }

  void copy(const char* source, int64_t stride, int32_t count, float* target) {
    if (mask_.kind == MaskKind::kBool) {
      for (int32_t i = 0; i < count; ++i) target[i] = source[i * stride] ? 0.0f : kMinusInfinity;
      return;
    }
    Element element = mask_.kind == MaskKind::kFloat32   ? Element::kFloat32
                      : mask_.kind == MaskKind::kFloat16 ? Element::kFloat16
                                                         : Element::kBFloat16;
    if (stride == 1) {
      math_.to_float(element, source, target, count);
      return;
    }
    for (int32_t i = 0; i < count; ++i) {
      math_.to_float(element, source + i * stride * bytes(), target + i, 1);
    }
  }

  const MaskView& mask_;
  const AlibiView& alibi_;
  const Pattern& pattern_;
  const VectorMath& math_;
  float* buffer_;
  const char* loaded_ = nullptr;
};

}  // namespace sparse_attn::cpu
