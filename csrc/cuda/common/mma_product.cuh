// The two products of a tile on tensor cores: S = Q K^T and O += P V, fp16 or bf16 with float32
// sums. Tiles lie swizzled in shared memory (swizzle.cuh). The depth is walked in ascending order
// in both, so that two passes over the same rows give the same scores bit by bit.
#pragma once

#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "swizzle.cuh"
#include "types.cuh"

namespace sparse_attn::cuda {

template <bool kFirst, typename A>
__device__ __forceinline__ const A& select(const A& first, const A& second) {
  if constexpr (kFirst) return first;
  return second;
}

template <typename T, int HEAD_DIM, int BLOCK_KV, int MT, int kPitch, bool kQueryRegisters>
struct TensorCoreProducts {
  static constexpr int kSteps = HEAD_DIM / 16;  // of the depth of Q K^T
  static constexpr int kHeldSteps = kQueryRegisters ? kSteps : 1;
  static constexpr int NT = BLOCK_KV / 8;
  static constexpr int DT = HEAD_DIM / 8;

  uint32_t query;  // shared memory of the warp's first row
  uint32_t rQ[kHeldSteps][MT][4];

  __device__ __forceinline__ void load_query(uint32_t (&r)[MT][4], int step) const {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
      ptx::ldmatrix_x4(
          r[mt], query + mt * 16 * kPitch + swizzled<kPitch>(lane % 16, 2 * step + lane / 16));
    }
  }

  /// What the thread reads of the first 16 columns of 16 keys, or of 16 values, from address 0.
  __device__ __forceinline__ static uint32_t key_place() {
    const int lane = threadIdx.x % 32;
    return swizzled<kPitch>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  }
  __device__ __forceinline__ static uint32_t value_place() {
    const int lane = threadIdx.x % 32;
    return swizzled<kPitch>(lane % 16, lane / 16);
  }
  __device__ __forceinline__ static void load_key(uint32_t (&r)[NT / 2][4], uint32_t first,
                                                  int step) {
#pragma unroll
    for (int pair = 0; pair < NT / 2; ++pair) {
      ptx::ldmatrix_x4(r[pair], swizzled_after(first, 2 * step) + pair * 16 * kPitch);
    }
  }

  __device__ __forceinline__ static void load_value(uint32_t (&r)[4], uint32_t first, int step,
                                                    int pair) {
    ptx::ldmatrix_x4_trans(r, swizzled_after(first, 2 * pair) + step * 16 * kPitch);
  }

  /// Takes the queries from shared memory; they may be overwritten afterwards if kQueryRegisters.
  __device__ __forceinline__ void start(uint32_t first_row) {
    query = first_row;
    if constexpr (kQueryRegisters) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) load_query(rQ[step], step);
    }
  }

  /// S = Q K^T; fragments of the next step are on their way while a step is multiplied.
  __device__ __forceinline__ void scores(float (&rS)[MT][NT][4], uint32_t sK) const {
    // Of 16 keys there is one sum of the even and one of the odd steps, however many rows there are
    // beside a row: two chains of products are too few to run beside each other.
    constexpr int kSums = NT == 2 ? 2 : 1;
    float sums[kSums][MT][NT][4] = {};
    const uint32_t first = sK + key_place();
    uint32_t rK[2][NT / 2][4];
    uint32_t rA[2][MT][4];
    if constexpr (!kQueryRegisters) load_query(rA[0], 0);
    load_key(rK[0], first, 0);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step + 1 < kSteps) {
        if constexpr (!kQueryRegisters) load_query(rA[(step + 1) % 2], step + 1);
        load_key(rK[(step + 1) % 2], first, step + 1);
      }
      const auto& a = select<kQueryRegisters>(rQ[step % kHeldSteps], rA[step % 2]);
      const auto& k = rK[step % 2];
#pragma unroll
      for (int pair = 0; pair < NT / 2; ++pair) {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) {
          ptx::mma_16x8x16<T>(sums[step % kSums][mt][2 * pair], a[mt], k[pair][0], k[pair][1]);
          ptx::mma_16x8x16<T>(sums[step % kSums][mt][2 * pair + 1], a[mt], k[pair][2], k[pair][3]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4 * MT * NT; ++i) {
      const int mt = i / 4 / NT, nt = i / 4 % NT, e = i % 4;
      rS[mt][nt][e] = sums[0][mt][nt][e];
      if constexpr (kSums > 1) rS[mt][nt][e] += sums[1][mt][nt][e];
    }
  }

  /// P of 16 keys rounded to T, in the fragments of the second product's left side.
  using Probabilities = uint32_t[MT][4];
  static constexpr int kSlices = BLOCK_KV / 16;

  __device__ __forceinline__ static void round(Probabilities& rP, const float (&rS)[MT][NT][4],
                                               int slice) {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float* pair = &rS[mt][2 * slice + r / 2][r % 2 * 2];
        rP[mt][r] = pack<T>(pair[0], pair[1]);
      }
    }
  }

  using Values = uint32_t;  // where they lie
  __device__ __forceinline__ static Values values_at(uint32_t sV) { return sV; }

  /// O += P V, values loaded kAhead fragments before they are multiplied. prepare(slice) makes a
  /// slice of P that is not there yet; it is called a slice ahead.
  template <typename Prepare>
  __device__ __forceinline__ void output(float (&rO)[MT][DT][4], const Probabilities (&rP)[kSlices],
                                         uint32_t sV, const Prepare& prepare) const {
    constexpr int kAhead = 4;
    constexpr int kPairs = DT / 2;
    constexpr int kFragments = kSlices * kPairs;
    const uint32_t first = sV + value_place();
    uint32_t rV[kAhead + 1][4];
#pragma unroll
    for (int i = 0; i < kAhead && i < kFragments; ++i) {
      load_value(rV[i], first, i / kPairs, i % kPairs);
    }
    prepare(0);
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      int slice = i / kPairs;
      int pair = i % kPairs;
      if (pair == 0 && slice + 1 < kSlices) prepare(slice + 1);
      int next = i + kAhead;
      if (next < kFragments) {
        load_value(rV[next % (kAhead + 1)], first, next / kPairs, next % kPairs);
      }
      const uint32_t (&v)[4] = rV[i % (kAhead + 1)];
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        ptx::mma_16x8x16<T>(rO[mt][2 * pair], rP[slice][mt], v[0], v[1]);
        ptx::mma_16x8x16<T>(rO[mt][2 * pair + 1], rP[slice][mt], v[2], v[3]);
      }
    }
  }

  /// Column of the head dim that element e (0 .. 3) of rO[.][dt] holds.
  __device__ __forceinline__ static int column(int dt, int e) {
    return dt * 8 + threadIdx.x % 4 * 2 + e % 2;
  }
};

}  // namespace sparse_attn::cuda
