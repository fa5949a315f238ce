// The merge of a row's chunks, a thread a column. Launched as a dependent of the kernel that wrote
// the chunks, where devices know that, which hides its launch under that one's end.
#include "../common/launch.cuh"
#include "../common/plain_scores.h"
#include "../common/ptx/grid.cuh"
#include "chunk_join.cuh"
#include "launch.h"

namespace sparse_attn::cuda::portable {
namespace {

constexpr int32_t kMostThreads = 256;  // the largest head dim

__global__ void __launch_bounds__(kMostThreads)
    merge_kernel(const __grid_constant__ AttentionParams params,
                 const __grid_constant__ PartialRows partials) {
  constexpr int32_t kAtOnce = 8;  // chunks whose loads are in flight together
  ptx::wait_for_primary();
  const int64_t row = blockIdx.x;
  const int64_t head_index = row / partials.rows;
  const int64_t query = row - head_index * partials.rows;
  const int64_t batch = head_index / params.problem.heads_q;
  const int64_t head = head_index - batch * params.problem.heads_q;
  const Sequence sequence = params.sequences.of(batch);
  if (query >= sequence.rows) return;
  const int32_t chunks = partials.chunks[row].count;
  if (chunks == 1) return;  // the kernel has stored the result

  const auto d = static_cast<int32_t>(threadIdx.x);
  const bool exists = d < params.problem.value_dim;
  const float2* states = partials.state + partials.at(row, 0);
  const float* parts = partials.out + partials.at(row, 0) * partials.columns + (exists ? d : 0);
  const Exponent exponent = {kLog2e, !has_plain_scores(params)};
  RowSum sum;
  float out = 0.0f;
#pragma unroll 1
  for (int32_t begin = 0; begin < chunks; begin += kAtOnce) {
    float2 state[kAtOnce];
    float part[kAtOnce];
#pragma unroll
    for (int32_t i = 0; i < kAtOnce; ++i) {
      if (begin + i >= chunks) break;
      state[i] = states[begin + i];
      part[i] = parts[int64_t{begin + i} * partials.columns];
    }
#pragma unroll
    for (int32_t i = 0; i < kAtOnce; ++i) {
      if (begin + i >= chunks) break;
      out = sum.add({state[i].x, state[i].y}, exponent).sum(out, part[i]);
    }
  }

  const SoftmaxState<1, true> state = state_of(sum, exponent);
  const float sink =
      params.scores.sink_logits == nullptr ? -INFINITY : params.scores.sink_logits[head];
  const int64_t i = sequence.first_row + query;
  if (exists) {
    const TensorView& to = params.outputs.out;
    const float weight = params.value_scale(batch, head) * state.weight(0, 0, sink);
    static_cast<float*>(to.data)[batch * to.stride_b + head * to.stride_h + i * to.stride_s + d] =
        out * weight;
  }
  if (params.outputs.lse != nullptr && d == 0) {
    params.outputs.lse[batch * params.outputs.lse_stride_b + head * params.outputs.lse_stride_h +
                       i * params.outputs.lse_stride_s] = state.lse(0, 0);
  }
}

}  // namespace

Status join_chunks(const AttentionParams& params, const PartialRows& partials) {
  const LaunchShape shape = {static_cast<uint32_t>(int64_t{partials.heads} * partials.rows),
                             static_cast<uint32_t>(ceil_div(params.problem.value_dim, 32) * 32), 0,
                             to_stream(params.stream)};
  return launch_dependent(merge_kernel, shape, params, partials);
}

}  // namespace sparse_attn::cuda::portable
