// The merge of chunks: a thread block takes 32 columns of a strip, and a thread the four results
// that a thread of the kernel left in each chunk. Launched as a dependent of that kernel, which
// hides its launch under that one's end.
#include "../common/launch.cuh"
#include "../common/ptx/cp_async.cuh"
#include "../common/ptx/grid.cuh"
#include "../common/types.cuh"
#include "key_split.h"
#include "partials.cuh"
#include "softmax.cuh"

namespace sparse_attn::cuda::hopper {
namespace {

constexpr int kLanes = 32;
constexpr int kThreads = 128;
constexpr int kColumns = kThreads / kLanes * 8;  // of a thread block

/// What the merge needs of a call: a launch's parameters are fetched on demand.
struct Call {
  Outputs outputs;
  Sequences sequences;
  const float* sink_logits;
  ScaleView value_scale;
  int32_t heads_q, group, value_dim, dilation, classes;
};

/// The row of the tensors of a strip's row; -1 for none.
__device__ __forceinline__ int32_t tensor_row(const Call& call, const Sequence& sequence,
                                              int32_t batch, int32_t query) {
  if (query >= sequence.rows) return -1;
  if (call.outputs.rows != nullptr) query = call.outputs.rows[batch * sequence.rows + query];
  return query < 0 ? -1 : sequence.first_row + query;
}

/// How a chunk joins the sum before it, and its l, for a row.
struct alignas(16) Factor {
  Join join;
  float l;
};

// Short loops: each byte of code is fetched for the first time.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(const __grid_constant__ Call call, const __grid_constant__ Partials partials) {
  ptx::launch_dependents();
  // For the most chunks that there may be: blocks that took less would crowd the multiprocessors
  // that are free first.
  __shared__ float4 parts[kMostChunks][kThreads];
  __shared__ Factor factors[kMostChunks][kStripRows];
  const int32_t column_blocks = ceil_div(call.value_dim, kColumns);
  const int32_t strip = static_cast<int32_t>(blockIdx.x) / column_blocks;
  const int32_t column_block = static_cast<int32_t>(blockIdx.x) - strip * column_blocks;
  const int32_t lane = threadIdx.x % kLanes;
  const int32_t i = column_block * (kColumns / 8) + threadIdx.x / kLanes;
  const bool exists = i * 8 < call.value_dim;
  const int32_t problem = strip / partials.strips, class_idx = problem % call.classes;
  const int32_t head_index = partials.first_head + problem / call.classes;
  const int32_t batch = head_index / call.heads_q, head = head_index - batch * call.heads_q;
  const float4* from = partials.out_at(partials.at(strip, 0), exists ? i : 0, lane);
  const int32_t chunk_threads = partials.columns / 8 * kLanes;
  uint32_t to = ptx::shared_address(&parts[0][threadIdx.x]);
  ptx::wait_for_primary();
  const Sequence sequence = call.sequences.of(batch);
  const int32_t first = partials.first_query(sequence.origin, sequence.offset) +
                        (strip - problem * partials.strips) * kStripRows;
  if (class_idx + first * call.dilation >= sequence.rows) return;  // of no query

#pragma unroll 1
  for (int32_t c = 0; c < partials.max_chunks; ++c) {
    ptx::cp_async_16(to, from, true);
    to += sizeof(parts[0]);
    from += chunk_threads;
  }
  ptx::cp_async_commit();
  const int32_t chunks = __ldcg(partials.chunks + strip);

  // Half a warp finds the factors of a row, a lane those of a chunk: the last one comes first.
  const int32_t own = threadIdx.x % kMostChunks;
  const float2* states = partials.state + partials.at(strip, own) * kStripRows;
#pragma unroll 1
  for (int32_t row = threadIdx.x / kMostChunks; row < kStripRows; row += kThreads / kMostChunks) {
    float2 state = {-INFINITY, 0.0f};
    if (own < chunks) state = __ldcg(states + row);
    const float m = state.y == 0.0f ? -INFINITY : state.x;
    float top = m;  // of the chunks from this one on
#pragma unroll
    for (int step = 1; step < kMostChunks; step *= 2) {
      const float later = __shfl_down_sync(~0u, top, step, kMostChunks);
      if (own + step < kMostChunks) top = fmaxf(top, later);
    }
    const float before = __shfl_down_sync(~0u, top, 1, kMostChunks);
    factors[own][row] = {Join::of(own == kMostChunks - 1 ? -INFINITY : before, m, state.y),
                         state.y};
  }
  ptx::cp_async_wait<0>();
  __syncthreads();

  float l[2] = {}, even[2] = {}, odd[2] = {};
#pragma unroll 2
  for (int32_t c = chunks - 1; c >= 0; --c) {
    const float4 part = parts[c][threadIdx.x];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Factor factor = factors[c][lane / 4 + 8 * r];
      l[r] = factor.join.sum(l[r], factor.l);
      even[r] = factor.join.sum(even[r], r == 0 ? part.x : part.z);
      odd[r] = factor.join.sum(odd[r], r == 0 ? part.y : part.w);
    }
  }

  const Outputs& out = call.outputs;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int32_t in_strip = lane / 4 + 8 * r;
    const int32_t row =
        tensor_row(call, sequence, batch, class_idx + (first + in_strip) * call.dilation);
    if (row < 0) continue;
    const float m = factors[0][in_strip].join.m;
    if (out.lse != nullptr && i == 0 && lane % 4 == 0) {
      out.lse[batch * out.lse_stride_b + head * out.lse_stride_h + row * out.lse_stride_s] =
          log_sum(m, l[r]);
    }
    if (!exists) continue;
    float inverse = inverse_of(m, l[r], call.sink_logits, head);
    if (call.value_scale.data != nullptr) inverse *= call.value_scale.at(batch, head, call.group);
    T* to = static_cast<T*>(out.out.data) + batch * out.out.stride_b + head * out.out.stride_h +
            row * out.out.stride_s + i * 8 + lane % 4 * 2;
    *reinterpret_cast<uint32_t*>(to) = pack<T>(even[r] * inverse, odd[r] * inverse);
  }
}

}  // namespace

Status merge_chunks(const AttentionParams& params, const Partials& partials) {
  const Problem& problem = params.problem;
  const Call call = {
      params.outputs,          params.sequences,        params.scores.sink_logits,
      params.keys.value_scale, problem.heads_q,         problem.group(),
      problem.value_dim,       params.pattern.dilation, params.pattern.classes(problem.seq_q)};
  const int64_t strips = int64_t{partials.heads} * call.classes * partials.strips;
  const LaunchShape shape = {static_cast<uint32_t>(strips * ceil_div(problem.value_dim, kColumns)),
                             kThreads, 0, to_stream(params.stream)};
  const bool half = problem.dtype == Dtype::kFloat16;
  return launch_dependent(half ? merge_kernel<__half> : merge_kernel<__nv_bfloat16>, shape, call,
                          partials);
}

}  // namespace sparse_attn::cuda::hopper
