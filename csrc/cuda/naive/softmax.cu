// Each row of scores becomes its softmax, in place: top-k on the scaled scores first, then softcap
// and the additive mask, then exp and the sum, with the sink logit in the denominator only. Writes
// lse.
#include "../common/launch.cuh"
#include "../common/mask.cuh"
#include "../common/radix_select.cuh"
#include "scored_heads.cuh"

namespace sparse_attn::cuda::naive {
namespace {

constexpr int kRowThreads = 256;
constexpr int kWarps = kRowThreads / 32;

template <typename Combine>
__device__ float reduce_row(float value, const Combine& combine) {
  __shared__ float partial[kWarps];
  for (int step = 16; step > 0; step /= 2) {
    value = combine(value, __shfl_xor_sync(~0u, value, step));
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  value = partial[0];
  for (int warp = 1; warp < kWarps; ++warp) value = combine(value, partial[warp]);
  return value;
}

/// The larger one, or NaN: fmaxf would drop it.
__device__ float larger(float a, float b) { return a > b || isnan(a) ? a : b; }

__device__ Threshold find_row_threshold(const float* scores, int32_t keys, int32_t topk) {
  __shared__ SelectStorage storage;
  auto key = [&](int32_t j) { return scores[j] == -INFINITY ? 0u : ordered_key(scores[j]); };
  return find_threshold(key, keys, topk, storage);
}

__global__ void __launch_bounds__(kRowThreads) softmax_rows(const ScoredHeads scored) {
  const AttentionParams& params = scored.params;
  int64_t index = blockIdx.x / params.problem.seq_q;
  int32_t i = static_cast<int32_t>(blockIdx.x % params.problem.seq_q);
  int64_t batch = scored.batch(index);
  int64_t head = scored.head(index);
  const Sequence sequence = scored.sequence(index);
  if (i >= sequence.rows) return;
  float* scores = scored.row(index, i);
  int32_t topk = params.pattern.topk;
  Threshold threshold;
  if (topk > 0) threshold = find_row_threshold(scores, sequence.keys, topk);

  const int32_t position = i + sequence.offset;
  float m = -INFINITY;
  for (int32_t j = threadIdx.x; j < sequence.keys; j += kRowThreads) {
    float score = scores[j];
    if (score == -INFINITY) continue;
    bool kept = topk == 0 || threshold.keeps(ordered_key(score), j);
    score = kept ? capped(score, params.scores.softcap) +
                       params.scores.alibi.bias(batch, head, position, j) +
                       mask_bias(params.scores.mask, batch, head, i, j)
                 : -INFINITY;
    scores[j] = score;
    m = larger(m, score);
  }
  m = reduce_row(m, larger);
  bool empty = m == -INFINITY;

  float l = 0.0f;
  for (int32_t j = threadIdx.x; j < sequence.keys; j += kRowThreads) {
    l += empty ? 0.0f : expf(scores[j] - m);
  }
  l = reduce_row(l, [](float a, float b) { return a + b; });

  // The sink may exceed every score, so it takes part in the maximum.
  float weight = empty ? 0.0f : 1.0f / l;
  if (params.scores.sink_logits != nullptr && !empty) {
    float sink = params.scores.sink_logits[head];
    float top = fmaxf(m, sink);
    weight = expf(m - top) / (l * expf(m - top) + (sink == top ? 1.0f : expf(sink - top)));
  }
  for (int32_t j = threadIdx.x; j < sequence.keys; j += kRowThreads) {
    scores[j] = empty ? 0.0f : expf(scores[j] - m) * weight;
  }
  if (params.outputs.lse != nullptr && threadIdx.x == 0) {
    params.outputs.lse[batch * params.outputs.lse_stride_b + head * params.outputs.lse_stride_h +
                       (sequence.first_row + i) * params.outputs.lse_stride_s] =
        empty ? -INFINITY : m + logf(l);
  }
}

}  // namespace

Status launch_softmax(const ScoredHeads& scored) {
  const AttentionParams& params = scored.params;
  int64_t rows = scored.heads * params.problem.seq_q;
  softmax_rows<<<static_cast<uint32_t>(rows), kRowThreads, 0, to_stream(params.stream)>>>(scored);
  return launched();
}

}  // namespace sparse_attn::cuda::naive
