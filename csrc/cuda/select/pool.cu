// Means of neighbouring queries or keys, and the extremes of key blocks, of their keys or of what a
// sketch has of them; a thread has 16 bytes of each row. A key counts when some row of its batch
// entry may see it: under bounds rows mark their interval's ends, and a prefix sum counts them.
#include "../common/launch.cuh"
#include "../common/radix_select.cuh"
#include "../common/swizzle.cuh"
#include "../common/types.cuh"
#include "tools.h"

namespace sparse_attn::cuda {
namespace {

constexpr int kPoolThreads = 128;
constexpr int kScanThreads = 1024;

/// Rows of queries or keys that are pooled, `size` neighbours each.
struct Pools {
  TensorView tensor;
  bool of_keys;
  int32_t heads, size, count;  // `count` pools a head
  const int32_t* marks;
  bool aligned;  // rows begin at 16 bytes
};

Pools pools_of(const SelectParams& params, bool of_keys, int32_t size, int32_t count,
               const int32_t* marks) {
  const TensorView& tensor = of_keys ? params.keys.key : params.query;
  return {tensor, of_keys, of_keys ? params.problem.heads_kv : params.problem.heads_q, size,
          count,  marks,   begins_at_16_bytes(tensor, size_of(params.problem.dtype))};
}

/// A thread's elements of one pool.
template <typename T>
struct PoolPart {
  static constexpr int kElements = kChunkBytes / sizeof(T);

  const SelectParams& params;
  const Pools& pools;
  int64_t pool;         // of all heads and batch entries
  int64_t batch, head;  // that it is of
  int32_t begin;        // its first row
  int32_t column;       // first element

  __device__ PoolPart(const SelectParams& params, const Pools& pools)
      : params(params), pools(pools) {
    const int64_t at = blockIdx.x * int64_t{kPoolThreads} + threadIdx.x;
    const int32_t chunks = params.problem.head_dim / kElements;
    pool = at / chunks;
    column = static_cast<int32_t>(at % chunks) * kElements;
    batch = pool / pools.count / pools.heads;
    head = pool / pools.count % pools.heads;
    begin = static_cast<int32_t>(pool % pools.count) * pools.size;
  }
  __device__ bool exists() const {
    return pool < int64_t{params.problem.batch} * pools.heads * pools.count;
  }

  /// Where the rows of the pool that may exist end, keys as far as a given sketch holds them;
  /// without marks all of them do.
  __device__ int32_t end() const {
    int32_t rows = params.rows(batch);
    if (pools.of_keys) rows = imin(params.num_keys(batch), params.held_keys(batch));
    return imin(begin + pools.size, rows);
  }
  __device__ const int32_t* marks() const {
    return pools.marks == nullptr ? nullptr : pools.marks + batch * (params.problem.seq_kv + 1);
  }

  /// An element of 16 bytes.
  __device__ static float element(const uint4& bits, int e) {
    return to_float(reinterpret_cast<const T*>(&bits)[e]);
  }

  /// Calls `take(element, x, exists)` for every row of the pool; returns how many exist.
  template <typename Take>
  __device__ int32_t walk(const Take& take) const {
    const int32_t end = this->end();
    const T* first = static_cast<const T*>(pools.tensor.data) + batch * pools.tensor.stride_b +
                     head * pools.tensor.stride_h + column;
    const int32_t* marks = this->marks();
    int32_t count = 0;
#pragma unroll 8
    for (int32_t j = begin; j < end; ++j) {
      const T* from = first + j * pools.tensor.stride_s;
      const uint4 bits =
          pools.aligned ? *reinterpret_cast<const uint4*>(from) : load_unaligned(from);
      const bool exists = marks == nullptr || marks[j] > 0;
#pragma unroll
      for (int e = 0; e < kElements; ++e) take(e, element(bits, e), exists);
      count += exists;
    }
    return count;
  }

  /// A thread's elements of the ranges of a sketch's group.
  struct Ranges {
    uint4 least, greatest;
  };
  /// Those of the group that holds key j.
  __device__ Ranges ranges_at(int32_t j) const {
    const SketchView& sketch = params.sketch;
    const int64_t place = sketch.ranges_at(params.sketch_entry(sketch, batch, j), head,
                                           SelectParams::sketch_row(sketch, j));
    const T* from = static_cast<const T*>(sketch.ranges) + place + column;
    return {*reinterpret_cast<const uint4*>(from),
            *reinterpret_cast<const uint4*>(from + sketch.head_dim)};
  }

  /// Calls `take(element, least, greatest, exists)` for every group of a sketch in the pool, whose
  /// size is a multiple of them; a group exists where one of its keys does.
  template <typename Take>
  __device__ void walk_ranges(const Take& take) const {
    const int32_t end = this->end(), group = params.sketch.group;
    const int32_t* marks = this->marks();
    for (int32_t first = begin; first < end; first += group) {
      const Ranges ranges = ranges_at(first);
      bool exists = marks == nullptr;
      for (int32_t j = first; !exists && j < imin(first + group, end); ++j) exists = marks[j] > 0;
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        take(e, element(ranges.least, e), element(ranges.greatest, e), exists);
      }
    }
  }

  /// As walk, with the sums of the keys that exist by group of a sketch. A thread's elements are of
  /// one word of a key's codes.
  template <typename Take>
  __device__ int32_t walk_codes(const Take& take) const {
    const SketchView& sketch = params.sketch;
    const int32_t end = this->end(), word = column / sketch.codes_of_word();
    const int32_t first_bit = sketch.bit_of(column % sketch.codes_of_word());
    const int32_t* marks = this->marks();
    int32_t count = 0;
    for (int32_t j = begin; j < end;) {
      const Ranges ranges = ranges_at(j);
      const int64_t place = sketch.codes_at(params.sketch_entry(sketch, batch, j), head,
                                            SelectParams::sketch_row(sketch, j));
      const uint32_t* from = sketch.codes + place + word;
      const int32_t end_of_group = sketch.end_of_group(j, end);
      uint32_t codes[kElements] = {};
      int32_t keys = 0;
#pragma unroll 8
      for (; j < end_of_group; ++j, from += sketch.row_words()) {
        const bool exists = marks == nullptr || marks[j] > 0;
        const uint32_t own = exists ? *from >> first_bit : 0;
#pragma unroll
        for (int e = 0; e < kElements; ++e) codes[e] += own >> sketch.bit_of(e) & sketch.levels();
        keys += exists;
      }
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const float code = static_cast<float>(codes[e]) / keys;
        const float x = sketch.number(code, element(ranges.least, e), element(ranges.greatest, e));
        take(e, keys * x, keys > 0);
      }
      count += keys;
    }
    return count;
  }
};

/// The means of the rows that exist, or of the keys of a sketch; NaN where none does. A query
/// always exists.
template <typename T, bool kOfCodes, typename Out>
__global__ void __launch_bounds__(kPoolThreads)
    pool_means(const SelectParams params, const Pools pools, Out* means) {
  const PoolPart<T> part(params, pools);
  if (!part.exists()) return;
  float sums[PoolPart<T>::kElements] = {};
  auto add = [&](int e, float x, bool exists) { sums[e] += exists ? x : 0.0f; };
  int32_t count;
  if constexpr (kOfCodes) {
    count = part.walk_codes(add);
  } else {
    count = part.walk(add);
  }
  Out* to = means + part.pool * params.problem.head_dim + part.column;
#pragma unroll
  for (int e = 0; e < PoolPart<T>::kElements; ++e) {
    to[e] = from_float<Out>(count > 0 ? sums[e] / count : NAN);
  }
}

/// The greatest and the least elements of a key block's keys that exist, or of a given sketch's
/// groups of them: [B, Hkv, num_kv, 2, D], or side by side as [B, Hkv, num_kv, D, 2].
template <typename T>
__global__ void __launch_bounds__(kPoolThreads)
    pool_extremes(const SelectParams params, const Pools pools, bool side_by_side, T* extremes) {
  const PoolPart<T> part(params, pools);
  if (!part.exists()) return;
  constexpr int kElements = PoolPart<T>::kElements;
  float greatest[kElements], least[kElements];
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    greatest[e] = -INFINITY;
    least[e] = INFINITY;
  }
  auto join = [&](int e, float low, float high, bool exists) {
    greatest[e] = exists ? fmaxf(greatest[e], high) : greatest[e];
    least[e] = exists ? fminf(least[e], low) : least[e];
  };
  if (params.sketch.present()) {
    part.walk_ranges(join);
  } else {
    part.walk([&](int e, float x, bool exists) { join(e, x, x, exists); });
  }
  T* to = extremes + part.pool * 2 * params.problem.head_dim;
  const int32_t step = side_by_side ? 2 : 1, apart = side_by_side ? 1 : params.problem.head_dim;
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    to[(part.column + e) * step] = from_float<T>(greatest[e]);
    to[(part.column + e) * step + apart] = from_float<T>(least[e]);
  }
}

/// Thread blocks for them.
uint32_t pool_grid(const SelectParams& params, const Pools& pools) {
  const int64_t chunks =
      int64_t{params.problem.head_dim} * size_of(params.problem.dtype) / kChunkBytes;
  return static_cast<uint32_t>(
      ceil_div64(int64_t{params.problem.batch} * pools.heads * pools.count * chunks, kPoolThreads));
}

template <typename T, bool kOfCodes = false, typename Out>
void launch_means(const SelectParams& params, const Pools& pools, Out* means) {
  pool_means<T, kOfCodes><<<pool_grid(params, pools), kPoolThreads, 0, to_stream(params.stream)>>>(
      params, pools, means);
}

__global__ void mark_bounds(const SelectParams params, int32_t heads, int32_t* marks) {
  int64_t rows = int64_t{params.problem.batch} * heads * params.problem.seq_q;
  for (int64_t at = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; at < rows;
       at += int64_t{gridDim.x} * blockDim.x) {
    int64_t batch = at / params.problem.seq_q / heads;
    Interval keys = params.keys_of_row(batch, at / params.problem.seq_q % heads,
                                       static_cast<int32_t>(at % params.problem.seq_q));
    if (keys.empty()) continue;
    int32_t* entry = marks + batch * (params.problem.seq_kv + 1);
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
  int64_t bytes = int64_t{params.problem.batch} * (params.problem.seq_kv + 1) * sizeof(int32_t);
  cudaError_t error = cudaMemsetAsync(marks, 0, bytes, stream);
  if (error != cudaSuccess) return to_status(error);
  int32_t heads = params.scores.bounds.stride_h == 0 ? 1 : params.problem.heads_q;
  int64_t rows = int64_t{params.problem.batch} * heads * params.problem.seq_q;
  mark_bounds<<<grid_for(rows, kPoolThreads), kPoolThreads, 0, stream>>>(params, heads, marks);
  sum_marks<<<params.problem.batch, kScanThreads, 0, stream>>>(params.problem.seq_kv, marks);
  return launched();
}

Status launch_block_means(const SelectParams& params, const SelectWorkspace& workspace) {
  const Pools queries = pools_of(params, false, params.block_q, params.num_q, nullptr);
  const Pools keys = pools_of(params, true, params.block_kv, params.num_kv, workspace.key_marks);
  return with_type(params.problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    launch_means<T>(params, queries, workspace.query_means);
    if (params.sketch.present()) {
      launch_means<T, true>(params, keys, workspace.key_means);
    } else {
      launch_means<T>(params, keys, workspace.key_means);
    }
    return launched();
  });
}

Status launch_group_means(const SelectParams& params, const SelectWorkspace& workspace) {
  const int32_t groups = params.groups;
  return with_type(params.problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    launch_means<T>(
        params, pools_of(params, false, params.block_q / groups, params.num_q * groups, nullptr),
        static_cast<T*>(workspace.query_vectors));
    launch_means<T>(params,
                    pools_of(params, true, params.block_kv / groups, params.num_kv * groups,
                             workspace.key_marks),
                    static_cast<T*>(workspace.key_vectors));
    return launched();
  });
}

Status launch_extremes(const SelectParams& params, bool side_by_side,
                       const SelectWorkspace& workspace) {
  const Pools pools = pools_of(params, true, params.block_kv, params.num_kv, workspace.key_marks);
  return with_type(params.problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    pool_extremes<T><<<pool_grid(params, pools), kPoolThreads, 0, to_stream(params.stream)>>>(
        params, pools, side_by_side, static_cast<T*>(workspace.key_vectors));
    return launched();
  });
}

}  // namespace sparse_attn::cuda
