// Products of bfloat16 with float32 sums on tiles of registers (AMX): scores of 32 query rows with
// panels of keys, and O += P v with P rounded to bfloat16, as torch's own bfloat16 attention does.
// Layouts as in bfloat_rows.h. Subnormal numbers count as 0. Compiled where the compiler knows AMX
// and chosen by isa.cpp.
#include <immintrin.h>

#include "cpu/vector/vector_math.h"

namespace sparse_attn::cpu::amx {
namespace {

constexpr int32_t kTileRows = 16;  // of every tile; a row is 64 bytes
constexpr int32_t kPairs = 32;     // elements that a tile of the inner side takes in a row

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

/// Scores of 16 kRowTiles rows with the keys of kColumnTiles panels.
template <int kRowTiles, int kColumnTiles>
void scores_of(const uint16_t* query, int32_t head_dim, const uint16_t* panels, float* scores,
               int64_t stride) {
  constexpr bool kTwoRows = kRowTiles == 2, kTwoColumns = kColumnTiles == 2;
  int64_t query_bytes = head_dim * int64_t{2}, score_bytes = stride * 4;
  const uint16_t* second_panel = panels + int64_t{kPanelKeys} * head_dim;
  _tile_zero(0);
  if constexpr (kTwoColumns) _tile_zero(1);
  if constexpr (kTwoRows) _tile_zero(2);
  if constexpr (kTwoRows && kTwoColumns) _tile_zero(3);
  for (int32_t d = 0; d < head_dim; d += kPairs) {
    _tile_loadd(4, query + d, query_bytes);
    _tile_loadd(6, panels + d * kPanelKeys, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kTwoColumns) {
      _tile_loadd(7, second_panel + d * kPanelKeys, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kTwoRows) {
      _tile_loadd(5, query + kTileRows * head_dim + d, query_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kTwoColumns) _tile_dpbf16ps(3, 5, 7);
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

template <int kRowTiles>
void scores_with(const uint16_t* query, int32_t head_dim, const uint16_t* panels,
                 int32_t num_panels, float* scores, int64_t stride) {
  int32_t panel = 0;
  for (; panel + 2 <= num_panels; panel += 2) {
    scores_of<kRowTiles, 2>(query, head_dim, panels + int64_t{panel} * kPanelKeys * head_dim,
                            scores + panel * kPanelKeys, stride);
  }
  if (panel == num_panels) return;
  scores_of<kRowTiles, 1>(query, head_dim, panels + int64_t{panel} * kPanelKeys * head_dim,
                          scores + panel * kPanelKeys, stride);
}

void scores(const uint16_t* query, int32_t rows, int32_t head_dim, const uint16_t* panels,
            int32_t num_panels, float* scores, int64_t stride) {
  if (rows > kTileRows) {
    scores_with<2>(query, head_dim, panels, num_panels, scores, stride);
  } else {
    scores_with<1>(query, head_dim, panels, num_panels, scores, stride);
  }
}

/// The weights of the blocks, rounded to bfloat16, a block's 32 after the other's.
void round_weights(const float* weights, int64_t stride, int32_t rows, const BfloatBlock* blocks,
                   int32_t num_blocks, uint16_t* rounded) {
  for (int32_t row = 0; row < rows; ++row, weights += stride) {
    for (int32_t i = 0; i < num_blocks; ++i, rounded += kBfloatRows) {
      Span inside = blocks[i].inside;
      uint64_t below = (uint64_t{1} << inside.end) - 1;
      uint32_t lanes = static_cast<uint32_t>(below & ~((uint64_t{1} << inside.begin) - 1));
      const float* source = weights + blocks[i].column;
      __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(lanes), source);
      __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(lanes >> 16), source + 16);
      __m512bh both = _mm512_cvtne2ps_pbh(high, low);
      __builtin_memcpy(rounded, &both, sizeof(both));
    }
  }
}

/// 16 kRowTiles rows and 32 elements of out += P v.
template <int kRowTiles>
void values_of(const uint16_t* weights, const BfloatBlock* blocks, int32_t num_blocks, int32_t d,
               int32_t head_dim, float* out) {
  constexpr bool kTwoRows = kRowTiles == 2;
  int64_t weight_stride = int64_t{num_blocks} * kBfloatRows;
  int64_t row_bytes = head_dim * int64_t{4};  // of out, and of a pair of values
  float* out1 = out + kTileRows * head_dim;
  _tile_loadd(0, out + d, row_bytes);
  _tile_loadd(1, out + d + 16, row_bytes);
  if constexpr (kTwoRows) {
    _tile_loadd(2, out1 + d, row_bytes);
    _tile_loadd(3, out1 + d + 16, row_bytes);
  }
  for (int32_t i = 0; i < num_blocks; ++i) {
    const uint16_t* weight = weights + i * kBfloatRows;
    _tile_loadd(4, weight, weight_stride * 2);
    _tile_loadd(6, blocks[i].values + 2 * d, row_bytes);
    _tile_loadd(7, blocks[i].values + 2 * d + 32, row_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTwoRows) {
      _tile_loadd(5, weight + kTileRows * weight_stride, weight_stride * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
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
            int32_t num_blocks, int32_t head_dim, uint16_t* rounded, float* out) {
  round_weights(weights, stride, rows, blocks, num_blocks, rounded);
  // The compiler does not know that loads of tiles read memory.
  __asm__ volatile("" ::: "memory");
  for (int32_t d = 0; d < head_dim; d += 32) {
    if (rows > kTileRows) {
      values_of<2>(rounded, blocks, num_blocks, d, head_dim, out);
    } else {
      values_of<1>(rounded, blocks, num_blocks, d, head_dim, out);
    }
  }
}

}  // namespace

extern const BfloatMath kBfloatMath;
const BfloatMath kBfloatMath = {begin, end, scores, values};

}  // namespace sparse_attn::cpu::amx
