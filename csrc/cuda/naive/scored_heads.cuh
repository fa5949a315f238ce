// What the naive kernels share: the parameters, and the part of the (batch, head) pairs whose
// scores fit the workspace at once.
#pragma once

#include "../../params.h"

namespace sparse_attn::cuda::naive {

/// Scores [heads, Sq, Skv] of `heads` consecutive (batch, head) pairs from `first`.
struct ScoredHeads {
  AttentionParams params;
  float* scores = nullptr;
  int64_t first = 0;
  int64_t heads = 0;

  __device__ int64_t batch(int64_t index) const { return (first + index) / params.problem.heads_q; }
  __device__ int64_t head(int64_t index) const { return (first + index) % params.problem.heads_q; }
  __device__ Sequence sequence(int64_t index) const { return params.sequences.of(batch(index)); }
  __device__ float* row(int64_t index, int32_t i) const {
    return scores + (index * params.problem.seq_q + i) * params.problem.seq_kv;
  }
};

/// scores = scale * q.k where the pattern, the bounds and attn_mask allow it, else -inf.
Status launch_scores(const ScoredHeads& scored);
/// The softmax of every row in place, with softcap, additive mask, top-k and sink logits; lse.
Status launch_softmax(const ScoredHeads& scored);
/// out = P value.
Status launch_output(const ScoredHeads& scored);

}  // namespace sparse_attn::cuda::naive
