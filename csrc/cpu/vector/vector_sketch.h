// The loops of the key sketch for one instruction set, included by vector_math.cpp: ranges and
// codes of tokens, scores from codes, and softmax masses of 16 keys. A vector holds one channel, or
// one word of codes, of several tokens, so that a row's score is a sum in the order of channels.
#pragma once

#include "cpu/vector/simd.h"
#include "cpu/vector/vector_math.h"
#include "cpu/vector/vector_product.h"

namespace sparse_attn::cpu::SPARSE_ATTN_ISA {
namespace {

constexpr int kHalfBits = 16;  // neighbouring channels lie in different halves of a word
constexpr int kMaxGroup = 64;  // tokens
constexpr int kMaxRowWords = kMaxChannels / 8;

void sketch_range(const float* rows, int64_t stride, int32_t n, int32_t head_dim, float* least,
                  float* greatest) {
  for (int32_t d = 0; d < head_dim; d += kLanes) {
    Floats low = broadcast(kInfinity), high = broadcast(-kInfinity);
    for (int32_t row = 0; row < n; ++row) {
      const Floats x = load<Floats>(rows + row * stride + d);
      low = select(x < low, x, low);  // NaN is never taken
      high = select(x > high, x, high);
    }
    const Ints none = low > high;
    store(least + d, select(none, broadcast(__builtin_nanf("")), low));
    store(greatest + d, select(none, broadcast(__builtin_nanf("")), high));
  }
}

/// round((x - least) / range * levels), 0 where the range is empty or the element is no number.
inline Ints sketch_code(Floats x, float least, float range, int32_t levels) {
  const float most = static_cast<float>(levels);
  Floats level = (x - least) / range * most;
  level = select(level > 0.0f, level, Floats{});
  level = select(level < most, level, broadcast(most));
  return Ints(level + 0x1.8p23f) & levels;  // the sum has the rounded number in its last bits
}

void sketch_codes(const float* rows, int64_t stride, int32_t n, int32_t head_dim, int32_t bits,
                  const float* least, const float* greatest, uint32_t* codes, int32_t row_words) {
  const int32_t levels = (1 << bits) - 1, per_word = 32 / bits;
  float panel[kMaxChannels * kPanelKeys];
  for (int32_t first = 0; first < n; first += kPanelKeys) {
    const int32_t count = n - first < kPanelKeys ? n - first : kPanelKeys;
    pack_panel(rows + first * stride, stride, head_dim, panel);
    for (int32_t word = 0; word < row_words; ++word) {
      const int32_t from = word * per_word,
                    to = from + per_word < head_dim ? from + per_word : head_dim;
      uint32_t words[kPanelKeys];
      for (int32_t key = 0; key < kPanelKeys; key += kLanes) {
        Ints packed{};
        for (int32_t d = from; d < to; ++d) {
          const int32_t i = d - from, bit = i / 2 * bits + i % 2 * kHalfBits;
          const Floats x = load<Floats>(panel + d * kPanelKeys + key);
          packed |= sketch_code(x, least[d], greatest[d] - least[d], levels) << bit;
        }
        store(words + key, packed);
      }
      for (int32_t key = 0; key < count; ++key)
        codes[(first + key) * row_words + word] = words[key];
    }
  }
}

/// Codes are added in the bytes of four words: as many rows as a byte has room for, each by one
/// addition for every code of a byte.
template <int kBits>
void sketch_sums_of(const SketchCodes& codes, float* sums) {
  constexpr int kCodesOfByte = 8 / kBits, kPairs = kHalfBits / kBits, kWords = 4;
  constexpr int32_t kLevels = (1 << kBits) - 1, kMostRows = 255 / kLevels;
  constexpr uint32_t kFirstOfBytes = kLevels * 0x01010101u;
  typedef uint32_t Words __attribute__((vector_size(4 * kWords)));
  for (int32_t word = 0; word < codes.used_words; word += kWords, sums += kWords * 2 * kPairs) {
    for (int i = 0; i < kWords * 2 * kPairs; ++i) sums[i] = 0;
    for (int32_t first = 0; first < codes.count; first += kMostRows) {
      const int32_t end = first + kMostRows < codes.count ? first + kMostRows : codes.count;
      Words bytes[kCodesOfByte] = {};
      for (int32_t row = first; row < end; ++row) {
        const Words words = load<Words>(codes.rows + int64_t{row} * codes.row_words + word);
        for (int k = 0; k < kCodesOfByte; ++k) bytes[k] += words >> k * kBits & kFirstOfBytes;
      }
      for (int i = 0; i < kWords * 2 * kPairs; ++i) {
        const int bit = i / 2 % kPairs * kBits + i % 2 * kHalfBits;
        sums[i] +=
            static_cast<float>(bytes[bit % 8 / kBits][i / (2 * kPairs)] >> bit / 8 * 8 & 255);
      }
    }
  }
}

void sketch_sums(const SketchCodes& codes, float* sums) {
  auto* of_bits = codes.bits == 2 ? sketch_sums_of<2> : sketch_sums_of<4>;
  of_bits(codes, sums);
}

/// By which codes are multiplied as they lie in half a word: 2^-place / levels, of 16 channels.
template <int kBits>
struct PlaceFactors {
  float factor[16] = {};
  constexpr PlaceFactors() {
    for (int i = 0; i < 16; ++i) {
      const int place = i % (32 / kBits) / 2 * kBits;
      factor[i] = 1.0f / static_cast<float>(((1 << kBits) - 1) << place);
    }
  }
};

/// Rows of a sketch of one group, ready to be multiplied with codes.
struct SketchSteps {
  const float* steps;  // [rows, kMaxChannels], in the order of codes
  const float* base;   // [rows], the products with the least values
};

/// Sums of kRows rows with the codes of kVectors vectors of tokens, from vector `first` on.
template <int kBits, int kRows, int kVectors>
void sketch_scores_by(const SketchCodes& codes, const uint32_t* panels, int32_t first,
                      SketchSteps query, float* scores, int64_t stride) {
  constexpr int kPairs = kHalfBits / kBits;
  const uint32_t* words[kVectors];
  for (int k = 0; k < kVectors; ++k) {
    const int32_t token = (first + k) * kLanes;
    words[k] = panels + token / kPanelKeys * kPanelKeys * codes.row_words + token % kPanelKeys;
  }
  Floats sum[kRows][kVectors];
  for (int row = 0; row < kRows; ++row) {
    for (int k = 0; k < kVectors; ++k) sum[row][k] = Floats{};
  }
  const float* steps = query.steps;
  for (int32_t word = 0; word < codes.used_words; ++word, steps += 2 * kPairs) {
    Ints halves[2][kVectors];
    for (int k = 0; k < kVectors; ++k) {
      halves[0][k] = load<Ints>(words[k] + word * kPanelKeys);
      halves[1][k] = halves[0][k] >> kHalfBits;
    }
#pragma GCC unroll 8
    for (int pair = 0; pair < kPairs; ++pair) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        Floats code[kVectors];
        for (int k = 0; k < kVectors; ++k) {
          const Ints bits = halves[half][k] & (((1 << kBits) - 1) << pair * kBits);
          code[k] = __builtin_convertvector(bits, Floats);
        }
        for (int row = 0; row < kRows; ++row) {
          const Floats step = broadcast(steps[row * kMaxChannels + 2 * pair + half]);
          for (int k = 0; k < kVectors; ++k) sum[row][k] += step * code[k];
        }
      }
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int k = 0; k < kVectors; ++k) {
      store(scores + row * stride + (first + k) * kLanes, sum[row][k] + query.base[row]);
    }
  }
}

template <int kBits, int kRows>
void sketch_scores_of(const SketchCodes& codes, const uint32_t* panels, SketchSteps query,
                      float* scores, int64_t stride) {
  constexpr int kVectors = kRows == 1 ? 4 : 2;  // enough sums to hide the latency of a product
  const int32_t vectors = codes.count / kPanelKeys * kPanelVectors;
  int32_t i = 0;
  for (; i + kVectors <= vectors; i += kVectors) {
    sketch_scores_by<kBits, kRows, kVectors>(codes, panels, i, query, scores, stride);
  }
  for (; i < vectors; ++i) {
    sketch_scores_by<kBits, kRows, 1>(codes, panels, i, query, scores, stride);
  }
}

template <int kBits>
void sketch_scores_in(const SketchCodes& codes, const float* least, const float* greatest,
                      const float* query, int64_t query_stride, int32_t rows, float* scores,
                      int64_t stride) {
  static constexpr PlaceFactors<kBits> kPlaces;
  constexpr int kRows = 4;
  uint32_t panels[kMaxGroup * kMaxRowWords];
  for (int32_t token = 0; token < codes.count; token += kPanelKeys) {
    pack_panel(reinterpret_cast<const float*>(codes.rows + token * codes.row_words),
               codes.row_words, codes.row_words,
               reinterpret_cast<float*>(panels + token * codes.row_words));
  }
  const int32_t channels = codes.used_words * (32 / kBits);
  float unit[kMaxChannels], steps[kRows][kMaxChannels], base[kRows];
  for (int32_t d = 0; d < channels; d += kLanes) {
    const Floats factor = load<Floats>(kPlaces.factor + d % 16);
    store(unit + d, (load<Floats>(greatest + d) - load<Floats>(least + d)) * factor);
  }
  for (; rows > 0; rows -= kRows, query += kRows * query_stride, scores += kRows * stride) {
    const int32_t at_once = rows < kRows ? rows : kRows;
    for (int row = 0; row < at_once; ++row) {
      Floats sum{};
      for (int32_t d = 0; d < channels; d += kLanes) {
        const Floats q = load<Floats>(query + row * query_stride + d);
        store(steps[row] + d, q * load<Floats>(unit + d));
        sum += q * load<Floats>(least + d);
      }
      base[row] = horizontal_sum(sum);
    }
    const SketchSteps ready = {*steps, base};
    if (at_once == 4) sketch_scores_of<kBits, 4>(codes, panels, ready, scores, stride);
    if (at_once == 3) sketch_scores_of<kBits, 3>(codes, panels, ready, scores, stride);
    if (at_once == 2) sketch_scores_of<kBits, 2>(codes, panels, ready, scores, stride);
    if (at_once == 1) sketch_scores_of<kBits, 1>(codes, panels, ready, scores, stride);
  }
}

void sketch_scores(const SketchCodes& codes, const float* least, const float* greatest,
                   const float* query, int64_t query_stride, int32_t rows, float* scores,
                   int64_t stride) {
  auto* of_bits = codes.bits == 2 ? sketch_scores_in<2> : sketch_scores_in<4>;
  of_bits(codes, least, greatest, query, query_stride, rows, scores, stride);
}

/// masses[i] = sum over the i-th 16 scores of 2^(factor * (score - highest)); returns the highest.
float sketch_masses(const float* scores, int32_t count, float factor, float* masses) {
  constexpr int kVectors = 16 / kLanes, kUnits = 4;
  const float highest = row_max(scores, count * 16);
  if (highest == -kInfinity) {
    const float mass = has_nan(scores, count * 16) ? __builtin_nanf("") : 0.0f;
    for (int32_t i = 0; i < count; ++i) masses[i] = mass;
    return highest;
  }
  for (int32_t i = 0; i < count; i += kUnits) {
    const int32_t units = count - i < kUnits ? count - i : kUnits;
    Floats sum[kUnits] = {};
    for (int32_t unit = 0; unit < units; ++unit) {
      for (int k = 0; k < kVectors; ++k) {
        const Floats x = load<Floats>(scores + (i + unit) * 16 + k * kLanes);
        sum[unit] += exp2((x - highest) * factor);
      }
    }
    const Four all = sums_of_lanes(sum[0], sum[1], sum[2], sum[3]);
    __builtin_memcpy(masses + i, &all, units * sizeof(float));
  }
  return highest;
}

}  // namespace
}  // namespace sparse_attn::cpu::SPARSE_ATTN_ISA
