// Online softmax, score transforms, conversions and products with few rows for one instruction set,
// named by SPARSE_ATTN_ISA. m, l, P and O as in docs/design.md: P = exp(S - m), l the running sum
// (Milakov & Gimelshein 2018, algorithm 3). Sums run in a fixed order, so a row's bits depend on
// nothing but the row.
#include "cpu/vector/vector_math.h"

#include "cpu/vector/simd.h"
#include "cpu/vector/vector_product.h"
#include "cpu/vector/vector_rows.h"
#include "cpu/vector/vector_sketch.h"
#include "cpu/vector/vector_topk.h"

namespace sparse_attn::cpu::SPARSE_ATTN_ISA {
namespace {

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
        (count == kLanes ? load<Floats>(source + i) : load_first<Floats>(source + i, count)) *
        factor;
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
  const float inverse = kSoftcap ? scale / softcap : scale;
  auto transformed = [&](Floats s, Floats term) {
    Floats x = s * inverse;
    if (kSoftcap) x = tanh(x) * softcap;
    if (kMask) x += term;
    return select(s == -kInfinity, s, x);
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Floats term = kMask ? load<Floats>(mask + i) : Floats{};
    store(scores + i, transformed(load<Floats>(scores + i), term));
  }
  if (i == n) return;
  Floats term = kMask ? load_first<Floats>(mask + i, n - i) : Floats{};
  store_part(scores + i, transformed(load_first<Floats>(scores + i, n - i), term), n - i);
}

void transform(float* scores, int64_t n, float scale, float softcap, const float* mask) {
  if (softcap != 0 && mask != nullptr) {
    return transform_with<true, true>(scores, n, scale, softcap, mask);
  }
  if (softcap != 0) return transform_with<true, false>(scores, n, scale, softcap, mask);
  if (mask != nullptr) return transform_with<false, true>(scores, n, scale, softcap, mask);
  transform_with<false, false>(scores, n, scale, softcap, mask);
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
const VectorMath kVectorMath = {
    SPARSE_ATTN_NAME(SPARSE_ATTN_ISA),
    nullptr,
    {sketch_range, sketch_codes, sketch_sums, sketch_scores, sketch_masses},
    to_float,
    from_float,
    transform,
    online_softmax,
    row_scores,
    row_values,
    row_accumulate,
    kLanes,
    kHasPanels ? kGroupRows : 0,
    INT32_MAX,  // isa.cpp says where less
    pack_panel,
    panel_scores<>,
    panel_values<>,
    collect,
    keep_highest,
    low_threshold,
    keep_only};

}  // namespace sparse_attn::cpu::SPARSE_ATTN_ISA
