// scores = scale * Q K^T in global memory, -inf where a key is not allowed. Range patterns write
// every score; block lists start from -inf and visit the listed blocks.
#include "../common/key_rows.cuh"
#include "../common/launch.cuh"
#include "../common/mask.cuh"
#include "../common/tile_product.cuh"
#include "../common/types.cuh"
#include "scored_heads.cuh"

namespace sparse_attn::cuda::naive {
namespace {

/// The bits of a listed block and where it begins.
struct Block {
  BlockBits bits;
  int32_t first_query = 0, first_key = 0;
};

/// The scores of queries [q0, q_end) and keys [k0, k_end), at most a tile of each.
template <typename T>
__device__ void score_tile(const ScoredHeads& scored, int64_t index, Interval queries,
                           Interval keys, const Block& block) {
  const AttentionParams& params = scored.params;
  int64_t batch = scored.batch(index);
  int64_t head = scored.head(index);
  const Sequence sequence = scored.sequence(index);
  const T* q = static_cast<const T*>(params.query.data) + batch * params.query.stride_b +
               head * params.query.stride_h + sequence.first_row * params.query.stride_s;
  const int64_t head_kv = head / params.problem.group();
  const float scale = params.score_scale(batch, head);
  int32_t depth = params.problem.head_dim;
  float acc[kProductRows][kProductRows];
  tile_product(
      depth,
      [&](int row, int d) {
        int64_t i = queries.begin + row;
        return i < queries.end && d < depth ? to_float(q[i * params.query.stride_s + d]) : 0.0f;
      },
      [&](int d, int column) {
        int32_t j = keys.begin + column;
        return j < keys.end && d < depth
                   ? key_element<T>(params.keys, params.keys.key, sequence, batch, head_kv, j, d)
                   : 0.0f;
      },
      acc);
  for (int r = 0; r < kProductRows; ++r) {
    int32_t i = queries.begin + product_row(r);
    if (i >= queries.end) continue;
    Interval bounds = params.scores.bounds.row(batch, head, i, params.problem.seq_kv);
    Query query = make_query(params.pattern, i, sequence, bounds);
    float* scores = scored.row(index, i);
    for (int c = 0; c < kProductRows; ++c) {
      int32_t j = keys.begin + product_column(c);
      if (j >= keys.end) continue;
      bool allowed = sees_key(params.pattern, query, j) &&
                     block.bits.sees(i - block.first_query, j - block.first_key) &&
                     mask_bias(params.scores.mask, batch, head, i, j) != -INFINITY;
      scores[j] = allowed ? scale * acc[r][c] : -INFINITY;
    }
  }
}

/// The query tiles of a (batch, head): of each layout row, whose listed blocks a thread block
/// visits, or of all queries, with a thread block for each key tile.
struct ScoreGrid {
  int32_t rows, tiles_q, tiles_kv;

  __host__ __device__ static ScoreGrid of(const AttentionParams& params) {
    const BlockList& list = params.pattern.list;
    const int32_t seq_q = params.problem.seq_q;
    if (!list.present()) {
      return {1, ceil_div(seq_q, kProductTile), ceil_div(params.problem.seq_kv, kProductTile)};
    }
    // A list may have more rows, and blocks be higher, than there are queries.
    return {imin(list.num_q, ceil_div(seq_q, list.block_q)),
            ceil_div(imin(list.block_q, seq_q), kProductTile), 1};
  }
  __host__ __device__ int64_t blocks() const { return int64_t{rows} * tiles_q * tiles_kv; }
};

template <typename T>
__global__ void __launch_bounds__(kProductThreads) score_kernel(const ScoredHeads scored) {
  const AttentionParams& params = scored.params;
  const BlockList& list = params.pattern.list;
  const ScoreGrid grid = ScoreGrid::of(params);
  const int64_t index = blockIdx.x / grid.blocks();
  const auto in_head = static_cast<int32_t>(blockIdx.x % grid.blocks());
  const int32_t k_tile = in_head % grid.tiles_kv;
  const int32_t q_tile = in_head / grid.tiles_kv % grid.tiles_q;
  const int32_t list_row = in_head / grid.tiles_kv / grid.tiles_q;
  const Sequence sequence = scored.sequence(index);
  const Interval all_keys = {0, sequence.keys};
  Interval rows = {0, sequence.rows};
  int32_t runs = 1;
  ListedRuns listed;
  if (list.present()) {
    rows = intersect(rows, {list_row * list.block_q, (list_row + 1) * list.block_q});
    listed = list.runs(scored.batch(index), scored.head(index), list_row, list.block_kv);
    runs = listed.count;
  }
  const int32_t q0 = rows.begin + q_tile * kProductTile;
  for (int32_t r = 0; r < runs; ++r) {
    const int32_t k_begin = k_tile * kProductTile;
    const Interval own = {k_begin, k_begin + kProductTile};
    const Interval whole = list.present() ? listed.keys(r) : own;
    const Interval keys = intersect(whole, all_keys);
    Block block;
    if (list.present()) {
      block = {list.bits_at(list.bits_row(listed, r)), rows.begin, whole.begin};
    }
    for (int32_t k0 = keys.begin; k0 < keys.end; k0 += kProductTile) {
      score_tile<T>(scored, index, {q0, imin(q0 + kProductTile, rows.end)},
                    {k0, imin(k0 + kProductTile, keys.end)}, block);
    }
  }
}

__global__ void hide_scores(float* scores, int64_t count) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    scores[i] = -INFINITY;
  }
}

}  // namespace

Status launch_scores(const ScoredHeads& scored) {
  const AttentionParams& params = scored.params;
  cudaStream_t stream = to_stream(params.stream);
  if (params.pattern.list.present()) {
    const int64_t count = scored.heads * params.problem.seq_q * params.problem.seq_kv;
    hide_scores<<<grid_for(count, kProductThreads), kProductThreads, 0, stream>>>(scored.scores,
                                                                                  count);
    Status status = launched();
    if (!status.ok()) return status;
  }
  const int64_t blocks = scored.heads * ScoreGrid::of(params).blocks();
  if (blocks == 0) return {};  // no keys
  return with_type(params.problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    score_kernel<T><<<static_cast<uint32_t>(blocks), kProductThreads, 0, stream>>>(scored);
    return launched();
  });
}

}  // namespace sparse_attn::cuda::naive
