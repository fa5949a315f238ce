// From q.k to what the softmax takes: the pattern's mask, and scale, softcap and attn_mask where
// there is more than a positive scale. Lane 4 g + t holds rows g and g + 8 of the tile.
#pragma once

#include "../common/mask.cuh"
#include "row_tile.cuh"

namespace sparse_attn::cuda::decode {

/// Whether scores need no more than a positive scale.
__device__ __forceinline__ bool scale_suffices(const AttentionParams& params) {
  return params.scale > 0.0f && params.softcap == 0.0f && params.mask.kind == MaskKind::kNone;
}

/// Row of the tile that the lane holds in half `h`.
__device__ __forceinline__ int lane_row(int h) { return threadIdx.x % 32 / 4 + 8 * h; }

/// score = function(score, h, column) for the lane's scores. The loop stays rolled, and a chain of
/// selections keeps the scores in registers: what runs here is rare and long.
template <typename Config, typename Function>
__device__ __forceinline__ void change_scores(typename Config::Scores& rS,
                                              const Function& function) {
#pragma unroll 1
  for (int i = 0; i < 4 * Config::NT; ++i) {
    float score = 0.0f;
#pragma unroll
    for (int e = 0; e < 4 * Config::NT; ++e) score = e == i ? rS[0][e / 4][e % 4] : score;
    int column = i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2;
    score = function(score, i % 4 / 2, column);
#pragma unroll
    for (int e = 0; e < 4 * Config::NT; ++e) {
      rS[0][e / 4][e % 4] = e == i ? score : rS[0][e / 4][e % 4];
    }
  }
}

/// Scores that the pattern does not allow become -inf.
template <typename Config>
__device__ __forceinline__ void mask_scores(typename Config::Scores& rS, const Pattern& pattern,
                                            const TileState<Config>& state, const Step& step) {
  change_scores<Config>(rS, [&](float score, int h, int column) {
    const TileRow& row = state.rows[lane_row(h)];
    const Seen& seen = step.lead ? row.lead : row.main;
    return sees(pattern, state.work.slice, seen, step.start + column) ? score : -INFINITY;
  });
}

/// scale * q.k, softcap, attn_mask; scores of -inf stay so, and their mask is not read.
template <typename Config>
__device__ __forceinline__ void transform_scores(typename Config::Scores& rS,
                                                 const AttentionParams& params,
                                                 const Pattern& pattern,
                                                 const TileState<Config>& state, const Step& step) {
  const Work& work = state.work;
  const View view = step.lead ? pattern.lead : work.slice.keys;
  change_scores<Config>(rS, [&](float score, int h, int column) {
    int32_t j = view.at(step.start + column);
    int r = lane_row(h);
    if (score == -INFINITY || r >= work.rows || j >= params.seq_kv) return score;
    score = capped(params.scale * score, params.softcap);
    if (params.mask.kind != MaskKind::kNone) {
      score += mask_bias(params.mask, work.batch, state.rows[r].head, state.rows[r].query, j);
    }
    return score;
  });
}

}  // namespace sparse_attn::cuda::decode
