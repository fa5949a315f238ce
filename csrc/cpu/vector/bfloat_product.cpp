// Products of bfloat16 with float32 sums on tiles of registers (AMX): scores of 32 query rows with
// panels of keys, and O += P v with P rounded to bfloat16, as torch's own bfloat16 attention does.
// Where elements have parts, so has P. Products of parts that float32 would hardly notice are left
// out: a second part is 2^-9 of the first at most, a third 2^-18. Layouts as in bfloat_rows.h.
// Subnormal numbers count as 0. Compiled where the compiler knows AMX and chosen by isa.cpp.
#include <immintrin.h>

#include <type_traits>

#include "cpu/vector/simd.h"
#include "cpu/vector/vector_math.h"

namespace sparse_attn::cpu::SPARSE_ATTN_ISA {
namespace {

constexpr int32_t kTileRows = 16;  // of every tile; a row is 64 bytes
constexpr int32_t kPairs = 32;     // elements that a tile of the inner side takes in a row
constexpr int32_t kWeights = kBfloatRows * kBfloatRows;  // of a block of values
constexpr int32_t kBlocksAtOnce = 4;                     // whose rounded weights stay in L1

/// What LDTILECFG reads.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {kTileRows, kTileRows, kTileRows, kTileRows,
                      kTileRows, kTileRows, kTileRows, kTileRows};
};
constexpr TileConfig kConfig;

// The compiler takes tile registers by number alone: 0 to 3 hold 2 x 2 tiles of sums, 4 and 5 the
// rows' operands, 6 and 7 the columns'.

void begin() { _tile_loadconfig(&kConfig); }

void end() { _tile_release(); }

/// Takes a part off 32 numbers: with `half` 0x8000 the nearest in bfloat16, with 0 what the upper
/// half of their bits is, which leaves the parts' sum exact and a NaN a NaN.
inline void take_part(__m512 (&x)[2], uint32_t half, uint16_t* part) {
  alignas(64) static constexpr uint16_t kUpper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                      23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                      45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  const __m512i add = _mm512_set1_epi32(half), mask = _mm512_set1_epi32(0xffff0000);
  __m512i bits[2];
  for (int k = 0; k < 2; ++k) {
    bits[k] = _mm512_add_epi32(_mm512_castps_si512(x[k]), add);
    x[k] -= _mm512_castsi512_ps(_mm512_and_si512(bits[k], mask));
  }
  store(part, _mm512_permutex2var_epi16(bits[0], load<__m512i>(kUpper), bits[1]));
}

void split(Element element, const void* source, int32_t n, uint16_t* parts) {
  const bool whole = element == Element::kFloat32;
  for (int32_t i = 0; i < n; i += 32) {
    __m512 x[2];
    for (int k = 0; k < 2; ++k) {
      const int32_t first = i + k * 16;
      x[k] = whole ? load<__m512>(static_cast<const float*>(source) + first)
                   : _mm512_maskz_cvtph_ps(
                         -1, load<__m256i>(static_cast<const uint16_t*>(source) + first));
    }
    for (int32_t part = 0; part < (whole ? 3 : 2); ++part) take_part(x, 0, parts + part * n + i);
  }
}

/// Scores of 16 kRowTiles rows with the keys of kColumnTiles panels.
template <int kParts, int kRowTiles, int kColumnTiles>
void scores_of(const uint16_t* query, int32_t head_dim, const uint16_t* panels, float* scores,
               int64_t stride) {
  constexpr bool kTwoRows = kRowTiles == 2, kTwoColumns = kColumnTiles == 2;
  const int32_t row = head_dim * kParts;
  int64_t query_bytes = row * int64_t{2}, score_bytes = stride * 4;
  const uint16_t* second_panel = panels + int64_t{kPanelKeys} * row;
  auto add_products = [&](const uint16_t* elements) {
    _tile_loadd(4, elements, query_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kTwoColumns) _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTwoRows) {
      _tile_loadd(5, elements + kTileRows * row, query_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kTwoColumns) _tile_dpbf16ps(3, 5, 7);
    }
  };
  for (int32_t i = 0; i < kTileRows * kRowTiles; ++i) {  // while products run
    _mm_prefetch(scores + i * stride, _MM_HINT_ET0);
    if constexpr (kTwoColumns) _mm_prefetch(scores + i * stride + kPanelKeys, _MM_HINT_ET0);
  }
  _tile_zero(0);
  if constexpr (kTwoColumns) _tile_zero(1);
  if constexpr (kTwoRows) _tile_zero(2);
  if constexpr (kTwoRows && kTwoColumns) _tile_zero(3);
  for (int32_t part = 0; part < kParts; ++part) {
    for (int32_t d = 0; d < head_dim; d += kPairs) {
      const int32_t place = (part * head_dim + d) * kPanelKeys;
      _tile_loadd(6, panels + place, 64);
      if constexpr (kTwoColumns) _tile_loadd(7, second_panel + place, 64);
      for (int32_t other = 0; other < kParts && part + other <= 2; ++other) {
        add_products(query + other * head_dim + d);
      }
    }
  }
  _tile_stored(0, scores, score_bytes);
  if constexpr (kTwoColumns) _tile_stored(1, scores + kPanelKeys, score_bytes);
  if constexpr (kTwoRows) {
    scores += kTileRows * stride;
    _tile_stored(2, scores, score_bytes);
    if constexpr (kTwoColumns) _tile_stored(3, scores + kPanelKeys, score_bytes);
  }
}

template <int kParts, int kRowTiles>
void scores_with(const uint16_t* query, int32_t head_dim, const uint16_t* panels,
                 int32_t num_panels, float* scores, int64_t stride) {
  const int64_t panel_elements = int64_t{kPanelKeys} * head_dim * kParts;
  int32_t panel = 0;
  for (; panel + 2 <= num_panels; panel += 2) {
    scores_of<kParts, kRowTiles, 2>(query, head_dim, panels + panel * panel_elements,
                                    scores + panel * kPanelKeys, stride);
  }
  if (panel == num_panels) return;
  scores_of<kParts, kRowTiles, 1>(query, head_dim, panels + panel * panel_elements,
                                  scores + panel * kPanelKeys, stride);
}

/// Calls f with the number of parts as a constant.
template <class F>
void with_parts(int32_t parts, const F& f) {
  if (parts == 1) f(std::integral_constant<int, 1>());
  if (parts == 2) f(std::integral_constant<int, 2>());
  if (parts == 3) f(std::integral_constant<int, 3>());
}

void scores(const uint16_t* query, int32_t rows, int32_t head_dim, int32_t parts,
            const uint16_t* panels, int32_t num_panels, float* scores, int64_t stride) {
  with_parts(parts, [&](auto constant) {
    const auto all = rows > kTileRows ? scores_with<constant(), 2> : scores_with<constant(), 1>;
    all(query, head_dim, panels, num_panels, scores, stride);
  });
}

/// The weights of a block, rounded to bfloat16: [parts][32 rows][32].
template <int kParts>
void round_weights(const float* weights, int64_t stride, int32_t rows, Span inside,
                   uint16_t* rounded) {
  const uint64_t below = (uint64_t{1} << inside.end) - 1;
  const uint32_t lanes = static_cast<uint32_t>(below & ~((uint64_t{1} << inside.begin) - 1));
  for (int32_t row = 0; row < rows; ++row, weights += stride, rounded += kBfloatRows) {
    __m512 x[2];
    for (int k = 0; k < 2; ++k) {
      x[k] = _mm512_maskz_loadu_ps(static_cast<__mmask16>(lanes >> 16 * k), weights + 16 * k);
    }
    for (int part = 0; part < kParts; ++part) take_part(x, 0x8000, rounded + part * kWeights);
  }
}

/// 16 kRowTiles rows and 32 elements of out += P v.
template <int kParts, int kRowTiles>
void values_of(const uint16_t* weights, const BfloatBlock* blocks, int32_t num_blocks, int32_t d,
               int32_t head_dim, float* out) {
  constexpr bool kTwoRows = kRowTiles == 2;
  const int64_t row_bytes = head_dim * int64_t{4}, pair_bytes = row_bytes * kParts;
  auto load_weights = [&](const uint16_t* first) {
    _tile_loadd(4, first, 64);
    if constexpr (kTwoRows) _tile_loadd(5, first + kTileRows * kBfloatRows, 64);
  };
  auto load_values = [&](const uint16_t* first) {
    _tile_loadd(6, first, pair_bytes);
    _tile_loadd(7, first + 32, pair_bytes);
  };
  auto add_products = [&] {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTwoRows) {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  };
  float* out1 = out + kTileRows * head_dim;
  _tile_loadd(0, out + d, row_bytes);
  _tile_loadd(1, out + d + 16, row_bytes);
  if constexpr (kTwoRows) {
    _tile_loadd(2, out1 + d, row_bytes);
    _tile_loadd(3, out1 + d + 16, row_bytes);
  }
  for (int32_t i = 0; i < num_blocks; ++i) {
    const uint16_t* weight = weights + i * kParts * kWeights;
    const uint16_t* value = blocks[i].values + 2 * d;
    for (int32_t part = 0; part < kParts; ++part) {
      load_values(value + 2 * part * head_dim);
      for (int32_t other = kParts - 1 - part; other >= 0; --other) {
        load_weights(weight + other * kWeights);
        add_products();
      }
    }
  }
  _tile_stored(0, out + d, row_bytes);
  _tile_stored(1, out + d + 16, row_bytes);
  if constexpr (kTwoRows) {
    _tile_stored(2, out1 + d, row_bytes);
    _tile_stored(3, out1 + d + 16, row_bytes);
  }
}

template <int kParts>
void values_with(const float* weights, int64_t stride, int32_t rows, const BfloatBlock* blocks,
                 int32_t num_blocks, int32_t head_dim, float* out) {
  alignas(64) uint16_t rounded[kBlocksAtOnce * kParts * kWeights];
  for (int32_t first = 0; first < num_blocks; first += kBlocksAtOnce, blocks += kBlocksAtOnce) {
    const int32_t count = num_blocks - first < kBlocksAtOnce ? num_blocks - first : kBlocksAtOnce;
    for (int32_t i = 0; i < count; ++i) {
      round_weights<kParts>(weights + blocks[i].column, stride, rows, blocks[i].inside,
                            rounded + i * kParts * kWeights);
    }
    // The compiler does not know that loads of tiles read memory.
    __asm__ volatile("" ::: "memory");
    const auto all = rows > kTileRows ? values_of<kParts, 2> : values_of<kParts, 1>;
    for (int32_t d = 0; d < head_dim; d += 32) all(rounded, blocks, count, d, head_dim, out);
  }
}

void values(const float* weights, int64_t stride, int32_t rows, const BfloatBlock* blocks,
            int32_t num_blocks, int32_t head_dim, int32_t parts, float* out) {
  with_parts(parts, [&](auto constant) {
    values_with<constant()>(weights, stride, rows, blocks, num_blocks, head_dim, out);
  });
}

}  // namespace

extern const BfloatMath kBfloatMath;
const BfloatMath kBfloatMath = {begin, end, split, scores, values};

}  // namespace sparse_attn::cpu::SPARSE_ATTN_ISA
