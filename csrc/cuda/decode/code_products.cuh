// The two products of a step whose keys and values are codes of 8 bits. Codes become float16 on
// their way from shared memory to the fragments, exactly: so lanes read runs of eight codes, and
// which of them are neighbours in a fragment is a matter of numbering channels alike on both sides.
// Queries become float16 too, relative to a power of two of their row.
//
//   lane 4 g + t      key g and g + 8: channels t D/4 .. (t + 1) D/4 - 1, four for each mma
//                     keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of the values: channels g D/8 and on, of
//                     which fragment dt of the output has one
#pragma once

#include "../common/key_rows.cuh"
#include "../common/ptx/mma.cuh"

namespace sparse_attn::cuda::decode {

/// A tile of 16 rows of codes: chunks of 16, permuted so that eight rows lie in different banks.
template <int HEAD_DIM>
struct CodeTile {
  static constexpr int kChunk = 16;
  static constexpr int kChunks = HEAD_DIM / kChunk;  // of a row

  /// What the bytes of a chunk's place in row 0 are xored with in another row.
  __device__ __forceinline__ static constexpr uint32_t turn(int row) {
    constexpr int kMask = kChunks < 8 ? kChunks - 1 : 7;
    return (row & kMask) * kChunk;
  }
  __device__ __forceinline__ static uint32_t place(int row, int column) {
    return row * HEAD_DIM + ((column / kChunk * kChunk) ^ turn(row)) + column % kChunk;
  }
};

template <int HEAD_DIM, int kPitch>
struct CodeProducts {
  static constexpr int kSteps = HEAD_DIM / 16;
  static constexpr int DT = HEAD_DIM / 8;
  static constexpr int kLaneColumns = HEAD_DIM / 4;
  static constexpr int NT = 2;
  using Tile = CodeTile<HEAD_DIM>;
  using Slice = uint32_t[1][4];  // P, float16

  uint32_t rQ[kSteps][4];
  float unit[2];  // of the queries of rows g and g + 8

  /// Takes the queries from swizzled rows of float16, if they are `half`, or of bfloat16; they may
  /// be overwritten afterwards.
  __device__ __forceinline__ void start(uint32_t query, bool half) {
    auto numbers = [half](uint32_t pair) {
      return half ? unpack<__half>(pair) : unpack<__nv_bfloat16>(pair);
    };
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float4 q[kSteps];
      float largest = 0.0f;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int column = t * kLaneColumns + 4 * step;
        const uint2 four =
            ptx::load_shared_8(query + swizzled<kPitch>(g + 8 * h, column / 8) + column % 8 * 2);
        const float2 low = numbers(four.x), high = numbers(four.y);
        q[step] = {low.x, low.y, high.x, high.y};
        largest = fmaxf(
            largest, fmaxf(fmaxf(fabsf(low.x), fabsf(low.y)), fmaxf(fabsf(high.x), fabsf(high.y))));
      }
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      const int exponent = imax(1, imin(__float_as_int(largest) >> 23, 253));
      unit[h] = __int_as_float(exponent << 23);
      const float inverse = __int_as_float((254 - exponent) << 23);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        rQ[step][h] = pack<__half>(q[step].x * inverse, q[step].y * inverse);
        rQ[step][2 + h] = pack<__half>(q[step].z * inverse, q[step].w * inverse);
      }
    }
  }

  /// S = Q K^T. All codes are read first: loads and products keep the order in which they stand.
  __device__ __forceinline__ void scores(float (&rS)[1][NT][4], uint32_t sK) const {
    constexpr int kLoads = kLaneColumns / 8;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    uint2 codes[NT][kLoads];
#pragma unroll
    for (int i = 0; i < NT * kLoads; ++i) {
      const int nt = i % NT, at = i / NT;
      codes[nt][at] = ptx::load_shared_8(sK + Tile::place(g + 8 * nt, t * kLaneColumns + 8 * at));
    }
#pragma unroll
    for (int e = 0; e < 4 * NT; ++e) rS[0][e / 4][e % 4] = 0.0f;
#pragma unroll
    for (int at = 0; at < kLoads; ++at) {
      uint2 low[NT], high[NT];
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        low[nt] = widen<__half>(codes[nt][at].x);
        high[nt] = widen<__half>(codes[nt][at].y);
      }
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        ptx::mma_16x8x16<__half>(rS[0][nt], rQ[2 * at], low[nt].x, low[nt].y);
      }
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        ptx::mma_16x8x16<__half>(rS[0][nt], rQ[2 * at + 1], high[nt].x, high[nt].y);
      }
    }
#pragma unroll
    for (int e = 0; e < 4 * NT; ++e) rS[0][e / 4][e % 4] *= unit[e % 4 / 2];
  }

  __device__ __forceinline__ static void round(Slice& rP, const float (&rS)[1][NT][4], int) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float* pair = &rS[0][r / 2][r % 2 * 2];
      rP[0][r] = pack<__half>(pair[0], pair[1]);
    }
  }

  /// Codes of the values of the lane's four keys, eight channels each.
  struct Values {
    uint2 codes[DT / 8][4];
  };
  /// Reads them, before they are needed.
  __device__ __forceinline__ static Values values_at(uint32_t sV) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    Values values;
#pragma unroll
    for (int i = 0; i < DT / 8 * 4; ++i) {
      const int key = i % 4, row = 2 * t + key % 2 + key / 2 * 8;
      values.codes[i / 4][key] = ptx::load_shared_8(sV + Tile::place(row, g * DT + i / 4 * 8));
    }
    return values;
  }

  /// O += P V.
  template <typename Prepare>
  __device__ __forceinline__ void output(float (&rO)[1][DT][4], const Slice (&rP)[1],
                                         const Values& values, const Prepare&) const {
#pragma unroll
    for (int dt = 0; dt < DT; dt += 2) {
      // Channels dt and dt + 1 of two keys side by side.
      const uint32_t order = dt % 4 == 0 ? 0x5140 : 0x7362;
      auto pairs = [&](int key) {
        const uint2 &a = values.codes[dt / 8][key], &b = values.codes[dt / 8][key + 1];
        const bool low = dt % 8 < 4;
        return widen<__half>(__byte_perm(low ? a.x : a.y, low ? b.x : b.y, order));
      };
      const uint2 first = pairs(0), second = pairs(2);
      ptx::mma_16x8x16<__half>(rO[0][dt], rP[0][0], first.x, second.x);
      ptx::mma_16x8x16<__half>(rO[0][dt + 1], rP[0][0], first.y, second.y);
    }
  }

  /// Column of the head dim that element e (0 .. 3) of rO[.][dt] holds.
  __device__ __forceinline__ static int column(int dt, int e) {
    return (static_cast<int>(threadIdx.x) % 4 * 2 + e % 2) * DT + dt;
  }
};

}  // namespace sparse_attn::cuda::decode
