// The two products of a tile for float32, on FMA units, with the rows and columns of the tensor
// core fragments: masks and softmax need not know the difference. Sums run in ascending order of
// the depth.
#pragma once

#include "../common/ptx/shared.cuh"
#include "../common/swizzle.cuh"

namespace sparse_attn::cuda::portable {

template <int HEAD_DIM, int BLOCK_KV, int kPitch>
struct FmaProducts {
  static constexpr int NT = BLOCK_KV / 8;
  static constexpr int DT = HEAD_DIM / 8;

  uint32_t query;

  /// Eight products are added as one: the sum is rounded at its full size an eighth as often.
  __device__ __forceinline__ static float dot(float4 a, float4 b) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, a.x * b.x)));
  }
  __device__ __forceinline__ static float dot(float4 a, float4 b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
  }

  __device__ __forceinline__ void start(uint32_t first_row) { query = first_row; }

  __device__ __forceinline__ void scores(float (&rS)[1][NT][4], uint32_t sK) const {
    int g = threadIdx.x % 32 / 4;
    int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int e = 0; e < 4; ++e) rS[0][nt][e] = 0.0f;
    }
#pragma unroll 1
    for (int chunk = 0; chunk < HEAD_DIM / 4; chunk += 2) {
      float4 top[2], bottom[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        top[i] = ptx::load_shared_float4(query + swizzled<kPitch>(g, chunk + i));
        bottom[i] = ptx::load_shared_float4(query + swizzled<kPitch>(g + 8, chunk + i));
      }
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int row = nt * 8 + column + e;
          const float4 k = ptx::load_shared_float4(sK + swizzled<kPitch>(row, chunk));
          const float4 next = ptx::load_shared_float4(sK + swizzled<kPitch>(row, chunk + 1));
          rS[0][nt][e] += dot(top[1], next, dot(top[0], k));
          rS[0][nt][e + 2] += dot(bottom[1], next, dot(bottom[0], k));
        }
      }
    }
  }

  using Probabilities = float[1][NT][4];
  static constexpr int kSlices = 1;

  __device__ __forceinline__ static void round(Probabilities& rP, const float (&rS)[1][NT][4],
                                               int) {
#pragma unroll
    for (int k = 0; k < NT * 4; ++k) rP[0][k / 4][k % 4] = rS[0][k / 4][k % 4];
  }

  /// O += P V; the lanes of a row take turns in giving their P to the others. A tile is summed by
  /// itself first: sums over many keys lose less that way.
  template <typename Prepare>
  __device__ __forceinline__ void output(float (&rO)[1][DT][4], const Probabilities (&slices)[1],
                                         uint32_t sV, const Prepare& prepare) const {
    prepare(0);
    const Probabilities& rP = slices[0];
    int quad = threadIdx.x % 32 & ~3;
    int t = threadIdx.x % 4;
    float top[BLOCK_KV], bottom[BLOCK_KV];
#pragma unroll
    for (int key = 0; key < BLOCK_KV; ++key) {
      top[key] = __shfl_sync(~0u, rP[0][key / 8][key % 2], quad + key % 8 / 2);
      bottom[key] = __shfl_sync(~0u, rP[0][key / 8][key % 2 + 2], quad + key % 8 / 2);
    }
#pragma unroll
    for (int pair = 0; pair < DT / 2; ++pair) {
      float sum[2][4] = {};
#pragma unroll
      for (int key = 0; key < BLOCK_KV; ++key) {
        float4 v = ptx::load_shared_float4(sV + swizzled<kPitch>(key, pair * 4 + t));
        const float row[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int d = 0; d < 4; ++d) {
          sum[0][d] = fmaf(top[key], row[d], sum[0][d]);
          sum[1][d] = fmaf(bottom[key], row[d], sum[1][d]);
        }
      }
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        rO[0][2 * pair + d / 2][d % 2] += sum[0][d];
        rO[0][2 * pair + d / 2][d % 2 + 2] += sum[1][d];
      }
    }
  }

  /// Column of the head dim that element e (0 .. 3) of rO[.][dt] holds: a lane's four lie together.
  __device__ __forceinline__ static int column(int dt, int e) {
    return dt / 2 * 16 + threadIdx.x % 4 * 4 + dt % 2 * 2 + e % 2;
  }
};

}  // namespace sparse_attn::cuda::portable
