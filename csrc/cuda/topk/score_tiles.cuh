// What the ranking pass of token top-k asks of an engine, which computes the scores: a Source of
// score tiles, here mma.sync's (portable/topk_scores.cuh) or wgmma's (hopper/topk_scores.cuh).
//
//   Config   BLOCK_Q, BLOCK_KV, and what common/score_fragment.cuh reads
//   tile     the query tile: params, work, lane_keys(), num_steps(), keys_of_step(at),
//            key_position(step, column), row_index(r)
//   visit(stride, function)
//            calls function(rS, step) for the warp's part of visited tiles: rS = Q K^T, -inf where
//            not allowed. Nothing is scaled: a positive scale changes no order.
//   visit_straight(stride, function)
//            the same for a function without branches, for which a source may do more at once
#pragma once

#include "../../interval.h"

namespace sparse_attn::cuda::topk {

/// Which of a query tile's steps are visited: every `step`-th.
struct Stride {
  int32_t step = 1;

  /// At least `least` of `steps` steps, evenly spread; all where there are fewer.
  __device__ static Stride sample(int32_t steps, int32_t least) { return {imax(steps / least, 1)}; }
  __device__ __forceinline__ int32_t first() const { return step / 2; }
};

}  // namespace sparse_attn::cuda::topk
