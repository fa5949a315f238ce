// The merge of a row's chunks:
//   m = max m_c, w_c = 2^(m_c - m), l = sum w_c l_c, out = sum w_c O_c / l
// Sums run in the order of the chunks, of each group first where they are grouped, and a chunk
// without keys for the row adds nothing, so the bits do not depend on which chunks the other rows
// of a tile visited, nor on how many columns a thread has. Where every m_c is an integer, weights
// are powers of two, which scale exactly: then it changes no bit either whether a group comes as
// one chunk, its sum, beside chunks that are empty.
#pragma once

#include "launch.cuh"
#include "partial_rows.cuh"
#include "state.cuh"
#include "types.cuh"

namespace sparse_attn::cuda {

constexpr int kWideColumns = 4;  // of a thread where there are many rows

/// Threads of a row, kColumns columns each: whole warps.
template <int kColumns>
__host__ __device__ __forceinline__ int32_t threads_of_row(const AttentionParams& params) {
  return ceil_div(ceil_div(params.problem.value_dim, kColumns), 32) * 32;
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

/// A row to merge: query `query` of a head of the sequence, and what it has in PartialRows.
struct MergedRow {
  int64_t batch, head, query;
  int64_t row;  // of PartialRows
  RowChunks chunks;
};

/// x as an element of T; `dtype` tells which HalfOfEitherKind is.
template <typename T>
__device__ __forceinline__ T element_of(float x, Dtype dtype) {
  if constexpr (std::is_same_v<T, HalfOfEitherKind>) {
    const bool half = dtype == Dtype::kFloat16;
    return {half ? __half_as_ushort(__float2half_rn(x))
                 : __bfloat16_as_ushort(__float2bfloat16_rn(x))};
  } else {
    return from_float<T>(x);
  }
}

/// Stores the columns from d on of a row's output, which nothing has divided yet, and its lse, from
/// its m and l: query `query` of head `head` of a sequence of batch entry `batch`.
template <typename T, int kColumns>
__device__ __forceinline__ void store_row(const AttentionParams& params, const Sequence& sequence,
                                          int64_t batch, int64_t head, int64_t query, int32_t d,
                                          const float (&columns)[kColumns], float m, float l) {
  SoftmaxState<1, false> state;
  state.m[0][0] = m;
  state.l[0][0] = l;
  const int64_t row = sequence.first_row + query;
  const Outputs& outputs = params.outputs;
  if (d < params.problem.value_dim) {
    const float sink =
        params.scores.sink_logits == nullptr ? -INFINITY : params.scores.sink_logits[head];
    T* out = static_cast<T*>(outputs.out.data) + batch * outputs.out.stride_b +
             head * outputs.out.stride_h + row * outputs.out.stride_s;
    const float weight = state.weight(0, 0, sink) * params.value_scale(batch, head);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      out[d + c] = element_of<T>(columns[c] * weight, params.problem.dtype);
    }
  }
  if (outputs.lse != nullptr && d == 0) {
    outputs.lse[batch * outputs.lse_stride_b + head * outputs.lse_stride_h +
                row * outputs.lse_stride_s] = state.lse(0, 0);
  }
}

/// Merges a row, whose chunks may be empty where kGaps, and may have small groups where kSmall;
/// thread `thread` of threads_of_row() calls it.
template <typename T, int kColumns, bool kGaps, bool kSmall>
__device__ __forceinline__ void merge_row(const AttentionParams& params,
                                          const PartialRows& partials, const Sequence& sequence,
                                          const MergedRow& merged, int32_t thread) {
  constexpr int kAtOnce = 32 / kColumns;  // chunks
  const int64_t batch = merged.batch, head = merged.head;
  const int32_t d = thread * kColumns;
  const bool exists = d < params.problem.value_dim;
  const int32_t chunks = merged.chunks.count;
  const int32_t inside = merged.chunks.group - 1;  // the bits of a chunk's place in its group
  constexpr int kLeastGroup = kSmall ? kSmallestGroup : kGroup;
  const float2* chunk_state = partials.state + partials.at(merged.row, 0);
  const float* chunk_out = partials.out + partials.at(merged.row, 0) * partials.columns;

  float m = -INFINITY;
  float l = 0.0f;
  struct alignas(kColumns * sizeof(float)) Columns {
    float of[kColumns] = {};
  } acc, groups;
  float l_of_groups = 0.0f;
  auto end_group = [&] {
    l_of_groups += l;
    l = 0.0f;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      groups.of[c] += acc.of[c];
      acc.of[c] = 0.0f;
    }
  };
  const float* from = chunk_out + (exists ? d : 0);
#pragma unroll 1
  for (int32_t begin = 0; begin < chunks; begin += kAtOnce) {
    const int32_t own = begin + static_cast<int32_t>(threadIdx.x % 32);
    const float2 chunk = own < chunks ? chunk_state[own] : float2{-INFINITY, 0.0f};
    const uint32_t stored = kGaps ? __ballot_sync(~0u, chunk.y != 0.0f) : ~0u;
    Columns parts[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (begin + i >= chunks || !(stored >> i & 1)) continue;
      parts[i] = *reinterpret_cast<const Columns*>(from + i * partials.columns);
    }
    from += kAtOnce * partials.columns;
    if (begin == 0) m = find_maximum(chunk_state, chunks);
    float weight = chunk.y == 0.0f ? 0.0f : ptx::exp2_approx(chunk.x - m);
    float sum = weight * chunk.y;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (i % kLeastGroup == 0 && ((begin + i) & inside) == 0) end_group();
      float w = __shfl_sync(~0u, weight, i);
      l += __shfl_sync(~0u, sum, i);
      if (w == 0.0f) continue;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) acc.of[c] = fmaf(w, parts[i].of[c], acc.of[c]);
    }
  }
  end_group();
  store_row<T>(params, sequence, batch, head, merged.query, d, groups.of, m, l_of_groups);
}

}  // namespace sparse_attn::cuda
