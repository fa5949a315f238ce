// From q.k to what the softmax takes: the pattern's mask, and scale, softcap and attn_mask where
// there is more than a positive scale. Lane 4 g + t holds rows g and g + 8 of each 16 of the tile.
#pragma once

#include "../common/mask.cuh"
#include "row_tile.cuh"

namespace sparse_attn::cuda::decode {

/// Row of the tile that the lane holds in half `h` of fragment `mt`.
__device__ __forceinline__ int lane_row(int mt, int h) {
  return mt * kFragmentRows + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * h;
}

/// score = function(score, row, column) for the lane's scores. The loop stays rolled, and a chain
/// of selections keeps the scores in registers: what runs here is rare and long.
template <typename Config, typename Function>
__device__ __forceinline__ void change_scores(typename Config::Scores& rS,
                                              const Function& function) {
  constexpr int kScores = 4 * Config::NT;  // of a fragment of rows
  auto element = [&](int e) -> float& { return rS[e / kScores][e % kScores / 4][e % 4]; };
#pragma unroll 1
  for (int i = 0; i < kScores * Config::MT; ++i) {
    float score = 0.0f;
#pragma unroll
    for (int e = 0; e < kScores * Config::MT; ++e) score = e == i ? element(e) : score;
    int column = i % kScores / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2;
    score = function(score, lane_row(i / kScores, i % 4 / 2), column);
#pragma unroll
    for (int e = 0; e < kScores * Config::MT; ++e) element(e) = e == i ? score : element(e);
  }
}

/// Scores that the pattern does not allow become -inf.
template <typename Config>
__device__ __forceinline__ void mask_scores(typename Config::Scores& rS, const Pattern& pattern,
                                            const TileState<Config>& state, const Step& step) {
  change_scores<Config>(rS, [&](float score, int r, int column) {
    const TileRow& row = state.rows[r];
    const Seen& seen = step.lead ? row.lead : row.main;
    return sees(pattern, state.work.slice, seen, step.start + column) ? score : -INFINITY;
  });
}

/// Scores of the pairs that the bits of a partial block leave out become -inf.
template <typename Config>
__device__ __forceinline__ void mask_by_bits(typename Config::Scores& rS, const BlockList& list,
                                             const TileState<Config>& state, const Step& step) {
  const BlockBits bits = list.bits_at(step.bits);
  const int32_t key = step.start % list.block_kv;
  const int32_t first = state.work.list_row * list.block_q;
#pragma unroll
  for (int row = 0; row < 2 * Config::MT; ++row) {
    const uint32_t* words = bits.row(state.rows[lane_row(row / 2, row % 2)].query - first);
    const uint32_t word = words[key / 32] >> (key % 32 + threadIdx.x % 4 * 2);
#pragma unroll
    for (int k = 0; k < 2 * Config::NT; ++k) {
      float& score = rS[row / 2][k / 2][row % 2 * 2 + k % 2];
      if (!(word >> (k / 2 * 8 + k % 2) & 1)) score = -INFINITY;
    }
  }
}

/// scale * q.k, softcap, attn_mask; scores of -inf stay so, and their mask is not read.
template <typename Config>
__device__ __forceinline__ void transform_scores(typename Config::Scores& rS,
                                                 const AttentionParams& params,
                                                 const Pattern& pattern,
                                                 const TileState<Config>& state, const Step& step) {
  const Work& work = state.work;
  const float scale = params.score_scale(work.batch, work.first_head);
  const View view = step.lead ? work.slice.lead.view : work.slice.keys;
  change_scores<Config>(rS, [&](float score, int r, int column) {
    int32_t j = view.at(step.start + column);
    if (score == -INFINITY || r >= work.rows || j >= params.problem.seq_kv) return score;
    score = capped(scale * score, params.scores.softcap);
    score += params.scores.alibi.bias(work.batch, state.rows[r].head,
                                      state.rows[r].query + work.slice.offset, j);
    if (params.scores.mask.kind != MaskKind::kNone) {
      score +=
          mask_bias(params.scores.mask, work.batch, state.rows[r].head, state.rows[r].query, j);
    }
    return score;
  });
}

}  // namespace sparse_attn::cuda::decode
