// Products of bfloat16 with float32 sums on tiles of registers (AMX): scores of 32 query rows with
// panels of keys, and O += P v with P rounded to bfloat16, as torch's own bfloat16 attention does.
// Where elements have two parts, all four products of parts make q k; P is rounded to two parts
// too, and what both second parts make of O is left out: 2^-18 of it. Layouts as in bfloat_rows.h.
// Subnormal numbers count as 0. Compiled where the compiler knows AMX and chosen by isa.cpp.
#include <immintrin.h>

#include "cpu/vector/vector_math.h"

namespace sparse_attn::cpu::amx {
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

/// The upper halves of 32 numbers, those of `low` first.
inline void store_upper(uint16_t* target, __m512i low, __m512i high) {
  alignas(64) static constexpr uint16_t kOdd[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                    23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                    45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  _mm512_storeu_si512(target, _mm512_permutex2var_epi16(low, _mm512_load_si512(kOdd), high));
}

/// Rounds 32 numbers to the nearest of bfloat16, and what that leaves of them.
inline void store_parts(uint16_t* first, uint16_t* second, __m512 low, __m512 high) {
  const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(0xffff0000);
  auto half_more = [&](__m512 x) { return _mm512_add_epi32(_mm512_castps_si512(x), half); };
  const __m512i low_sum = half_more(low), high_sum = half_more(high);
  store_upper(first, low_sum, high_sum);
  const __m512 low_rest = low - _mm512_castsi512_ps(_mm512_and_si512(low_sum, upper));
  const __m512 high_rest = high - _mm512_castsi512_ps(_mm512_and_si512(high_sum, upper));
  store_upper(second, half_more(low_rest), half_more(high_rest));
}

void split(const uint16_t* float16, int32_t n, uint16_t* parts) {
  for (int32_t i = 0; i < n; i += 32) {
    __m256i low, high;
    __builtin_memcpy(&low, float16 + i, sizeof(low));
    __builtin_memcpy(&high, float16 + i + 16, sizeof(high));
    store_parts(parts + i, parts + n + i, _mm512_maskz_cvtph_ps(-1, low),
                _mm512_maskz_cvtph_ps(-1, high));
  }
}

/// Scores of 16 kRowTiles rows with the keys of kColumnTiles panels.
template <int kRowTiles, int kColumnTiles>
void scores_of(const uint16_t* query, int32_t head_dim, int32_t parts, const uint16_t* panels,
               float* scores, int64_t stride) {
  constexpr bool kTwoRows = kRowTiles == 2, kTwoColumns = kColumnTiles == 2;
  const int32_t row = head_dim * parts;
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
  for (int32_t d = 0; d < row; d += kPairs) {
    _tile_loadd(6, panels + d * kPanelKeys, 64);
    if constexpr (kTwoColumns) _tile_loadd(7, second_panel + d * kPanelKeys, 64);
    add_products(query + d);
    if (parts == 2) add_products(query + (d < head_dim ? d + head_dim : d - head_dim));
  }
  _tile_stored(0, scores, score_bytes);
  if constexpr (kTwoColumns) _tile_stored(1, scores + kPanelKeys, score_bytes);
  if constexpr (kTwoRows) {
    scores += kTileRows * stride;
    _tile_stored(2, scores, score_bytes);
    if constexpr (kTwoColumns) _tile_stored(3, scores + kPanelKeys, score_bytes);
  }
}

template <int kRowTiles>
void scores_with(const uint16_t* query, int32_t head_dim, int32_t parts, const uint16_t* panels,
                 int32_t num_panels, float* scores, int64_t stride) {
  const int64_t panel_elements = int64_t{kPanelKeys} * head_dim * parts;
  int32_t panel = 0;
  for (; panel + 2 <= num_panels; panel += 2) {
    scores_of<kRowTiles, 2>(query, head_dim, parts, panels + panel * panel_elements,
                            scores + panel * kPanelKeys, stride);
  }
  if (panel == num_panels) return;
  scores_of<kRowTiles, 1>(query, head_dim, parts, panels + panel * panel_elements,
                          scores + panel * kPanelKeys, stride);
}

void scores(const uint16_t* query, int32_t rows, int32_t head_dim, int32_t parts,
            const uint16_t* panels, int32_t num_panels, float* scores, int64_t stride) {
  if (rows > kTileRows) {
    scores_with<2>(query, head_dim, parts, panels, num_panels, scores, stride);
  } else {
    scores_with<1>(query, head_dim, parts, panels, num_panels, scores, stride);
  }
}

/// The weights of a block, rounded to bfloat16: [parts][32 rows][32].
void round_weights(const float* weights, int64_t stride, int32_t rows, Span inside, int32_t parts,
                   uint16_t* rounded) {
  const uint64_t below = (uint64_t{1} << inside.end) - 1;
  const uint32_t lanes = static_cast<uint32_t>(below & ~((uint64_t{1} << inside.begin) - 1));
  for (int32_t row = 0; row < rows; ++row, weights += stride, rounded += kBfloatRows) {
    __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(lanes), weights);
    __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(lanes >> 16), weights + 16);
    if (parts == 2) {
      store_parts(rounded, rounded + kWeights, low, high);
    } else {
      const __m512bh both = _mm512_cvtne2ps_pbh(high, low);
      __builtin_memcpy(rounded, &both, sizeof(both));
    }
  }
}

/// 16 kRowTiles rows and 32 elements of out += P v.
template <int kRowTiles>
void values_of(const uint16_t* weights, const BfloatBlock* blocks, int32_t num_blocks, int32_t d,
               int32_t head_dim, int32_t parts, float* out) {
  constexpr bool kTwoRows = kRowTiles == 2;
  const int64_t row_bytes = head_dim * int64_t{4}, pair_bytes = row_bytes * parts;
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
    const uint16_t* weight = weights + i * parts * kWeights;
    const uint16_t* value = blocks[i].values + 2 * d;
    load_values(value);
    if (parts == 2) {
      load_weights(weight + kWeights);
      add_products();
    }
    load_weights(weight);
    add_products();
    if (parts == 2) {
      load_values(value + 2 * head_dim);
      add_products();
    }
  }
  _tile_stored(0, out + d, row_bytes);
  _tile_stored(1, out + d + 16, row_bytes);
  if constexpr (kTwoRows) {
    _tile_stored(2, out1 + d, row_bytes);
    _tile_stored(3, out1 + d + 16, row_bytes);
  }
}

void values(const float* weights, int64_t stride, int32_t rows, const BfloatBlock* blocks,
            int32_t num_blocks, int32_t head_dim, int32_t parts, float* out) {
  alignas(64) uint16_t rounded[kBlocksAtOnce * 2 * kWeights];
  for (int32_t first = 0; first < num_blocks; first += kBlocksAtOnce, blocks += kBlocksAtOnce) {
    const int32_t count = num_blocks - first < kBlocksAtOnce ? num_blocks - first : kBlocksAtOnce;
    for (int32_t i = 0; i < count; ++i) {
      round_weights(weights + blocks[i].column, stride, rows, blocks[i].inside, parts,
                    rounded + i * parts * kWeights);
    }
    // The compiler does not know that loads of tiles read memory.
    __asm__ volatile("" ::: "memory");
    for (int32_t d = 0; d < head_dim; d += 32) {
      if (rows > kTileRows) {
        values_of<2>(rounded, blocks, count, d, head_dim, parts, out);
      } else {
        values_of<1>(rounded, blocks, count, d, head_dim, parts, out);
      }
    }
  }
}

}  // namespace

extern const BfloatMath kBfloatMath;
const BfloatMath kBfloatMath = {begin, end, split, scores, values};

}  // namespace sparse_attn::cpu::amx
