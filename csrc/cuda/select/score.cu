// scale * mean(Q_i) . mean(K_j) for every pair of blocks, a float32 product on 64 x 64 tiles.
#include "../common/launch.cuh"
#include "../common/tile_product.cuh"
#include "tools.h"

namespace sparse_attn::cuda {
namespace {

__global__ void __launch_bounds__(kProductThreads)
    score_blocks(const SelectParams params, const SelectWorkspace workspace) {
  int64_t tiles_q = ceil_div64(params.num_q, kProductTile);
  int64_t tiles_kv = ceil_div64(params.num_kv, kProductTile);
  int64_t head_index = blockIdx.x / (tiles_q * tiles_kv);
  int32_t i0 = static_cast<int32_t>(blockIdx.x / tiles_kv % tiles_q) * kProductTile;
  int32_t j0 = static_cast<int32_t>(blockIdx.x % tiles_kv) * kProductTile;
  int64_t batch = head_index / params.heads_q;
  int64_t head_kv = head_index % params.heads_q / (params.heads_q / params.heads_kv);
  int32_t depth = params.head_dim;
  const float* query = workspace.pooled_query + head_index * params.num_q * depth;
  const float* key =
      workspace.pooled_key + (batch * params.heads_kv + head_kv) * params.num_kv * depth;

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
        scores[i * params.num_kv + j] = params.scale * acc[r][c];
      }
    }
  }
}

}  // namespace

Status launch_block_scores(const SelectParams& params, const SelectWorkspace& workspace) {
  int64_t tiles = ceil_div64(params.num_q, kProductTile) * ceil_div64(params.num_kv, kProductTile) *
                  params.batch * params.heads_q;
  score_blocks<<<static_cast<uint32_t>(tiles), kProductThreads, 0, to_stream(params.stream)>>>(
      params, workspace);
  return launched();
}

}  // namespace sparse_attn::cuda
