// merge_states: two partial results over disjoint keys become one.
//   w = sigmoid(lse_b - lse_a), out = out_a + w (out_b - out_a), lse = log(e^lse_a + e^lse_b)
// A part without keys (lse = -inf) has weight 0, so what its output holds never counts.
#include "../common/launch.cuh"
#include "../common/types.cuh"
#include "tools.h"

namespace sparse_attn::cuda {
namespace {

constexpr int kMergeWarps = 4;

template <typename T>
__global__ void __launch_bounds__(kMergeWarps * 32) merge_rows(const MergeParams params) {
  int64_t row = blockIdx.x * int64_t{kMergeWarps} + threadIdx.x / 32;
  if (row >= params.rows) return;
  float lse_a = params.lse_a[row];
  float lse_b = params.lse_b[row];
  float top = fmaxf(lse_a, lse_b);
  bool empty = lse_a == -INFINITY && lse_b == -INFINITY;
  float a = empty ? 0.0f : expf(lse_a - top);
  float b = empty ? 0.0f : expf(lse_b - top);
  const T* out_a = static_cast<const T*>(params.out_a) + row * params.head_dim;
  const T* out_b = static_cast<const T*>(params.out_b) + row * params.head_dim;
  T* out = static_cast<T*>(params.out) + row * params.head_dim;
  for (int32_t d = threadIdx.x % 32; d < params.head_dim; d += 32) {
    float sum =
        (a == 0.0f ? 0.0f : a * to_float(out_a[d])) + (b == 0.0f ? 0.0f : b * to_float(out_b[d]));
    out[d] = from_float<T>(empty ? 0.0f : sum / (a + b));
  }
  if (threadIdx.x % 32 == 0) params.lse[row] = empty ? -INFINITY : top + logf(a + b);
}

}  // namespace

Status merge_states(const MergeParams& params) {
  int64_t blocks = ceil_div64(params.rows, kMergeWarps);
  return with_type(params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    merge_rows<T>
        <<<static_cast<uint32_t>(blocks), kMergeWarps * 32, 0, to_stream(params.stream)>>>(params);
    return launched();
  });
}

}  // namespace sparse_attn::cuda
