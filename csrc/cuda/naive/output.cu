// out = P value, P from the softmax in global memory.
#include "../common/key_rows.cuh"
#include "../common/launch.cuh"
#include "../common/tile_product.cuh"
#include "../common/types.cuh"
#include "scored_heads.cuh"

namespace sparse_attn::cuda::naive {
namespace {

template <typename T>
__global__ void __launch_bounds__(kProductThreads) output_tiles(const ScoredHeads scored) {
  const AttentionParams& params = scored.params;
  int64_t tiles_q = ceil_div64(params.problem.seq_q, kProductTile);
  int64_t tiles_d = ceil_div64(params.problem.value_dim, kProductTile);
  int64_t index = blockIdx.x / (tiles_q * tiles_d);
  int32_t q0 = static_cast<int32_t>(blockIdx.x / tiles_d % tiles_q) * kProductTile;
  int32_t d0 = static_cast<int32_t>(blockIdx.x % tiles_d) * kProductTile;
  int64_t batch = scored.batch(index);
  int64_t head = scored.head(index);
  const Sequence sequence = scored.sequence(index);
  const int64_t head_kv = head / params.problem.group();
  const float scale = params.value_scale(batch, head);
  T* out = static_cast<T*>(params.outputs.out.data) + batch * params.outputs.out.stride_b +
           head * params.outputs.out.stride_h + sequence.first_row * params.outputs.out.stride_s;

  float acc[kProductRows][kProductRows];
  tile_product(
      sequence.keys,
      [&](int row, int j) {
        int32_t i = q0 + row;
        return i < sequence.rows && j < sequence.keys ? scored.row(index, i)[j] : 0.0f;
      },
      [&](int32_t j, int column) {
        int32_t d = d0 + column;
        return j < sequence.keys && d < params.problem.value_dim
                   ? key_element<T>(params.keys, params.keys.value, sequence, batch, head_kv, j, d)
                   : 0.0f;
      },
      acc);
  for (int r = 0; r < kProductRows; ++r) {
    int64_t i = q0 + product_row(r);
    for (int c = 0; c < kProductRows; ++c) {
      int32_t d = d0 + product_column(c);
      if (i < sequence.rows && d < params.problem.value_dim) {
        out[i * params.outputs.out.stride_s + d] = from_float<T>(scale * acc[r][c]);
      }
    }
  }
}

}  // namespace

Status launch_output(const ScoredHeads& scored) {
  const AttentionParams& params = scored.params;
  int64_t tiles = ceil_div64(params.problem.seq_q, kProductTile) *
                  ceil_div64(params.problem.value_dim, kProductTile);
  return with_type(params.problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    output_tiles<T><<<static_cast<uint32_t>(scored.heads * tiles), kProductThreads, 0,
                      to_stream(params.stream)>>>(scored);
    return launched();
  });
}

}  // namespace sparse_attn::cuda::naive
