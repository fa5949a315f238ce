// append_to_cache: each warp writes one row of keys or values to its slot, as it is or divided by
// its scale and rounded to float8.
#include <cuda_fp8.h>

#include "../common/launch.cuh"
#include "../common/types.cuh"
#include "append.h"

namespace sparse_attn::cuda {
namespace {

constexpr int kAppendWarps = 4;
constexpr int kVector = 8;  // elements that a lane moves at once, where rows are aligned to them

template <typename T, int N>
struct alignas(sizeof(T) * N) Elements {
  T at[N];
};

template <typename T, typename Stored, int N>
__device__ __forceinline__ void copy_row(const AppendParams& params, const CacheRows& part,
                                         int64_t token, int32_t head) {
  int64_t place = params.place(part, token, head);
  if (place < 0) return;
  const T* row =
      static_cast<const T*>(part.rows) + token * part.row_stride_t + head * part.row_stride_h;
  Stored* target = static_cast<Stored*>(part.cache) + place;
  float scale = part.scale.at(0, head);
  for (int32_t d = threadIdx.x % 32 * N; d < part.head_dim; d += 32 * N) {
    auto source = *reinterpret_cast<const Elements<T, N>*>(row + d);
    Elements<Stored, N> result;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if constexpr (std::is_same_v<T, Stored>) {
        result.at[i] = source.at[i];
      } else {
        float quotient = __fdiv_rn(to_float(source.at[i]), scale);
        result.at[i] = __nv_cvt_float_to_fp8(quotient, __NV_SATFINITE, __NV_E4M3);
      }
    }
    *reinterpret_cast<Elements<Stored, N>*>(target + d) = result;
  }
}

template <typename T, typename Stored, int N>
__global__ void __launch_bounds__(kAppendWarps * 32) append_rows(const AppendParams params) {
  int64_t rows = params.tokens * params.heads * 2;
  int64_t step = int64_t{gridDim.x} * kAppendWarps;
  for (int64_t row = blockIdx.x * int64_t{kAppendWarps} + threadIdx.x / 32; row < rows;
       row += step) {
    int64_t token = row / 2 / params.heads;
    auto head = static_cast<int32_t>(row / 2 % params.heads);
    copy_row<T, Stored, N>(params, row % 2 == 0 ? params.key : params.value, token, head);
  }
}

/// Whether every row, of new elements and of the cache, lies on whole vectors.
bool is_aligned(const CacheRows& part, int64_t size, int64_t stored_size) {
  int64_t strides = part.row_stride_t | part.row_stride_h | part.stride_page | part.stride_slot |
                    part.stride_h | part.head_dim;
  return strides % kVector == 0 && reinterpret_cast<uintptr_t>(part.rows) % (kVector * size) == 0 &&
         reinterpret_cast<uintptr_t>(part.cache) % (kVector * stored_size) == 0;
}

template <typename T, typename Stored>
Status launch_append(const AppendParams& params) {
  bool aligned = is_aligned(params.key, sizeof(T), sizeof(Stored)) &&
                 is_aligned(params.value, sizeof(T), sizeof(Stored));
  auto kernel = aligned ? append_rows<T, Stored, kVector> : append_rows<T, Stored, 1>;
  uint32_t blocks = grid_for(params.tokens * params.heads * 2, kAppendWarps);
  kernel<<<blocks, kAppendWarps * 32, 0, to_stream(params.stream)>>>(params);
  return launched();
}

}  // namespace

Status append_to_cache(const AppendParams& params) {
  return with_type(params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    return params.float8 ? launch_append<T, __nv_fp8_storage_t>(params)
                         : launch_append<T, T>(params);
  });
}

}  // namespace sparse_attn::cuda
