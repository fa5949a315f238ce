// Online softmax, score transforms, conversions and products with few rows for one instruction set,
// named by SPARSE_ATTN_ISA. m, l, P and O as in docs/design.md: P = exp(S - m), l the running sum
// (Milakov & Gimelshein 2018, algorithm 3). Sums run in a fixed order, so a row's bits depend on
// nothing but the row.
#include "cpu/vector/vector_math.h"

#include "cpu/vector/simd.h"
#include "cpu/vector/vector_product.h"
#include "cpu/vector/vector_topk.h"

namespace sparse_attn::cpu::SPARSE_ATTN_ISA {
namespace {

/// Elements of type `kElement`, read as float vectors.
template <Element kElement>
struct Loader {
  static constexpr int kBytes = kElement == Element::kFloat32 ? 4 : 2;
  static const char* at(const void* data, int64_t i) {
    return static_cast<const char*>(data) + i * kBytes;
  }
  static Floats full(const void* data, int64_t i) {
    if constexpr (kElement == Element::kFloat32) return load<Floats>(at(data, i));
    if constexpr (kElement == Element::kFloat16) return float_of_float16(load<Halves>(at(data, i)));
    if constexpr (kElement == Element::kBFloat16) {
      return float_of_bfloat16(load<Halves>(at(data, i)));
    }
  }
  /// `count` elements, then zeros.
  static Floats part(const void* data, int64_t i, int64_t count) {
    alignas(64) char buffer[kLanes * 4] = {};
    __builtin_memcpy(buffer, at(data, i), count * kBytes);
    return full(buffer, 0);
  }
};

/// Calls `f` with the loader of the element type.
template <class F>
void with_loader(Element element, const F& f) {
  if (element == Element::kFloat32) f(Loader<Element::kFloat32>());
  if (element == Element::kFloat16) f(Loader<Element::kFloat16>());
  if (element == Element::kBFloat16) f(Loader<Element::kBFloat16>());
}

inline Floats load_part(const float* source, int64_t count, float rest) {
  Floats x = broadcast(rest);
  __builtin_memcpy(&x, source, count * 4);
  return x;
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

void to_float(Element element, const void* source, float* target, int64_t n) {
  with_loader(element, [&](auto loader) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(target + i, loader.full(source, i));
    if (i < n) {
      Floats x = loader.part(source, i, n - i);
      __builtin_memcpy(target + i, &x, (n - i) * 4);
    }
  });
}

void from_float(Element element, const float* source, float factor, void* target, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    int64_t count = n - i < kLanes ? n - i : kLanes;
    Floats x =
        (count == kLanes ? load<Floats>(source + i) : load_part(source + i, count, 0)) * factor;
    if (element == Element::kFloat32) {
      __builtin_memcpy(static_cast<float*>(target) + i, &x, count * 4);
    } else {
      Halves h = element == Element::kFloat16 ? float16_of_float(x) : bfloat16_of_float(x);
      __builtin_memcpy(static_cast<uint16_t*>(target) + i, &h, count * 2);
    }
  }
}

template <bool kSoftcap, bool kMask>
void transform_with(float* scores, int64_t n, float scale, float softcap, const float* mask) {
  float inverse = kSoftcap ? scale / softcap : scale;
  for (int64_t i = 0; i < n; i += kLanes) {
    int64_t count = n - i < kLanes ? n - i : kLanes;
    Floats s = count == kLanes ? load<Floats>(scores + i) : load_part(scores + i, count, 0);
    Floats x = s * inverse;
    if (kSoftcap) x = tanh(x) * softcap;
    if (kMask) {
      x += count == kLanes ? load<Floats>(mask + i) : load_part(mask + i, count, 0);
    }
    store_part(scores + i, select(s == -kInfinity, s, x), count);
  }
}

void transform(float* scores, int64_t n, float scale, float softcap, const float* mask) {
  if (softcap != 0 && mask != nullptr) {
    return transform_with<true, true>(scores, n, scale, softcap, mask);
  }
  if (softcap != 0) return transform_with<true, false>(scores, n, scale, softcap, mask);
  if (mask != nullptr) return transform_with<false, true>(scores, n, scale, softcap, mask);
  transform_with<false, false>(scores, n, scale, softcap, mask);
}

/// Largest of n scores, a multiple of kLanes; NaN left aside.
float row_max(const float* scores, int64_t n) {
  Floats max[4];
  for (Floats& x : max) x = broadcast(-kInfinity);
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int k = 0; k < 4; ++k) max[k] = larger(load<Floats>(scores + i + k * kLanes), max[k]);
  }
  for (; i < n; i += kLanes) max[0] = larger(load<Floats>(scores + i), max[0]);
  return horizontal_max(larger(larger(max[0], max[1]), larger(max[2], max[3])));
}

bool has_nan(const float* scores, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (scores[i] != scores[i]) return true;
  }
  return false;
}

/// scores = 2^(factor * (scores - m)), n a multiple of kLanes; returns their sum.
float row_exp(float* scores, int64_t n, float factor, float m) {
  Floats sum[2] = {};
  int64_t i = 0;
  auto step = [&](int k) {
    Floats p = exp2((load<Floats>(scores + i + k * kLanes) - m) * factor);
    store(scores + i + k * kLanes, p);
    sum[k] += p;
  };
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    step(0);
    step(1);
  }
  if (i < n) step(0);
  return horizontal_sum(sum[0] + sum[1]);
}

void scale_row(float* row, int64_t n, float factor) {
  for (int64_t i = 0; i < n; ++i) row[i] *= factor;
}

void clear(float* row, int32_t begin, int32_t end) {
  if (begin < end) __builtin_memset(row + begin, 0, (end - begin) * sizeof(float));
}

/// Widens a span to whole vectors, with -inf in the new columns. Rows are padded to whole vectors.
Span whole_vectors(float* scores, Span span) {
  Span whole = {span.begin / kLanes * kLanes, (span.end + kLanes - 1) / kLanes * kLanes};
  const int32_t edges[2] = {whole.begin, whole.end - kLanes};
  for (int32_t column : edges) {
    Floats x = load<Floats>(scores + column);
    store(scores + column, keep_lanes(x, span.begin - column, span.end - column, -kInfinity));
  }
  return whole;
}

void online_softmax(const SoftmaxTile& tile) {
  for (int32_t row = 0; row < tile.rows; ++row) {
    float* scores = tile.scores + row * tile.stride;
    Span span = tile.visible[row], read = tile.read == nullptr ? span : tile.read[row];
    if (span.end <= span.begin) {
      clear(scores, read.begin, read.end);
      continue;
    }
    span = whole_vectors(scores, span);
    clear(scores, read.begin, span.begin);
    clear(scores, span.end, read.end);
    scores += span.begin;
    int32_t n = span.end - span.begin;

    float old_m = tile.m[row];
    float tile_m = row_max(scores, n);
    float m = tile_m > old_m ? tile_m : old_m;
    if (m == -kInfinity) {
      if (!has_nan(scores, n)) {
        clear(scores, 0, n);
        continue;
      }
      m = __builtin_nanf("");
    }
    float l = row_exp(scores, n, tile.factor, m);
    if (m != old_m && old_m != -kInfinity) {
      float shrink = exp2(broadcast((old_m - m) * tile.factor))[0];
      tile.l[row] *= shrink;
      scale_row(tile.out + int64_t(row) * tile.value_dim, tile.value_dim, shrink);
    }
    tile.m[row] = m;
    tile.l[row] += l;
  }
}

template <class RowLoader>
float dot(const float* query, const void* key, int64_t first, int32_t head_dim, RowLoader loader) {
  Floats sum[4] = {};
  int32_t d = 0;
  for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes) {
    for (int k = 0; k < 4; ++k) {
      sum[k] += load<Floats>(query + d + k * kLanes) * loader.full(key, first + d + k * kLanes);
    }
  }
  for (; d + kLanes <= head_dim; d += kLanes) {
    sum[0] += load<Floats>(query + d) * loader.full(key, first + d);
  }
  if (d < head_dim) {
    sum[1] += load_part(query + d, head_dim - d, 0) * loader.part(key, first + d, head_dim - d);
  }
  return horizontal_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

void row_scores(const float* query, Rows keys, int64_t n, int32_t head_dim, float* scores) {
  with_loader(keys.element, [&](auto loader) {
    for (int64_t j = 0; j < n; ++j) {
      scores[j] = dot(query, keys.data, j * keys.stride, head_dim, loader);
    }
  });
}

/// out[0, kVectors * kLanes) += sum over i of weights[i] * values[columns[i]]
template <int kVectors, class RowLoader>
void accumulate_block(const float* weights, const int32_t* columns, int64_t n, const Rows& values,
                      int64_t offset, float* out, RowLoader loader) {
  Floats sum[kVectors] = {};
  for (int64_t i = 0; i < n; ++i) {
    if (weights[i] == 0) continue;
    int64_t first = (columns == nullptr ? i : columns[i]) * values.stride + offset;
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
    for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) {
      accumulate_block<2>(weights, columns, n, values, d, out + d, loader);
    }
    for (; d + kLanes <= head_dim; d += kLanes) {
      accumulate_block<1>(weights, columns, n, values, d, out + d, loader);
    }
    if (d == head_dim) return;
    for (int64_t i = 0; i < n; ++i) {
      int64_t first = (columns == nullptr ? i : columns[i]) * values.stride + d;
      Floats x = load_part(out + d, head_dim - d, 0);
      if (weights[i] != 0) x += weights[i] * loader.part(values.data, first, head_dim - d);
      store_part(out + d, x, head_dim - d);
    }
  });
}

float low_threshold(float* scores, Span seen, int32_t k) {
  Span whole = whole_vectors(scores, seen);
  Bracket bracket = find_threshold(scores + whole.begin, whole.end - whole.begin, k, k + k / 8);
  if (bracket.low <= rank_of_score(-kInfinity)) return -kInfinity;
  return score_of_rank(bracket.low == 0 ? -2 : bracket.low - 1);  // -1 is -0, which equals 0
}

void keep_only(float* scores, Span seen, int32_t k) {
  Span whole = whole_vectors(scores, seen);
  drop_others(scores + whole.begin, whole.end - whole.begin, k);
}

}  // namespace

#define SPARSE_ATTN_NAME(isa) SPARSE_ATTN_NAME_OF(isa)
#define SPARSE_ATTN_NAME_OF(isa) #isa

extern const VectorMath kVectorMath;
const VectorMath kVectorMath = {SPARSE_ATTN_NAME(SPARSE_ATTN_ISA),
                                nullptr,
                                to_float,
                                from_float,
                                transform,
                                online_softmax,
                                row_scores,
                                row_accumulate,
                                kHasPanels ? kGroupRows : 0,
                                kPanelHeadDim,
                                pack_panel,
                                panel_scores<>,
                                panel_values<>,
                                collect,
                                keep_highest,
                                low_threshold,
                                keep_only};

}  // namespace sparse_attn::cpu::SPARSE_ATTN_ISA
