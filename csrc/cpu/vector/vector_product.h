// Products of a few query rows with keys and values for one instruction set, included by
// vector_math.cpp. Keys lie in panels of 16, transposed, so that a vector holds one element of
// several keys; values are read where they lie. Nothing is packed per product, as BLAS does, so
// that small tiles are as fast as large ones. A row's sums run in one order, whatever its group is.
#pragma once

#include "cpu/vector/simd.h"
#include "cpu/vector/vector_math.h"

namespace sparse_attn::cpu::SPARSE_ATTN_ISA {
namespace {

constexpr int kPanelVectors = kPanelKeys / kLanes;
// Sums of a group: 12 of 16 registers, or 24 of 32 for two panels at a time.
constexpr int kGroupVectors = kLanes == 16 ? 2 : kPanelVectors;
constexpr int32_t kGroupRows = kLanes == 16 ? 12 : 12 / kPanelVectors;
// BLAS is faster without AVX2, and with AVX-512 above this head dim unless rows are few.
constexpr int32_t kPanelHeadDim = kLanes == 16 ? 64 : 256;
constexpr bool kHasPanels = kLanes >= 8;
// Products summed one after the other; then the sum joins the rest. It bounds the rounding errors.
constexpr int32_t kSumLength = 32;        // of scores
constexpr int32_t kValueSumLength = 256;  // of values

typedef int32_t FourLanes __attribute__((vector_size(16)));

/// The transpose of 4 x 4 floats, `target_stride` apart.
inline void transpose_four(const float* source, int64_t stride, float* target,
                           int64_t target_stride) {
  Four a = load<Four>(source), b = load<Four>(source + stride);
  Four c = load<Four>(source + 2 * stride), d = load<Four>(source + 3 * stride);
  Four ab_low = __builtin_shuffle(a, b, FourLanes{0, 4, 1, 5});
  Four ab_high = __builtin_shuffle(a, b, FourLanes{2, 6, 3, 7});
  Four cd_low = __builtin_shuffle(c, d, FourLanes{0, 4, 1, 5});
  Four cd_high = __builtin_shuffle(c, d, FourLanes{2, 6, 3, 7});
  store(target, __builtin_shuffle(ab_low, cd_low, FourLanes{0, 1, 4, 5}));
  store(target + target_stride, __builtin_shuffle(ab_low, cd_low, FourLanes{2, 3, 6, 7}));
  store(target + 2 * target_stride, __builtin_shuffle(ab_high, cd_high, FourLanes{0, 1, 4, 5}));
  store(target + 3 * target_stride, __builtin_shuffle(ab_high, cd_high, FourLanes{2, 3, 6, 7}));
}

void pack_panel(const float* keys, int64_t stride, int32_t head_dim, float* panel) {
  for (int32_t key = 0; key < kPanelKeys; key += 4) {
    for (int32_t d = 0; d < head_dim; d += 4) {
      transpose_four(keys + key * stride + d, stride, panel + d * kPanelKeys + key, kPanelKeys);
    }
  }
}

/// Sums of a group of rows with the keys of panels, or with elements of values.
template <int kRows, int kVectors>
struct GroupSums {
  Floats sum[kRows][kVectors] = {};

  void add_from(const float* source, int64_t stride) {
    for (int row = 0; row < kRows; ++row) {
      for (int k = 0; k < kVectors; ++k) {
        sum[row][k] += load<Floats>(source + row * stride + k * kLanes);
      }
    }
  }
  void store_to(float* target, int64_t stride) const {
    for (int row = 0; row < kRows; ++row) {
      for (int k = 0; k < kVectors; ++k) {
        store(target + row * stride + k * kLanes, sum[row][k]);
      }
    }
  }
  /// sum[row] += factors[row] * vectors, over `count` steps along both; the vectors of a step are
  /// `gap` apart.
  void multiply(const float* factors, int64_t factor_stride, const float* vectors, int64_t gap,
                int64_t vector_stride, int64_t count) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < count; ++i, vectors += vector_stride) {
      Floats vector[kVectors];
      for (int k = 0; k < kVectors; ++k) vector[k] = load<Floats>(vectors + k * gap);
      for (int row = 0; row < kRows; ++row) {
        Floats factor = broadcast(factors[row * factor_stride + i]);
        for (int k = 0; k < kVectors; ++k) sum[row][k] += factor * vector[k];
      }
    }
  }
};

/// Scores with the keys of panels, kVectors vectors at a time.
template <int kRows, int kVectors>
void panel_scores_by(const float* query, int64_t query_stride, int32_t head_dim,
                     const float* const* panels, int32_t num_panels, float* scores,
                     int64_t stride) {
  constexpr int32_t kKeys = kVectors * kLanes, kStep = kKeys / kPanelKeys;
  for (int32_t i = 0; i < num_panels; i += kStep, scores += kKeys) {
    const float* panel = panels[i];
    int64_t gap = kPanelVectors > 1 ? kLanes : panels[i + kStep - 1] - panel;
    for (int32_t d = 0; d < head_dim; d += kSumLength) {
      int32_t count = head_dim - d < kSumLength ? head_dim - d : kSumLength;
      GroupSums<kRows, kVectors> sums;
      sums.multiply(query + d, query_stride, panel + d * kPanelKeys, gap, kPanelKeys, count);
      if (d > 0) sums.add_from(scores, stride);
      sums.store_to(scores, stride);
    }
  }
}

template <int kRows>
void panel_scores_of(const float* query, int64_t query_stride, int32_t head_dim,
                     const float* const* panels, int32_t num_panels, float* scores,
                     int64_t stride) {
  int32_t rest = num_panels % (kGroupVectors / kPanelVectors), most = num_panels - rest;
  panel_scores_by<kRows, kGroupVectors>(query, query_stride, head_dim, panels, most, scores,
                                        stride);
  if (rest == 0) return;
  panel_scores_by<kRows, kPanelVectors>(query, query_stride, head_dim, panels + most, rest,
                                        scores + most * kPanelKeys, stride);
}

/// Elements [begin, end) of the sums over the runs, kVectors vectors at a time.
template <int kRows, int kVectors>
void panel_values_by(const float* weights, int64_t stride, const ValueRun* runs, int32_t num_runs,
                     int64_t value_stride, int32_t begin, int32_t end, int32_t head_dim,
                     float* out) {
  for (int32_t d = begin; d < end; d += kVectors * kLanes) {
    const float* weight = weights;
    for (int32_t run = 0, first = 0; run < num_runs;) {
      GroupSums<kRows, kVectors> sums;
      for (int32_t room = kValueSumLength; run < num_runs && room > 0;) {
        int32_t left = runs[run].count - first, count = left < room ? left : room;
        sums.multiply(weight, stride, runs[run].values + first * value_stride + d, kLanes,
                      value_stride, count);
        weight += count;
        room -= count;
        first = count < left ? first + count : 0;
        run += count == left;
      }
      sums.add_from(out + d, head_dim);
      sums.store_to(out + d, head_dim);
    }
  }
}

template <int kRows>
void panel_values_of(const float* weights, int64_t stride, const ValueRun* runs, int32_t num_runs,
                     int64_t value_stride, int32_t head_dim, float* out) {
  int32_t most = head_dim / (kGroupVectors * kLanes) * (kGroupVectors * kLanes);
  panel_values_by<kRows, kGroupVectors>(weights, stride, runs, num_runs, value_stride, 0, most,
                                        head_dim, out);
  if (most == head_dim) return;
  panel_values_by<kRows, kPanelVectors>(weights, stride, runs, num_runs, value_stride, most,
                                        head_dim, head_dim, out);
}

template <int kRows = kGroupRows>
void panel_scores(const float* query, int64_t query_stride, int32_t rows, int32_t head_dim,
                  const float* const* panels, int32_t num_panels, float* scores, int64_t stride) {
  if (rows == kRows) {
    panel_scores_of<kRows>(query, query_stride, head_dim, panels, num_panels, scores, stride);
  } else if constexpr (kRows > 1) {
    panel_scores<kRows - 1>(query, query_stride, rows, head_dim, panels, num_panels, scores,
                            stride);
  }
}

template <int kRows = kGroupRows>
void panel_values(const float* weights, int64_t stride, int32_t rows, const ValueRun* runs,
                  int32_t num_runs, int64_t value_stride, int32_t head_dim, float* out) {
  if (rows == kRows) {
    panel_values_of<kRows>(weights, stride, runs, num_runs, value_stride, head_dim, out);
  } else if constexpr (kRows > 1) {
    panel_values<kRows - 1>(weights, stride, rows, runs, num_runs, value_stride, head_dim, out);
  }
}

}  // namespace
}  // namespace sparse_attn::cpu::SPARSE_ATTN_ISA
