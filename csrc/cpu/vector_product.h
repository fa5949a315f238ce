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
constexpr bool kHasPanels = kLanes >= 8;
constexpr int32_t kSumLength = 32;  // elements summed one after the other, then added to the rest

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

template <int kCount>
struct RowCount {
  static constexpr int kRows = kCount;
};

/// Calls f with the number of rows as a constant.
template <int kRows = kGroupRows, class F>
inline void with_rows(int32_t rows, const F& f) {
  if (rows == kRows) {
    f(RowCount<kRows>());
  } else if constexpr (kRows > 1) {
    with_rows<kRows - 1>(rows, f);
  }
}

void panel_scores(const float* query, int32_t rows, int32_t head_dim, const float* panels,
                  int32_t num_panels, float* scores, int64_t stride) {
  with_rows(rows, [&](auto count) {
    constexpr int kRows = decltype(count)::kRows;
    for (int32_t panel = 0; panel < num_panels; ++panel) {
      const float* keys = panels + int64_t{panel} * kPanelKeys * head_dim;
      float* target = scores + panel * kPanelKeys;
      for (int32_t begin = 0; begin < head_dim; begin += kSumLength) {
        Floats sum[kRows][kPanelVectors] = {};
        int32_t end = begin + kSumLength < head_dim ? begin + kSumLength : head_dim;
        for (int32_t d = begin; d < end; ++d) {
          Floats key[kPanelVectors];
          for (int k = 0; k < kPanelVectors; ++k) {
            key[k] = load<Floats>(keys + d * kPanelKeys + k * kLanes);
          }
          for (int row = 0; row < kRows; ++row) {
            Floats x = broadcast(query[row * head_dim + d]);
            for (int k = 0; k < kPanelVectors; ++k) sum[row][k] += x * key[k];
          }
        }
        for (int row = 0; row < kRows; ++row) {
          for (int k = 0; k < kPanelVectors; ++k) {
            float* score = target + row * stride + k * kLanes;
            store(score, begin == 0 ? sum[row][k] : sum[row][k] + load<Floats>(score));
          }
        }
      }
    }
  });
}

void panel_values(const float* weights, int64_t stride, int32_t rows, const ValueRun* runs,
                  int32_t num_runs, int64_t value_stride, int32_t head_dim, float* out) {
  with_rows(rows, [&](auto count) {
    constexpr int kRows = decltype(count)::kRows;
    for (int32_t d = 0; d < head_dim; d += kPanelKeys) {
      Floats sum[kRows][kPanelVectors];
      for (int row = 0; row < kRows; ++row) {
        for (int k = 0; k < kPanelVectors; ++k) {
          sum[row][k] = load<Floats>(out + row * head_dim + d + k * kLanes);
        }
      }
      const float* weight = weights;
      for (int32_t run = 0; run < num_runs; ++run) {
        const float* values = runs[run].values + d;
        for (int32_t i = 0; i < runs[run].count; ++i, ++weight, values += value_stride) {
          Floats value[kPanelVectors];
          for (int k = 0; k < kPanelVectors; ++k) value[k] = load<Floats>(values + k * kLanes);
          for (int row = 0; row < kRows; ++row) {
            Floats x = broadcast(weight[row * stride]);
            for (int k = 0; k < kPanelVectors; ++k) sum[row][k] += x * value[k];
          }
        }
      }
      for (int row = 0; row < kRows; ++row) {
        for (int k = 0; k < kPanelVectors; ++k) {
          store(out + row * head_dim + d + k * kLanes, sum[row][k]);
        }
      }
    }
  });
}

}  // namespace
}  // namespace sparse_attn::cpu::SPARSE_ATTN_ISA
