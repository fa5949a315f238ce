// From q.k to what the softmax takes: the pattern's mask, and scale, softcap and attn_mask where
// there is more than a positive scale. Lane 4 g + t holds rows g and g + 8 of each 16 of the tile.
#pragma once

#include "../common/mask.cuh"
#include "../common/score_fragment.cuh"
#include "../common/tanh.cuh"
#include "row_tile.cuh"

namespace sparse_attn::cuda::decode {

/// Row of the tile that the lane holds in half `h` of fragment `mt`: each warp has all rows.
__device__ __forceinline__ int lane_row(int mt, int h) {
  return mt * kFragmentRows + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * h;
}

/// Scores that the pattern does not allow become -inf. The loop stays rolled, and a chain of
/// selections keeps the scores in registers: what runs here is rare and long.
template <typename Config>
__device__ __forceinline__ void mask_scores(typename Config::ScoreFragment& rS,
                                            const Pattern& pattern, const TileState<Config>& state,
                                            const Step& step) {
  constexpr int kScores = 4 * Config::NT;  // of a fragment of rows
#pragma unroll 1
  for (int i = 0; i < kScores * Config::MT; ++i) {
    const TileRow& row = state.rows[lane_row(i / kScores, i % 4 / 2)];
    const Seen& seen = step.lead ? row.lead : row.main;
    const int k = i % kScores / 4 * 2 + i % 2;  // of the row
    if (sees(pattern, state.work.slice, seen, step.start + lane_column(k))) continue;
#pragma unroll
    for (int e = 0; e < kScores * Config::MT; ++e) {
      float& score = rS[e / kScores][e % kScores / 4][e % 4];
      score = e == i ? -INFINITY : score;
    }
  }
}

/// The same where a row sees one interval of keys: so little that the loop need not be rolled.
template <typename Config>
__device__ __forceinline__ void mask_by_window(typename Config::ScoreFragment& rS,
                                               const TileState<Config>& state, const Step& step) {
#pragma unroll
  for (int row = 0; row < 2 * Config::MT; ++row) {
    const Interval keys = state.rows[lane_row(row / 2, row % 2)].main.second;
#pragma unroll
    for (int k = 0; k < 2 * Config::NT; ++k) {
      float& score = rS[row / 2][k / 2][row % 2 * 2 + k % 2];
      score = keys.contains(step.start + lane_column(k)) ? score : -INFINITY;
    }
  }
}

/// Scores of the pairs that the bits of a partial block leave out become -inf.
template <typename Config>
__device__ __forceinline__ void mask_by_bits(typename Config::ScoreFragment& rS,
                                             const BlockList& list, const TileState<Config>& state,
                                             const Step& step) {
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

/// Loads attn_mask, whose elements load(index) reads. All are on their way at once, those of rows
/// and keys that do not exist too, which are others' again.
template <typename Config, typename Load>
__device__ __forceinline__ void load_mask(typename Config::ScoreFragment& bias,
                                          const AttentionParams& params,
                                          const TileState<Config>& state, const Step& step,
                                          const Load& load) {
  const Work& work = state.work;
  const MaskView& mask = params.scores.mask;
  const View view = step.lead ? work.slice.lead.view : work.slice.keys;
  int64_t of_row[2 * Config::MT];
#pragma unroll
  for (int row = 0; row < 2 * Config::MT; ++row) {
    const TileRow& own = state.rows[imin(lane_row(row / 2, row % 2), work.rows - 1)];
    of_row[row] = work.batch * mask.stride_b + own.head * mask.stride_h + own.query * mask.stride_q;
  }
  for_each_score<Config>(bias, [&](float& term, int mt, int h, int k) {
    const int32_t j = view.at_most(step.start + lane_column(k), params.problem.seq_kv - 1);
    term = load(of_row[2 * mt + h] + j * mask.stride_k);
  });
}

/// Adds attn_mask to the scores that are not -inf.
template <typename Config, typename Load>
__device__ __forceinline__ void add_mask(typename Config::ScoreFragment& rS,
                                         const AttentionParams& params,
                                         const TileState<Config>& state, const Step& step,
                                         const Load& load) {
  typename Config::ScoreFragment bias;
  load_mask<Config>(bias, params, state, step, load);
#pragma unroll
  for (int i = 0; i < 4 * Config::MT * Config::NT; ++i) {
    const int mt = i / 4 / Config::NT, nt = i / 4 % Config::NT;
    float& score = rS[mt][nt][i % 4];
    score = score == -INFINITY ? score : score + bias[mt][nt][i % 4];
  }
}

/// scale * q.k, softcap, ALiBi, attn_mask; scores of -inf stay so.
template <typename Config>
__device__ __forceinline__ void transform_scores(typename Config::ScoreFragment& rS,
                                                 const AttentionParams& params,
                                                 const TileState<Config>& state, const Step& step) {
  const Work& work = state.work;
  const Scores& scores = params.scores;
  const float scale = params.score_scale(work.batch, work.first_head);
  const float cap = scores.softcap;
  if (cap != 0.0f) {
    const float rate = 1.0f / cap;
    for_each_score<Config>(rS, [&](float& score, int, int, int) {
      score = score == -INFINITY ? score : cap * tanh_rational(scale * score * rate);
    });
  } else {
    for_each_score<Config>(rS, [&](float& score, int, int, int) {
      score = score == -INFINITY ? score : scale * score;
    });
  }
  if (scores.alibi.slopes != nullptr) {
    const View view = step.lead ? work.slice.lead.view : work.slice.keys;
    float slope[2 * Config::MT];
    int32_t position[2 * Config::MT];
#pragma unroll
    for (int row = 0; row < 2 * Config::MT; ++row) {
      const int r = imin(lane_row(row / 2, row % 2), work.rows - 1);
      slope[row] = scores.alibi.slope(work.batch, state.rows[r].head);
      position[row] = state.rows[r].query + work.slice.offset;
    }
    for_each_score<Config>(rS, [&](float& score, int mt, int h, int k) {
      const int row = 2 * mt + h;
      const float bias =
          alibi_bias(slope[row], position[row], view.at(step.start + lane_column(k)));
      score = score == -INFINITY ? score : score + bias;
    });
  }
  with_mask(scores.mask.kind, scores.mask.data,
            [&](const auto& load) { add_mask<Config>(rS, params, state, step, load); });
}

}  // namespace sparse_attn::cuda::decode
