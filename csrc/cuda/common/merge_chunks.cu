// The merge of a row's chunks, a thread a column or, of many rows, four of them:
//   m = max m_c, w_c = 2^(m_c - m), l = sum w_c l_c, out = sum w_c O_c / l
// Sums run in the order of the chunks and a chunk without keys for the row adds nothing, so the
// bits do not depend on which chunks the other rows of a tile visited. Launched as a dependent of
// the kernel that wrote the chunks, which hides its launch under that one's end.
#include "launch.cuh"
#include "partial.cuh"
#include "ptx/grid.cuh"
#include "state.cuh"
#include "types.cuh"

namespace sparse_attn::cuda {
namespace {

constexpr int kMostThreads = 256;  // the largest head dim
constexpr int kWide = 4;           // columns of a thread where there are many rows, ...
constexpr int kManyRows = 1024;    // ... which fill a device so too, or ...
constexpr int kSomeRows = 128;     // ... some rows of few chunks, ...
constexpr int kFewChunks = 16;     // ... which a thread goes through in one turn or two

/// Threads of a row: whole warps.
__host__ __device__ __forceinline__ int32_t row_threads(const AttentionParams& params,
                                                        int32_t columns) {
  return ceil_div(ceil_div(params.problem.value_dim, columns), 32) * 32;
}

/// The largest m of the row; every warp finds it for itself.
__device__ __forceinline__ float find_maximum(const float2* chunk_state, int32_t chunks) {
  float top = -INFINITY;
#pragma unroll 4
  for (int32_t c = threadIdx.x % 32; c < chunks; c += 32) top = fmaxf(top, chunk_state[c].x);
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) {
    top = fmaxf(top, __shfl_xor_sync(~0u, top, lane));
  }
  return top;
}

template <typename T, int kColumns>
__global__ void __launch_bounds__(kMostThreads)
    merge_kernel(const __grid_constant__ AttentionParams params, const Partials partials) {
  constexpr int kAtOnce = 32 / kColumns;  // chunks
  const int32_t threads = row_threads(params, kColumns);
  const uint32_t row = blockIdx.x * (blockDim.x / threads) + threadIdx.x / threads;
  if (row >= static_cast<uint32_t>(partials.heads) * partials.rows) return;
  const uint32_t in_heads = row / partials.rows;
  const uint32_t head_index = partials.first_head + in_heads;
  const int64_t batch = head_index / params.problem.heads_q;
  const int64_t head = head_index % params.problem.heads_q;
  ptx::wait_for_primary();
  const Sequence sequence = params.sequences.of(batch);
  const int32_t first = partials.first_query(imax(0, sequence.origin), sequence.offset);
  int64_t i = first + static_cast<int64_t>(row - in_heads * partials.rows);
  if (i >= sequence.rows) return;
  if (params.outputs.rows != nullptr) i = params.outputs.rows[batch * sequence.rows + i];
  if (i < 0) return;
  const int32_t d = static_cast<int32_t>(threadIdx.x) % threads * kColumns;
  const bool exists = d < params.problem.value_dim;
  const int32_t chunks = partials.chunks == nullptr ? partials.max_chunks : partials.chunks[row];
  const float2* chunk_state = partials.state + partials.at(row, 0);
  const float* chunk_out = partials.out + partials.at(row, 0) * partials.columns;

  SoftmaxState<1, false> state;
  float& m = state.m[0][0];
  float& l = state.l[0][0];
  m = -INFINITY;
  l = 0.0f;
  struct alignas(kColumns * sizeof(float)) Columns {
    float of[kColumns] = {};
  } acc;
  const float* from = chunk_out + (exists ? d : 0);
#pragma unroll 1
  for (int32_t begin = 0; begin < chunks; begin += kAtOnce) {
    Columns parts[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (begin + i >= chunks) continue;
      parts[i] = *reinterpret_cast<const Columns*>(from + i * partials.columns);
    }
    from += kAtOnce * partials.columns;
    if (begin == 0) m = find_maximum(chunk_state, chunks);
    int32_t own = begin + static_cast<int32_t>(threadIdx.x % 32);
    float2 chunk = own < chunks ? chunk_state[own] : float2{-INFINITY, 0.0f};
    float weight = chunk.y == 0.0f ? 0.0f : ptx::exp2_approx(chunk.x - m);
    float sum = weight * chunk.y;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float w = __shfl_sync(~0u, weight, i);
      l += __shfl_sync(~0u, sum, i);
      if (w == 0.0f) continue;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) acc.of[c] = fmaf(w, parts[i].of[c], acc.of[c]);
    }
  }

  float sink = params.scores.sink_logits == nullptr ? -INFINITY : params.scores.sink_logits[head];
  if (exists) {
    T* out = static_cast<T*>(params.outputs.out.data) + batch * params.outputs.out.stride_b +
             head * params.outputs.out.stride_h +
             (sequence.first_row + i) * params.outputs.out.stride_s;
    const float weight = state.weight(0, 0, sink) * params.value_scale(batch, head);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) out[d + c] = from_float<T>(acc.of[c] * weight);
  }
  if (params.outputs.lse != nullptr && d == 0) {
    params.outputs.lse[batch * params.outputs.lse_stride_b + head * params.outputs.lse_stride_h +
                       (sequence.first_row + i) * params.outputs.lse_stride_s] = state.lse(0, 0);
  }
}

}  // namespace

Status merge_chunks(const AttentionParams& params, const Partials& partials) {
  const int64_t rows = int64_t{partials.heads} * partials.rows;
  const bool wide = rows >= kManyRows || (rows >= kSomeRows && partials.max_chunks <= kFewChunks);
  const int32_t threads = row_threads(params, wide ? kWide : 1);
  const int32_t rows_a_block = wide ? kMostThreads / 2 / threads : 1;
  const bool half = params.problem.dtype == Dtype::kFloat16;
  auto kernel = half ? merge_kernel<__half, 1> : merge_kernel<__nv_bfloat16, 1>;
  if (wide) kernel = half ? merge_kernel<__half, kWide> : merge_kernel<__nv_bfloat16, kWide>;
  const LaunchShape shape = {static_cast<uint32_t>(ceil_div64(rows, rows_a_block)),
                             static_cast<uint32_t>(threads * rows_a_block), 0,
                             to_stream(params.stream)};
  return launch_dependent(kernel, shape, params, partials);
}

}  // namespace sparse_attn::cuda
