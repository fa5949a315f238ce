// Scores of pairs of blocks: scale * mean(Q_i) . mean(K_j), a float32 product on 64 x 64 tiles, or
// those that the caller gives; and NaN for blocks that a sketch does not hold.
#include "../common/launch.cuh"
#include "../common/mask.cuh"
#include "../common/tile_product.cuh"
#include "tools.h"

namespace sparse_attn::cuda {
namespace {

constexpr int kCopyThreads = 256;

/// Whether the block has a key that some row may see, and a given sketch holds. Asked where its
/// mean is no number, which a key that is none may have made too.
__device__ bool key_block_exists(const SelectParams& params, const SelectWorkspace& workspace,
                                 int64_t batch, int64_t block) {
  int32_t begin = static_cast<int32_t>(block) * params.block_kv;
  for (int32_t j = begin; j < imin(begin + params.block_kv, params.held_keys(batch)); ++j) {
    if (key_exists(params, workspace.key_marks, batch, j)) return true;
  }
  return false;
}

__global__ void __launch_bounds__(kProductThreads)
    score_blocks(const SelectParams params, const SelectWorkspace workspace) {
  int64_t tiles_q = ceil_div64(params.num_q, kProductTile);
  int64_t tiles_kv = ceil_div64(params.num_kv, kProductTile);
  int64_t head_index = blockIdx.x / (tiles_q * tiles_kv);
  int32_t i0 = static_cast<int32_t>(blockIdx.x / tiles_kv % tiles_q) * kProductTile;
  int32_t j0 = static_cast<int32_t>(blockIdx.x % tiles_kv) * kProductTile;
  int64_t batch = head_index / params.problem.heads_q;
  int64_t head = head_index % params.problem.heads_q, head_kv = head / params.problem.group();
  if (params.rows_grow()) {
    Interval rows = params.rows_of_blocks(batch, {i0, imin(i0 + kProductTile, params.num_q)});
    if (j0 * params.block_kv >= params.keys_of_rows(batch, head, rows).end) return;
  }
  int32_t depth = params.problem.head_dim;
  const float* query = workspace.query_means + head_index * params.num_q * depth;
  const float* key =
      workspace.key_means + (batch * params.problem.heads_kv + head_kv) * params.num_kv * depth;

  float acc[kProductRows][kProductRows];
  tile_product(
      depth,
      [&](int row, int d) {
        int64_t i = i0 + row;
        return i < params.num_q && d < depth ? query[i * depth + d] : 0.0f;
      },
      [&](int d, int column) {
        int64_t j = j0 + column;
        return j < params.num_kv && d < depth ? key[j * depth + d] : 0.0f;
      },
      acc);
  float* scores = workspace.scores + head_index * params.num_q * params.num_kv;
  for (int r = 0; r < kProductRows; ++r) {
    int64_t i = i0 + product_row(r);
    for (int c = 0; c < kProductRows; ++c) {
      int64_t j = j0 + product_column(c);
      if (i < params.num_q && j < params.num_kv) {
        bool exists = !isnan(key[j * depth]) || key_block_exists(params, workspace, batch, j);
        scores[i * params.num_kv + j] =
            exists ? capped(params.scores.scale * acc[r][c], params.scores.softcap) : -INFINITY;
      }
    }
  }
}

__global__ void __launch_bounds__(kCopyThreads)
    copy_scores(const SelectParams params, float* scores) {
  int64_t row = blockIdx.x;
  int64_t head = row / params.num_q;
  const float* given =
      params.given.row(head / params.problem.heads_q, head % params.problem.heads_q,
                       static_cast<int32_t>(row % params.num_q));
  for (int32_t j = threadIdx.x; j < params.num_kv; j += kCopyThreads) {
    float score = given[j * params.given.stride_kv];
    scores[row * params.num_kv + j] = score == INFINITY ? NAN : score;  // both keep the block
  }
}

/// A thread for a key block of a query head.
__global__ void __launch_bounds__(kCopyThreads)
    mark_not_held(const SelectParams params, float* scores) {
  const int32_t parts = ceil_div(params.num_kv, kCopyThreads);
  const int64_t head = blockIdx.x / parts, batch = head / params.problem.heads_q;
  const auto block = static_cast<int32_t>(blockIdx.x % parts * kCopyThreads + threadIdx.x);
  if (block >= params.num_kv) return;
  const Interval own = intersect({0, params.num_keys(batch)},
                                 {block * params.block_kv, (block + 1) * params.block_kv});
  if (!params.lacks_some_of(batch, own)) return;
  for (int32_t query_block = 0; query_block < params.num_q; ++query_block) {
    const Interval rows = params.rows_of_block(batch, query_block);
    int32_t i = imax(rows.begin, params.rows_grow() ? rows.end - 1 : 0);
    for (; i < rows.end; ++i) {
      const Interval seen = params.keys_of_row(batch, head % params.problem.heads_q, i);
      if (params.lacks_some_of(batch, intersect(seen, own))) {
        scores[(head * params.num_q + query_block) * params.num_kv + block] = NAN;
      }
    }
  }
}

}  // namespace

Status launch_given_scores(const SelectParams& params, const SelectWorkspace& workspace) {
  int64_t rows = int64_t{params.problem.batch} * params.problem.heads_q * params.num_q;
  copy_scores<<<static_cast<uint32_t>(rows), kCopyThreads, 0, to_stream(params.stream)>>>(
      params, workspace.scores);
  return launched();
}

Status launch_not_held(const SelectParams& params, const SelectWorkspace& workspace) {
  if (params.sketch.lengths == nullptr) return {};
  const int64_t blocks = int64_t{params.problem.batch} * params.problem.heads_q *
                         ceil_div(params.num_kv, kCopyThreads);
  mark_not_held<<<static_cast<uint32_t>(blocks), kCopyThreads, 0, to_stream(params.stream)>>>(
      params, workspace.scores);
  return launched();
}

Status launch_block_scores(const SelectParams& params, const SelectWorkspace& workspace) {
  int64_t tiles = ceil_div64(params.num_q, kProductTile) * ceil_div64(params.num_kv, kProductTile) *
                  params.problem.batch * params.problem.heads_q;
  score_blocks<<<static_cast<uint32_t>(tiles), kProductThreads, 0, to_stream(params.stream)>>>(
      params, workspace);
  return launched();
}

}  // namespace sparse_attn::cuda
