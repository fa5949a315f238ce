// What the dense kernel for token top-k (Config kTop) makes of scores: those below their row's
// threshold become -inf. Both passes see the same q.k bit by bit.
#pragma once

#include "mask.cuh"
#include "topk_bins.cuh"

namespace sparse_attn::cuda::portable {

template <typename Config>
struct KeptScores {
  float least[Config::MT][2];   // of the lane's rows
  bool tied;                    // in some row of the warp not every key of that score is kept
  const Threshold* thresholds;  // of the head

  __device__ __forceinline__ Threshold threshold(const QueryTile<Config>& tile, int row) const {
    int r = imin(lane_row<Config>(row / 2, row % 2), tile.work.rows.size() - 1);
    return thresholds[tile.work.slice.rows.at(tile.work.rows.begin + r)];
  }

  /// `all` is [B, Hq, Sq].
  __device__ __forceinline__ void load(const QueryTile<Config>& tile, const Threshold* all) {
    const Work& work = tile.work;
    thresholds = all + (int64_t{work.batch} * tile.params.heads_q + work.head) * tile.params.seq_q;
    bool some = false;
#pragma unroll
    for (int row = 0; row < 2 * Config::MT; ++row) {
      Threshold own = threshold(tile, row);
      least[row / 2][row % 2] = score_of(own.key);
      some |= own.last != kUnlimited;
    }
    tied = __any_sync(~0u, some);
  }

  __device__ __forceinline__ void drop_others(typename Config::Scores& rS,
                                              const QueryTile<Config>& tile,
                                              const typename Config::Step& step) const {
    for_each_score<Config>(rS, [&](float& score, int mt, int h, int) {
      score = score < least[mt][h] ? -INFINITY : score;  // NaN stays
    });
    if (!tied) return;
    int32_t last[Config::MT][2];
#pragma unroll
    for (int row = 0; row < 2 * Config::MT; ++row) {
      last[row / 2][row % 2] = threshold(tile, row).last;
    }
    for_each_score<Config>(rS, [&](float& score, int mt, int h, int k) {
      int32_t j = tile.key_position(step, lane_column(k));
      if (score == least[mt][h] && j > last[mt][h]) score = -INFINITY;
    });
  }
};

}  // namespace sparse_attn::cuda::portable
