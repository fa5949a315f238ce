// What the dense kernel for token top-k (Config kTop) does to scores: those below their row's
// threshold become -inf. Both passes see the same q.k bit by bit.
#pragma once

#include "../common/radix_select.cuh"
#include "../common/score_fragment.cuh"
#include "query_tile.cuh"

namespace sparse_attn::cuda::portable {

template <typename Config>
struct KeptScores {
  const Threshold* thresholds;  // [B, Hq, Sq]
  bool tied;                    // in some row of the warp not every key of the least score is kept

  /// Each warp keeps its rows' least scores in shared memory: the main loop has no registers left.
  __device__ __forceinline__ void load(const QueryTile<Config>& tile, const Threshold* all) {
    thresholds = all;
    const int r = threadIdx.x / 32 * Config::kWarpRows + threadIdx.x % Config::kWarpRows;
    const Threshold own = threshold(tile, r);
    least(tile)[r] = score_of(own.key);
    tied = __any_sync(~0u, own.last != kUnlimited);
  }

  __device__ __forceinline__ void drop_others(typename Config::ScoreFragment& rS,
                                              const QueryTile<Config>& tile,
                                              const typename Config::Step& step) const {
    float own[Config::MT][2];
#pragma unroll
    for (int row = 0; row < 2 * Config::MT; ++row) {
      own[row / 2][row % 2] = least(tile)[lane_row<Config>(row / 2, row % 2)];
    }
    for_each_score<Config>(rS, [&](float& score, int mt, int h, int) {
      score = score < own[mt][h] ? -INFINITY : score;  // NaN stays
    });
    if (!tied) return;
    int32_t last[Config::MT][2];
#pragma unroll
    for (int row = 0; row < 2 * Config::MT; ++row) {
      last[row / 2][row % 2] = threshold(tile, lane_row<Config>(row / 2, row % 2)).last;
    }
    for_each_score<Config>(rS, [&](float& score, int mt, int h, int k) {
      int32_t j = tile.key_position(step, lane_column(k));
      if (score == own[mt][h] && j > last[mt][h]) score = -INFINITY;
    });
  }

 private:
  /// [BLOCK_Q], after the tile's state.
  __device__ __forceinline__ static float* least(const QueryTile<Config>& tile) {
    return reinterpret_cast<float*>(reinterpret_cast<char*>(&tile.state) +
                                    Config::kShape.state_bytes());
  }

  __device__ __forceinline__ Threshold threshold(const QueryTile<Config>& tile, int r) const {
    return thresholds[tile.row_index(imin(r, tile.work.rows.size() - 1))];
  }
};

}  // namespace sparse_attn::cuda::portable
