// Products of a few query rows with keys and values for one instruction set, included by
// vector_math.cpp. Keys lie in panels of 16, transposed, so that a vector holds one element of
// several keys; values are read where they lie. Nothing is packed per product, as BLAS does, so
// that small tiles are as fast as large ones. A row's sums run in one order, whatever its group is.
#pragma once

#include "simd.h"
#include "vector_math.h"

namespace sparse_attn::cpu::SPARSE_ATTN_ISA {
namespace {

constexpr int kPanelVectors = kPanelKeys / kLanes;
constexpr int32_t kGroupRows = 12 / kPanelVectors;  // 12 sums leave registers for operands
constexpr bool kHasPanels = kLanes == 8;            // BLAS is faster with AVX-512, and without AVX2
// Products summed one after the other; then the sum joins the rest. It bounds the rounding errors.
constexpr int32_t kSumLength = 32;        // of scores
constexpr int32_t kValueSumLength = 256;  // of values

typedef float Four __attribute__((vector_size(16)));
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

/// Sums of a group of rows with the keys of a panel, or with 16 elements of values.
template <int kRows>
struct GroupSums {
  Floats sum[kRows][kPanelVectors] = {};

  void add_from(const float* source, int64_t stride) {
    for (int row = 0; row < kRows; ++row) {
      for (int k = 0; k < kPanelVectors; ++k) {
        sum[row][k] += load<Floats>(source + row * stride + k * kLanes);
      }
    }
  }
  void store_to(float* target, int64_t stride) const {
    for (int row = 0; row < kRows; ++row) {
      for (int k = 0; k < kPanelVectors; ++k) {
        store(target + row * stride + k * kLanes, sum[row][k]);
      }
    }
  }
  /// sum[row] += factors[row] * vectors, over `count` steps along both.
  void multiply(const float* factors, int64_t factor_stride, const float* vectors,
                int64_t vector_stride, int64_t count) {
    for (int64_t i = 0; i < count; ++i, vectors += vector_stride) {
      Floats vector[kPanelVectors];
      for (int k = 0; k < kPanelVectors; ++k) vector[k] = load<Floats>(vectors + k * kLanes);
      for (int row = 0; row < kRows; ++row) {
        Floats factor = broadcast(factors[row * factor_stride + i]);
        for (int k = 0; k < kPanelVectors; ++k) sum[row][k] += factor * vector[k];
      }
    }
  }
};

template <int kRows>
void panel_scores_of(const float* query, int64_t query_stride, int32_t head_dim,
                     const float* panels, int32_t num_panels, float* scores, int64_t stride) {
  for (int32_t panel = 0; panel < num_panels; ++panel) {
    for (int32_t d = 0; d < head_dim; d += kSumLength) {
      int32_t count = head_dim - d < kSumLength ? head_dim - d : kSumLength;
      GroupSums<kRows> sums;
      sums.multiply(query + d, query_stride, panels, kPanelKeys, count);
      if (d > 0) sums.add_from(scores, stride);
      sums.store_to(scores, stride);
      panels += count * kPanelKeys;
    }
    scores += kPanelKeys;
  }
}

template <int kRows>
void panel_values_of(const float* weights, int64_t stride, const ValueRun* runs, int32_t num_runs,
                     int64_t value_stride, int32_t head_dim, float* out) {
  for (int32_t d = 0; d < head_dim; d += kPanelKeys) {
    const float* weight = weights;
    for (int32_t run = 0, first = 0; run < num_runs;) {
      GroupSums<kRows> sums;
      for (int32_t room = kValueSumLength; run < num_runs && room > 0;) {
        int32_t left = runs[run].count - first, count = left < room ? left : room;
        sums.multiply(weight, stride, runs[run].values + first * value_stride + d, value_stride,
                      count);
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

template <int kRows = kGroupRows>
void panel_scores(const float* query, int64_t query_stride, int32_t rows, int32_t head_dim,
                  const float* panels, int32_t num_panels, float* scores, int64_t stride) {
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
