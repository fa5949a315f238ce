// Means of query and key blocks in float32, one thread block each. A key counts when some row of
// its batch entry may see it: under bounds rows mark their interval's ends, and a prefix sum counts
// them.
#include "../common/launch.cuh"
#include "../common/radix_select.cuh"
#include "../common/types.cuh"
#include "tools.h"

namespace sparse_attn::cuda {
namespace {

constexpr int kPoolThreads = 128;
constexpr int kScanThreads = 1024;

/// Means of `size` neighbours, of those keys that exist; NaN where none does. A query always
/// exists.
template <typename T, typename Out, bool kKeys>
__global__ void __launch_bounds__(kPoolThreads)
    pool_means(const SelectParams params, const int32_t* marks, int32_t size, int32_t num_means,
               Out* means) {
  const TensorView& tensor = kKeys ? params.key : params.query;
  const int32_t heads = kKeys ? params.heads_kv : params.heads_q;
  const int64_t head_index = blockIdx.x / num_means;
  const int64_t batch = head_index / heads;
  const int32_t begin = static_cast<int32_t>(blockIdx.x % num_means) * size;
  const int32_t end = imin(begin + size, kKeys ? params.seq_kv : params.seq_q);
  const T* rows = static_cast<const T*>(tensor.data) + batch * tensor.stride_b +
                  head_index % heads * tensor.stride_h;
  for (int32_t d = threadIdx.x; d < params.head_dim; d += kPoolThreads) {
    float sum = 0.0f;
    int32_t count = 0;
#pragma unroll 8
    for (int32_t j = begin; j < end; ++j) {
      bool exists = !kKeys || key_exists(params, marks, batch, j);
      float x = to_float(rows[j * tensor.stride_s + d]);
      sum += exists ? x : 0.0f;
      count += exists;
    }
    means[int64_t{blockIdx.x} * params.head_dim + d] =
        from_float<Out>(count > 0 ? sum / count : NAN);
  }
}

/// The greatest and the least elements of a key block's keys that exist, [B, Hkv, num_kv, 2, D].
template <typename T>
__global__ void __launch_bounds__(kPoolThreads)
    pool_extremes(const SelectParams params, const int32_t* marks, T* extremes) {
  const int64_t head_index = blockIdx.x / params.num_kv;
  const int64_t batch = head_index / params.heads_kv;
  const int32_t begin = static_cast<int32_t>(blockIdx.x % params.num_kv) * params.block_kv;
  const int32_t end = imin(begin + params.block_kv, params.seq_kv);
  const T* rows = static_cast<const T*>(params.key.data) + batch * params.key.stride_b +
                  head_index % params.heads_kv * params.key.stride_h;
  T* out = extremes + int64_t{blockIdx.x} * 2 * params.head_dim;
  for (int32_t d = threadIdx.x; d < params.head_dim; d += kPoolThreads) {
    float greatest = -INFINITY, least = INFINITY;
    for (int32_t j = begin; j < end; ++j) {
      if (!key_exists(params, marks, batch, j)) continue;
      float x = to_float(rows[j * params.key.stride_s + d]);
      greatest = fmaxf(greatest, x);
      least = fminf(least, x);
    }
    out[d] = from_float<T>(greatest);
    out[params.head_dim + d] = from_float<T>(least);
  }
}

__global__ void mark_bounds(const SelectParams params, int32_t heads, int32_t* marks) {
  int64_t rows = int64_t{params.batch} * heads * params.seq_q;
  for (int64_t at = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; at < rows;
       at += int64_t{gridDim.x} * blockDim.x) {
    int64_t batch = at / params.seq_q / heads;
    Interval keys = params.keys_of_row(batch, at / params.seq_q % heads,
                                       static_cast<int32_t>(at % params.seq_q));
    if (keys.empty()) continue;
    int32_t* entry = marks + batch * (params.seq_kv + 1);
    atomicAdd(entry + keys.begin, 1);
    atomicSub(entry + keys.end, 1);
  }
}

/// Prefix sums of each batch entry's marks, in place; one thread block an entry.
__global__ void __launch_bounds__(kScanThreads) sum_marks(int32_t length, int32_t* marks) {
  __shared__ int32_t warps[kScanThreads / 32];
  marks += blockIdx.x * int64_t{length + 1};
  int lane = threadIdx.x % 32;
  int32_t carry = 0;
  for (int32_t begin = 0; begin < length; begin += kScanThreads) {
    int32_t j = begin + threadIdx.x;
    int32_t sum = warp_prefix_sum(j < length ? marks[j] : 0);
    if (lane == 31) warps[threadIdx.x / 32] = sum;
    __syncthreads();
    int32_t before = carry;
    for (int warp = 0; warp < kScanThreads / 32; ++warp) {
      if (warp < static_cast<int>(threadIdx.x / 32)) before += warps[warp];
      carry += warps[warp];
    }
    if (j < length) marks[j] = sum + before;
    __syncthreads();
  }
}

}  // namespace

Status launch_marks(const SelectParams& params, int32_t* marks) {
  cudaStream_t stream = to_stream(params.stream);
  int64_t bytes = int64_t{params.batch} * (params.seq_kv + 1) * sizeof(int32_t);
  cudaError_t error = cudaMemsetAsync(marks, 0, bytes, stream);
  if (error != cudaSuccess) return to_status(error);
  int32_t heads = params.bounds.stride_h == 0 ? 1 : params.heads_q;
  int64_t rows = int64_t{params.batch} * heads * params.seq_q;
  mark_bounds<<<grid_for(rows, kPoolThreads), kPoolThreads, 0, stream>>>(params, heads, marks);
  sum_marks<<<params.batch, kScanThreads, 0, stream>>>(params.seq_kv, marks);
  return launched();
}

Status launch_block_means(const SelectParams& params, const SelectWorkspace& workspace) {
  cudaStream_t stream = to_stream(params.stream);
  int64_t queries = int64_t{params.batch} * params.heads_q * params.num_q;
  int64_t keys = int64_t{params.batch} * params.heads_kv * params.num_kv;
  return with_type(params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    pool_means<T, float, false><<<static_cast<uint32_t>(queries), kPoolThreads, 0, stream>>>(
        params, nullptr, params.block_q, params.num_q, workspace.query_means);
    pool_means<T, float, true><<<static_cast<uint32_t>(keys), kPoolThreads, 0, stream>>>(
        params, workspace.key_marks, params.block_kv, params.num_kv, workspace.key_means);
    return launched();
  });
}

Status launch_group_means(const SelectParams& params, const SelectWorkspace& workspace) {
  cudaStream_t stream = to_stream(params.stream);
  const int32_t num_q = params.num_q * params.groups, num_kv = params.num_kv * params.groups;
  int64_t queries = int64_t{params.batch} * params.heads_q * num_q;
  int64_t keys = int64_t{params.batch} * params.heads_kv * num_kv;
  return with_type(params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    pool_means<T, T, false><<<static_cast<uint32_t>(queries), kPoolThreads, 0, stream>>>(
        params, nullptr, params.block_q / params.groups, num_q,
        static_cast<T*>(workspace.query_vectors));
    pool_means<T, T, true><<<static_cast<uint32_t>(keys), kPoolThreads, 0, stream>>>(
        params, workspace.key_marks, params.block_kv / params.groups, num_kv,
        static_cast<T*>(workspace.key_vectors));
    return launched();
  });
}

Status launch_extremes(const SelectParams& params, const SelectWorkspace& workspace) {
  int64_t keys = int64_t{params.batch} * params.heads_kv * params.num_kv;
  return with_type(params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    pool_extremes<T><<<static_cast<uint32_t>(keys), kPoolThreads, 0, to_stream(params.stream)>>>(
        params, workspace.key_marks, static_cast<T*>(workspace.key_vectors));
    return launched();
  });
}

}  // namespace sparse_attn::cuda
