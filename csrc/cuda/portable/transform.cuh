// From q.k to what the softmax takes, where that is more than a positive scale: scale * q.k, the
// top-k threshold, softcap, attn_mask. Scores of -inf are not allowed and stay so.
#pragma once

#include "../common/mask.cuh"
#include "../common/radix_select.cuh"
#include "../common/score_fragment.cuh"
#include "../common/tanh.cuh"
#include "query_tile.cuh"

namespace sparse_attn::cuda::portable {

template <typename Config>
__device__ __forceinline__ void scale_scores(typename Config::ScoreFragment& rS, float scale) {
  for_each_score<Config>(
      rS, [&](float& score, int, int, int) { score = score == -INFINITY ? score : scale * score; });
}

/// Keeps the scores at or above their row's threshold, of [B, Hq, Sq].
template <typename Config>
__device__ __forceinline__ void keep_top(typename Config::ScoreFragment& rS,
                                         const QueryTile<Config>& tile,
                                         const typename Config::Step& step,
                                         const Threshold* thresholds) {
  const Work& work = tile.work;
  thresholds +=
      (int64_t{work.batch} * tile.params.problem.heads_q + work.head) * tile.params.problem.seq_q;
  Threshold threshold[Config::MT][2];
#pragma unroll
  for (int row = 0; row < 2 * Config::MT; ++row) {
    int r = lane_row<Config>(row / 2, row % 2);
    if (r >= work.rows.size()) continue;
    threshold[row / 2][row % 2] = thresholds[work.slice.rows.at(work.rows.begin + r)];
  }
  for_each_score<Config>(rS, [&](float& score, int mt, int h, int k) {
    int32_t j = tile.key_position(step, lane_column(k));
    if (!threshold[mt][h].keeps(ordered_key(score), j)) score = -INFINITY;
  });
}

/// Adds attn_mask, or only forbids what it forbids. Scores of -inf stay, whatever the mask holds.
template <bool kForbidOnly, typename Config, typename Load>
__device__ __forceinline__ void join_mask(typename Config::ScoreFragment& rS,
                                          const QueryTile<Config>& tile,
                                          const typename Config::Step& step, const Load& load) {
  const MaskView& mask = tile.params.scores.mask;
  int64_t base = tile.work.batch * mask.stride_b + tile.work.head * mask.stride_h;
#pragma unroll
  for (int row = 0; row < 2 * Config::MT; ++row) {
    int r = imin(lane_row<Config>(row / 2, row % 2), tile.work.rows.size() - 1);
    int64_t row_base = base + tile.work.slice.rows.at(tile.work.rows.begin + r) * mask.stride_q;
    float bias[2 * Config::NT];  // all on their way at once
#pragma unroll
    for (int k = 0; k < 2 * Config::NT; ++k) {
      bias[k] = load(row_base + tile.readable_key(step, lane_column(k)) * mask.stride_k);
    }
#pragma unroll
    for (int k = 0; k < 2 * Config::NT; ++k) {
      float& score = rS[row / 2][k / 2][row % 2 * 2 + k % 2];
      if (score != -INFINITY && (!kForbidOnly || bias[k] == -INFINITY)) score += bias[k];
    }
  }
}

template <bool kForbidOnly, typename Config>
__device__ __forceinline__ void join_mask(typename Config::ScoreFragment& rS,
                                          const QueryTile<Config>& tile,
                                          const typename Config::Step& step) {
  const MaskView& mask = tile.params.scores.mask;
  const void* data = mask.data;
  switch (mask.kind) {
    case MaskKind::kNone:
      return;
    case MaskKind::kBool:
      return join_mask<kForbidOnly, Config>(rS, tile, step, [&](int64_t at) {
        return static_cast<const uint8_t*>(data)[at] != 0 ? 0.0f : -INFINITY;
      });
    case MaskKind::kFloat32:
      return join_mask<kForbidOnly, Config>(
          rS, tile, step, [&](int64_t at) { return static_cast<const float*>(data)[at]; });
    default: {
      bool half = mask.kind == MaskKind::kFloat16;
      return join_mask<kForbidOnly, Config>(rS, tile, step, [&](int64_t at) {
        uint16_t bits = static_cast<const uint16_t*>(data)[at];
        return half ? __half2float(__ushort_as_half(bits)) : __uint_as_float(uint32_t{bits} << 16);
      });
    }
  }
}

/// Adds ALiBi's bias; scores of -inf stay.
template <typename Config>
__device__ __forceinline__ void add_alibi(typename Config::ScoreFragment& rS,
                                          const QueryTile<Config>& tile,
                                          const typename Config::Step& step) {
  const Work& work = tile.work;
  const float slope = tile.params.scores.alibi.slope(work.batch, work.head);
  int32_t position[Config::MT][2];
#pragma unroll
  for (int row = 0; row < 2 * Config::MT; ++row) {
    position[row / 2][row % 2] =
        work.slice.position(work.rows.begin + lane_row<Config>(row / 2, row % 2));
  }
  for_each_score<Config>(rS, [&](float& score, int mt, int h, int k) {
    const int32_t j = tile.key_position(step, lane_column(k));
    if (score != -INFINITY) score += alibi_bias(slope, position[mt][h], j);
  });
}

/// All of it, in the contract's order.
template <typename Config>
__device__ __forceinline__ void transform_scores(typename Config::ScoreFragment& rS,
                                                 const QueryTile<Config>& tile,
                                                 const typename Config::Step& step,
                                                 const Threshold* thresholds) {
  const AttentionParams& params = tile.params;
  scale_scores<Config>(rS, tile.score_scale());
  if (params.pattern.topk > 0) keep_top<Config>(rS, tile, step, thresholds);
  if (const float cap = params.scores.softcap; cap != 0.0f) {
    const float rate = 1.0f / cap;
    for_each_score<Config>(rS, [&](float& score, int, int, int) {
      const float own = Config::kFloat ? capped(score, cap) : cap * tanh_rational(score * rate);
      score = score == -INFINITY ? score : own;
    });
  }
  if (params.scores.alibi.slopes != nullptr) add_alibi<Config>(rS, tile, step);
  join_mask<false, Config>(rS, tile, step);
}

}  // namespace sparse_attn::cuda::portable
