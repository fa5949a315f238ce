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
// BLAS is faster without AVX2.
constexpr bool kHasPanels = kLanes >= 8;
// Products summed one after the other; then the sum joins the rest. It bounds the rounding errors.
constexpr int32_t kSumLength = 32;        // of scores
constexpr int32_t kValueSumLength = 256;  // of values
constexpr int64_t kExpectedSteps = 8;     // of a product that begin to load before it

/// Four elements each of every fourth key.
inline Floats parts_of_keys(const float* keys, [[maybe_unused]] int64_t stride) {
#if defined(__AVX512F__)
  __m512 x = _mm512_zextps128_ps512(_mm_loadu_ps(keys));
  x = _mm512_maskz_insertf32x4(-1, x, _mm_loadu_ps(keys + 4 * stride), 1);
  x = _mm512_maskz_insertf32x4(-1, x, _mm_loadu_ps(keys + 8 * stride), 2);
  return Floats(_mm512_maskz_insertf32x4(-1, x, _mm_loadu_ps(keys + 12 * stride), 3));
#elif defined(__AVX2__)
  return Floats(_mm256_set_m128(_mm_loadu_ps(keys + 4 * stride), _mm_loadu_ps(keys)));
#else
  return load<Floats>(keys);
#endif
}

void pack_panel(const float* keys, int64_t stride, int32_t head_dim, float* panel) {
  for (int32_t key = 0; key < kPanelKeys; key += kLanes) {
    for (int32_t d = 0; d < head_dim; d += 4) {
      const float* first = keys + key * stride + d;
      Floats a = parts_of_keys(first, stride), b = parts_of_keys(first + stride, stride);
      Floats c = parts_of_keys(first + 2 * stride, stride);
      Floats e = parts_of_keys(first + 3 * stride, stride);
      Floats ab_low = pick(a, b, 0, 4, 1, 5), ab_high = pick(a, b, 2, 6, 3, 7);
      Floats ce_low = pick(c, e, 0, 4, 1, 5), ce_high = pick(c, e, 2, 6, 3, 7);
      float* target = panel + d * kPanelKeys + key;
      store(target, pick(ab_low, ce_low, 0, 1, 4, 5));
      store(target + kPanelKeys, pick(ab_low, ce_low, 2, 3, 6, 7));
      store(target + 2 * kPanelKeys, pick(ab_high, ce_high, 0, 1, 4, 5));
      store(target + 3 * kPanelKeys, pick(ab_high, ce_high, 2, 3, 6, 7));
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
  /// Begins to load the first vectors of a product to come; the processor foresees the others.
  static void expect(const float* vectors, int64_t gap, int64_t vector_stride, int64_t count) {
    for (int64_t i = 0; i < count && i < kExpectedSteps; ++i, vectors += vector_stride) {
      for (int k = 0; k < kVectors; ++k) __builtin_prefetch(vectors + k * gap);
    }
  }
};

/// Scores with the keys of panels, kVectors vectors at a time.
template <int kRows, int kVectors>
void panel_scores_by(const float* query, int64_t query_stride, int32_t head_dim,
                     const float* const* panels, int32_t num_panels, float* scores,
                     int64_t stride) {
  constexpr int32_t kKeys = kVectors * kLanes, kStep = kKeys / kPanelKeys;
  auto gap_of = [&](int32_t i) {
    return kPanelVectors > 1 ? kLanes : panels[i + kStep - 1] - panels[i];
  };
  for (int32_t i = 0; i < num_panels; i += kStep, scores += kKeys) {
    const float* panel = panels[i];
    const int64_t gap = gap_of(i);
    if (const int32_t next = i + kStep; next < num_panels) {
      GroupSums<kRows, kVectors>::expect(panels[next], gap_of(next), kPanelKeys, head_dim);
    }
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

/// Adds to the elements from d on the sums over the runs, kVectors vectors of them. Of those the
/// first `known` have been added before.
template <int kRows, int kVectors>
void add_values(const float* weights, int64_t stride, const ValueRun* runs, int32_t num_runs,
                int64_t value_stride, int32_t d, int32_t known, int32_t head_dim, float* out) {
  for (int32_t run = 0, first = 0; run < num_runs;) {
    GroupSums<kRows, kVectors> sums;
    for (int32_t room = kValueSumLength; run < num_runs && room > 0;) {
      int32_t left = runs[run].count - first, count = left < room ? left : room;
      if (count == left && run + 1 < num_runs) {
        const ValueRun& next = runs[run + 1];
        GroupSums<kRows, kVectors>::expect(next.values + d, kLanes, value_stride, next.count);
      }
      sums.multiply(weights, stride, runs[run].values + first * value_stride + d, kLanes,
                    value_stride, count);
      weights += count;
      room -= count;
      first = count < left ? first + count : 0;
      run += count == left;
    }
    if (known == 0) {
      sums.add_from(out + d, head_dim);
      sums.store_to(out + d, head_dim);
    } else {
      float rows[kRows][kVectors * kLanes];
      sums.store_to(rows[0], kVectors * kLanes);
      for (int row = 0; row < kRows; ++row) {
        float* own = out + row * head_dim + d;
        for (int32_t i = known; i < kVectors * kLanes; ++i) own[i] += rows[row][i];
      }
    }
  }
}

template <int kRows>
void panel_values_of(const float* weights, int64_t stride, const ValueRun* runs, int32_t num_runs,
                     int64_t value_stride, int32_t head_dim, float* out) {
  constexpr int32_t kGroup = kGroupVectors * kLanes, kPanel = kPanelVectors * kLanes;
  int32_t d = 0;
  for (; d + kGroup <= head_dim; d += kGroup) {
    add_values<kRows, kGroupVectors>(weights, stride, runs, num_runs, value_stride, d, 0, head_dim,
                                     out);
  }
  for (; d + kPanel <= head_dim; d += kPanel) {
    add_values<kRows, kPanelVectors>(weights, stride, runs, num_runs, value_stride, d, 0, head_dim,
                                     out);
  }
  if (d == head_dim) return;
  // The last 8 elements, with 8 of those before them: a row of values has no more.
  add_values<kRows, kPanelVectors>(weights, stride, runs, num_runs, value_stride, head_dim - kPanel,
                                   d - (head_dim - kPanel), head_dim, out);
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
