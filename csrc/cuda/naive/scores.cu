// scores = scale * Q K^T in global memory, -inf where a key is not allowed. Range patterns write
// every score; block lists start from -inf and visit the listed blocks.
#include "../common/launch.cuh"
#include "../common/mask.cuh"
#include "../common/tile_product.cuh"
#include "../common/types.cuh"
#include "problem.cuh"

namespace sparse_attn::cuda::naive {
namespace {

/// The scores of queries [q0, q_end) and keys [k0, k_end), at most a tile of each.
template <typename T>
__device__ void score_tile(const Problem& problem, int64_t index, Interval queries, Interval keys) {
  const AttentionParams& params = problem.params;
  int64_t batch = problem.batch(index);
  int64_t head = problem.head(index);
  const T* q = static_cast<const T*>(params.query.data) + batch * params.query.stride_b +
               head * params.query.stride_h;
  const T* k = static_cast<const T*>(params.key.data) + batch * params.key.stride_b +
               head / params.group() * params.key.stride_h;
  int32_t depth = params.head_dim;
  float acc[kProductRows][kProductRows];
  tile_product(
      depth,
      [&](int row, int d) {
        int64_t i = queries.begin + row;
        return i < queries.end && d < depth ? to_float(q[i * params.query.stride_s + d]) : 0.0f;
      },
      [&](int d, int column) {
        int64_t j = keys.begin + column;
        return j < keys.end && d < depth ? to_float(k[j * params.key.stride_s + d]) : 0.0f;
      },
      acc);
  for (int r = 0; r < kProductRows; ++r) {
    int32_t i = queries.begin + product_row(r);
    if (i >= queries.end) continue;
    Interval bounds = params.bounds.row(batch, head, i, params.seq_kv);
    Query query =
        make_query(params.pattern, i, params.seq_q, params.seq_kv, params.offset(batch), bounds);
    float* scores = problem.row(index, i);
    for (int c = 0; c < kProductRows; ++c) {
      int32_t j = keys.begin + product_column(c);
      if (j >= keys.end) continue;
      bool allowed = sees_key(params.pattern, query, j) &&
                     mask_bias(params.mask, batch, head, i, j) != -INFINITY;
      scores[j] = allowed ? params.scale * acc[r][c] : -INFINITY;
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kProductThreads) range_scores(const Problem problem) {
  const AttentionParams& params = problem.params;
  int64_t tiles_q = ceil_div64(params.seq_q, kProductTile);
  int64_t tiles_kv = ceil_div64(params.seq_kv, kProductTile);
  int64_t index = blockIdx.x / (tiles_q * tiles_kv);
  int32_t q0 = static_cast<int32_t>(blockIdx.x / tiles_kv % tiles_q) * kProductTile;
  int32_t k0 = static_cast<int32_t>(blockIdx.x % tiles_kv) * kProductTile;
  score_tile<T>(problem, index, {q0, imin(q0 + kProductTile, params.seq_q)},
                {k0, imin(k0 + kProductTile, params.seq_kv)});
}

__global__ void fill_scores(float* scores, int64_t count) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    scores[i] = -INFINITY;
  }
}

/// One thread block a query tile of a layout row: it visits the row's listed blocks.
template <typename T>
__global__ void __launch_bounds__(kProductThreads) listed_scores(const Problem problem) {
  const AttentionParams& params = problem.params;
  const BlockList& list = params.pattern.list;
  int64_t tiles_q = ceil_div64(list.block_q, kProductTile);
  int64_t index = blockIdx.x / (tiles_q * list.num_q);
  int32_t list_row = static_cast<int32_t>(blockIdx.x / tiles_q % list.num_q);
  int32_t q0 = list_row * list.block_q + static_cast<int32_t>(blockIdx.x % tiles_q) * kProductTile;
  int32_t q_end = imin(imin(q0 + kProductTile, (list_row + 1) * list.block_q), params.seq_q);
  int64_t batch = problem.batch(index);
  int64_t head = problem.head(index);
  ListedRuns runs = list.runs(batch, head, list_row, list.block_kv);
  for (int32_t r = 0; r < runs.count; ++r) {
    Interval block = intersect(runs.keys(r), {0, params.seq_kv});
    for (int32_t k0 = block.begin; k0 < block.end; k0 += kProductTile) {
      score_tile<T>(problem, index, {q0, q_end}, {k0, imin(k0 + kProductTile, block.end)});
    }
  }
}

}  // namespace

Status launch_scores(const Problem& problem) {
  const AttentionParams& params = problem.params;
  cudaStream_t stream = to_stream(params.stream);
  const BlockList& list = params.pattern.list;
  return with_type(params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    if (!list.present()) {
      int64_t tiles =
          ceil_div64(params.seq_q, kProductTile) * ceil_div64(params.seq_kv, kProductTile);
      range_scores<T>
          <<<static_cast<uint32_t>(problem.heads * tiles), kProductThreads, 0, stream>>>(problem);
      return launched();
    }
    int64_t count = problem.heads * params.seq_q * params.seq_kv;
    fill_scores<<<grid_for(count, kProductThreads), kProductThreads, 0, stream>>>(problem.scores,
                                                                                  count);
    int64_t tiles = ceil_div64(list.block_q, kProductTile) * list.num_q;
    listed_scores<T>
        <<<static_cast<uint32_t>(problem.heads * tiles), kProductThreads, 0, stream>>>(problem);
    return launched();
  });
}

}  // namespace sparse_attn::cuda::naive
