// Products of query rows, one by one or a few at a time, with keys and values where they lie, of
// any element type, for one instruction set; included by vector_math.cpp. What is loaded and
// converted serves all rows of a step, and a row's sums run in one order, whatever rows share the
// step.
#pragma once

#include <type_traits>

#include "cpu/vector/simd.h"
#include "cpu/vector/vector_math.h"

namespace sparse_attn::cpu::SPARSE_ATTN_ISA {
namespace {

constexpr int kRowsAtOnce = kLanes == 16 ? 4 : 2;    // whose sums the registers hold
constexpr int kKeys = 4;                             // that a step of scores takes
constexpr int kAhead = 16;                           // keys that begin to load before they count
constexpr int kValueVectors = kLanes == 16 ? 4 : 2;  // that a step of values takes

/// Elements of type `kElement`, read as float vectors.
template <Element kElement>
struct ElementLoader {
  static constexpr int kBytes = kElement == Element::kFloat32 ? 4 : 2;
  static const char* at(const void* data, int64_t i) {
    return static_cast<const char*>(data) + i * kBytes;
  }
  static Floats full(const void* data, int64_t i) {
    if constexpr (kElement == Element::kFloat32) return load<Floats>(at(data, i));
    if constexpr (kElement != Element::kFloat32) return widen(load<Halves>(at(data, i)));
  }
  /// `count` elements, then zeros.
  static Floats part(const void* data, int64_t i, int64_t count) {
    if constexpr (kElement == Element::kFloat32) return load_first<Floats>(at(data, i), count);
    if constexpr (kElement != Element::kFloat32)
      return widen(load_first<Halves>(at(data, i), count));
  }

 private:
  static Floats widen(Halves x) {
    return kElement == Element::kFloat16 ? float_of_float16(x) : float_of_bfloat16(x);
  }
};

/// Calls `f` with the loader of the element type.
template <class F>
void with_loader(Element element, const F& f) {
  if (element == Element::kFloat32) f(ElementLoader<Element::kFloat32>());
  if (element == Element::kFloat16) f(ElementLoader<Element::kFloat16>());
  if (element == Element::kBFloat16) f(ElementLoader<Element::kBFloat16>());
}

/// Stores the first `count` elements.
template <class Element, class Vector>
inline void store_part(Element* target, Vector x, int64_t count) {
  if (count == kLanes) {
    store(target, x);
  } else {
    __builtin_memcpy(target, &x, count * sizeof(Element));
  }
}

/// Sums of kRows queries with kKeys keys, by lanes.
template <int kRows>
struct KeySums {
  Floats sum[kRows][kKeys];

  KeySums() {
    for (int row = 0; row < kRows; ++row) {
      for (int k = 0; k < kKeys; ++k) sum[row][k] = Floats{};
    }
  }
  void add(const Floats (&query)[kRows], const Floats (&key)[kKeys]) {
    for (int row = 0; row < kRows; ++row) {
      for (int k = 0; k < kKeys; ++k) sum[row][k] += query[row] * key[k];
    }
  }
  void store_to(float* scores, int64_t stride, int64_t count) const {
    for (int row = 0; row < kRows; ++row) {
      const Four all = sums_of_lanes(sum[row][0], sum[row][1], sum[row][2], sum[row][3]);
      if (count == kKeys) {
        store(scores + row * stride, all);
      } else {
        __builtin_memcpy(scores + row * stride, &all, count * sizeof(float));
      }
    }
  }
};

/// Begins to load bytes.
inline void prefetch(const char* first, int32_t bytes) {
  constexpr int32_t kLine = 64;
  for (int32_t i = 0; i < bytes; i += kLine) __builtin_prefetch(first + i);
}

template <int kRows, class RowLoader>
void row_scores_of(const float* query, int64_t query_stride, const Rows& keys, int64_t n,
                   int32_t head_dim, float* scores, int64_t stride, RowLoader loader) {
  for (int64_t j = 0; j < n; j += kKeys) {
    const int64_t count = n - j < kKeys ? n - j : kKeys;
    int64_t first[kKeys];  // the last key again where there are fewer
    for (int k = 0; k < kKeys; ++k) first[k] = (j + (k < count ? k : count - 1)) * keys.stride;
    // A single row keeps enough loads in flight without it.
    for (int64_t ahead = j + kAhead; kRows > 1 && ahead < j + kAhead + kKeys && ahead < n;
         ++ahead) {
      prefetch(loader.at(keys.data, ahead * keys.stride), head_dim * loader.kBytes);
    }
    KeySums<kRows> sums;
    Floats row[kRows], key[kKeys];
    int32_t d = 0;
    for (; d + kLanes <= head_dim; d += kLanes) {
      for (int k = 0; k < kKeys; ++k) key[k] = loader.full(keys.data, first[k] + d);
      for (int r = 0; r < kRows; ++r) row[r] = load<Floats>(query + r * query_stride + d);
      sums.add(row, key);
    }
    if (const int32_t rest = head_dim - d; rest > 0) {
      for (int k = 0; k < kKeys; ++k) key[k] = loader.part(keys.data, first[k] + d, rest);
      for (int r = 0; r < kRows; ++r)
        row[r] = load_first<Floats>(query + r * query_stride + d, rest);
      sums.add(row, key);
    }
    sums.store_to(scores + j, stride, count);
  }
}

/// Calls take(integral constant of rows, first row) for the rows from `row` on, kRows at a time and
/// then the rest at once.
template <int kRows = kRowsAtOnce, class Take>
void by_rows(int32_t rows, const Take& take, int32_t row = 0) {
  for (; row + kRows <= rows; row += kRows) take(std::integral_constant<int, kRows>(), row);
  if constexpr (kRows > 1) by_rows<kRows - 1>(rows, take, row);
}

void row_scores(const float* query, int64_t query_stride, int32_t rows, Rows keys, int64_t n,
                int32_t head_dim, float* scores, int64_t stride) {
  with_loader(keys.element, [&](auto loader) {
    by_rows(rows, [&](auto at_once, int32_t row) {
      row_scores_of<at_once()>(query + row * query_stride, query_stride, keys, n, head_dim,
                               scores + row * stride, stride, loader);
    });
  });
}

/// out[row, 0 to kVectors * kLanes) += sum over i of weights[row, i] * values[i], of elements that
/// begin at `offset`; of the one vector of a kRest as many elements as `count` says.
template <int kRows, int kVectors, bool kRest, class RowLoader>
void add_values(const float* weights, int64_t stride, int64_t n, const Rows& values, int64_t offset,
                int64_t count, int64_t out_stride, float* out, RowLoader loader) {
  static_assert(!kRest || kVectors == 1);
  Floats sums[kRows][kVectors];
  for (int row = 0; row < kRows; ++row) {
    for (int k = 0; k < kVectors; ++k) sums[row][k] = Floats{};
  }
  for (int64_t i = 0; i < n; ++i) {
    float weight[kRows];
    bool all = true, any = false;
    for (int row = 0; row < kRows; ++row) {
      weight[row] = weights[row * stride + i];
      all &= weight[row] != 0;
      any |= weight[row] != 0;
    }
    if (!any) continue;
    Floats value[kVectors];
    for (int k = 0; k < kVectors; ++k) {
      const int64_t first = i * values.stride + offset + k * kLanes;
      value[k] = kRest ? loader.part(values.data, first, count) : loader.full(values.data, first);
    }
    for (int row = 0; row < kRows; ++row) {
      if (!all && weight[row] == 0) continue;
      for (int k = 0; k < kVectors; ++k) sums[row][k] += weight[row] * value[k];
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int k = 0; k < kVectors; ++k) {
      float* target = out + row * out_stride + k * kLanes;
      if (kRest) {
        store_part(target, load_first<Floats>(target, count) + sums[row][k], count);
      } else {
        store(target, load<Floats>(target) + sums[row][k]);
      }
    }
  }
}

void row_values(const float* weights, int64_t stride, int32_t rows, Rows values, int64_t n,
                int32_t head_dim, float* out) {
  with_loader(values.element, [&](auto loader) {
    by_rows(rows, [&](auto at_once, int32_t row) {
      const float* weight = weights + row * stride;
      float* target = out + int64_t{row} * head_dim;
      int32_t d = 0;
      for (; d + kValueVectors * kLanes <= head_dim; d += kValueVectors * kLanes) {
        add_values<at_once(), kValueVectors, false>(weight, stride, n, values, d, 0, head_dim,
                                                    target + d, loader);
      }
      for (; d + kLanes <= head_dim; d += kLanes) {
        add_values<at_once(), 1, false>(weight, stride, n, values, d, 0, head_dim, target + d,
                                        loader);
      }
      if (d == head_dim) return;
      add_values<at_once(), 1, true>(weight, stride, n, values, d, head_dim - d, head_dim,
                                     target + d, loader);
    });
  });
}

/// out[0, kVectors * kLanes) += sum over i of weights[i] * values[columns[i]]
template <int kVectors, class RowLoader>
void accumulate_block(const float* weights, const int32_t* columns, int64_t n, const Rows& values,
                      int64_t offset, float* out, RowLoader loader) {
  Floats sum[kVectors] = {};
  for (int64_t i = 0; i < n; ++i) {
    if (weights[i] == 0) continue;
    int64_t first = columns[i] * values.stride + offset;
    for (int k = 0; k < kVectors; ++k) {
      sum[k] += weights[i] * loader.full(values.data, first + k * kLanes);
    }
  }
  for (int k = 0; k < kVectors; ++k) {
    store(out + k * kLanes, load<Floats>(out + k * kLanes) + sum[k]);
  }
}

void row_accumulate(const float* weights, const int32_t* columns, int64_t n, Rows values,
                    int32_t head_dim, float* out) {
  with_loader(values.element, [&](auto loader) {
    int32_t d = 0;
    for (; d + 8 * kLanes <= head_dim; d += 8 * kLanes) {
      accumulate_block<8>(weights, columns, n, values, d, out + d, loader);
    }
    for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes) {
      accumulate_block<4>(weights, columns, n, values, d, out + d, loader);
    }
    for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) {
      accumulate_block<2>(weights, columns, n, values, d, out + d, loader);
    }
    for (; d + kLanes <= head_dim; d += kLanes) {
      accumulate_block<1>(weights, columns, n, values, d, out + d, loader);
    }
    if (d == head_dim) return;
    Floats x = load_first<Floats>(out + d, head_dim - d);
    for (int64_t i = 0; i < n; ++i) {
      if (weights[i] == 0) continue;
      x += weights[i] * loader.part(values.data, columns[i] * values.stride + d, head_dim - d);
    }
    store_part(out + d, x, head_dim - d);
  });
}

}  // namespace
}  // namespace sparse_attn::cpu::SPARSE_ATTN_ISA
