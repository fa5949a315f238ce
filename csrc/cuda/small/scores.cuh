// Which keys a lane's rows see, as a bit for each of its scores, and what becomes of a product q.k
// before the softmax.
#pragma once

#include "../common/mask.cuh"
#include "../common/score_fragment.cuh"
#include "../common/tanh.cuh"
#include "work.cuh"

namespace sparse_attn::cuda::small {

/// What a row of any range sees of the lane's keys, a bit for each, asked key by key. A call, so
/// that its registers are its own.
template <typename Config>
__device__ __noinline__ uint32_t bits_of_pattern(const AttentionParams& params, int32_t batch,
                                                 int32_t i, Interval bounds) {
  const Sequence sequence = params.sequences.of(batch);
  const Query query = make_query(params.pattern, i, sequence, bounds);
  uint32_t bits = 0;
#pragma unroll 1
  for (int k = 0; k < Config::kRowScores; ++k) {
    const int32_t j = lane_column(k);
    const bool seen = j < sequence.keys && sees_key(params.pattern, query, j);
    bits |= static_cast<uint32_t>(seen) << k;
  }
  return bits;
}

/// With these alone each row sees an interval of the keys, but for those that attn_mask hides.
constexpr Features kIntervals = kWindowsAlone.without(Features::of(Feature::kDilation));

/// What a row of the tile sees of the lane's keys.
template <typename Config, bool kPlain>
__device__ __forceinline__ uint32_t seen_bits(const AttentionParams& params, const Work& work,
                                              int r) {
  if (!work.has(r)) return 0;
  const int32_t i = work.query(r);
  const Interval bounds = params.scores.bounds.row(work.batch, work.head, i, params.problem.seq_kv);
  if (!kPlain && !params.features.within(kIntervals)) {
    return bits_of_pattern<Config>(params, work.batch, i, bounds);
  }
  Pattern pattern = params.pattern;
  // Constants for what is not there.
  pattern.dilation = 1;
  pattern.lead = {};
  pattern.lead_keys = nullptr;
  pattern.global_count = 0;
  pattern.global_bits = nullptr;
  const Query query = make_query(pattern, i, work.sequence, bounds);
  return column_bits<Config::KEYS>(query.row.keys);
}

/// Whether no pattern hides a key of its sequence from a row.
__device__ __forceinline__ bool sees_all(const AttentionParams& params) {
  constexpr Features kHideNone = kAllKeys.without(Features::of(Feature::kKeyBounds));
  return !params.pattern.causal && params.features.within(kHideNone);
}

/// function(score, h, k) for the lane's scores.
template <int kCount, typename Function>
__device__ __forceinline__ void for_each_score(float (&s)[kCount], const Function& function) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int k = 0; k < kCount / 2; ++k) function(s[score_at(h, k)], h, k);
  }
}

/// Adds what load(index) reads of attn_mask; scores of -inf stay, whatever it holds.
template <typename Config, typename Load>
__device__ __forceinline__ void add_mask(typename Config::ScoreFragment& s,
                                         const AttentionParams& params, const Work& work,
                                         const Load& load) {
  const MaskView& mask = params.scores.mask;
  const int64_t base = work.batch * mask.stride_b + work.head * mask.stride_h;
  const int32_t last = params.problem.seq_kv - 1;
  if (last < 0) return;  // an empty mask has no memory
  int64_t row[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    row[h] = base + imin(work.query(lane_row(h)), params.problem.seq_q - 1) * mask.stride_q;
  }
  constexpr int kKeysAtOnce = 8;  // on their way
  static_assert(Config::kRowScores % kKeysAtOnce == 0);
#pragma unroll
  for (int first = 0; first < Config::kRowScores; first += kKeysAtOnce) {
    float bias[kKeysAtOnce][2];
#pragma unroll
    for (int k = 0; k < kKeysAtOnce; ++k) {
      const int64_t of_key = imin(lane_column(first + k), last) * mask.stride_k;
#pragma unroll
      for (int h = 0; h < 2; ++h) bias[k][h] = load(row[h] + of_key);
    }
#pragma unroll
    for (int i = 0; i < 2 * kKeysAtOnce; ++i) {
      float& score = s[score_at(i % 2, first + i / 2)];
      score = score == -INFINITY ? score : score + bias[i / 2][i % 2];
    }
  }
}

/// scale * q.k, softcap, ALiBi, attn_mask.
template <typename Config>
__device__ __forceinline__ void transform_scores(typename Config::ScoreFragment& s,
                                                 const AttentionParams& params, const Work& work) {
  const Scores& scores = params.scores;
  const float scale = scores.scale, cap = scores.softcap;
  if (cap != 0.0f) {
    const float rate = 1.0f / cap;
    for_each_score(s, [&](float& score, int, int) {
      score = score == -INFINITY ? score : cap * tanh_rational(scale * score * rate);
    });
  } else {
    for_each_score(
        s, [&](float& score, int, int) { score = score == -INFINITY ? score : scale * score; });
  }
  if (scores.alibi.slopes != nullptr) {
    const float slope = scores.alibi.slope(work.batch, work.head);
    for_each_score(s, [&](float& score, int h, int k) {
      const int32_t position = work.query(lane_row(h)) + work.sequence.offset;
      score = score == -INFINITY ? score : score + alibi_bias(slope, position, lane_column(k));
    });
  }
  with_mask(scores.mask.kind, scores.mask.data,
            [&](const auto& load) { add_mask<Config>(s, params, work, load); });
}

}  // namespace sparse_attn::cuda::small
