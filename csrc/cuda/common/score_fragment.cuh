// Where a lane's scores stand in a tile: the layout of mma.sync's and wgmma's accumulators, rows of
// 16 and keys of 8 a fragment. `Config` has kWarpRows, MT, NT and ScoreFragment = float[MT][NT][4].
#pragma once

#include <cstdint>

#include "../../interval.h"

namespace sparse_attn::cuda {

/// Row of the tile that the lane holds in half `h` of fragment `mt`.
template <typename Config>
__device__ __forceinline__ int lane_row(int mt, int h) {
  return threadIdx.x / 32 * Config::kWarpRows + mt * 16 + h * 8 + threadIdx.x % 32 / 4;
}

/// Column of the tile of a lane's k-th score of a row.
__device__ __forceinline__ int lane_column(int k) {
  return k / 2 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + k % 2;
}

/// Bit k is set where the lane's k-th column, of a tile of kColumns, is one of `columns`.
template <int kColumns>
__device__ __forceinline__ uint32_t column_bits(Interval columns) {
  const int32_t own = threadIdx.x % 4 * 2;  // the lane's two of every 8
  auto first_ones = [&](int32_t column) {
    const int32_t c = imax(0, imin(column, kColumns));
    const int32_t count = c / 8 * 2 + imax(0, imin(c % 8 - own, 2));
    return count >= 32 ? ~0u : (1u << count) - 1;
  };
  return first_ones(columns.end) & ~first_ones(columns.begin);
}

/// Calls function(score, mt, h, k) for the lane's scores, k ascending with the column.
template <typename Config, typename Function>
__device__ __forceinline__ void for_each_score(typename Config::ScoreFragment& rS,
                                               const Function& function) {
#pragma unroll
  for (int mt = 0; mt < Config::MT; ++mt) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int k = 0; k < 2 * Config::NT; ++k) function(rS[mt][k / 2][2 * h + k % 2], mt, h, k);
    }
  }
}

}  // namespace sparse_attn::cuda
