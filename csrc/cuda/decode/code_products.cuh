// The two products of a step whose keys and values are codes of 8 bits. Codes become float16 on
// their way from shared memory to the fragments, exactly: so lanes read runs of codes, and
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

/// 4 WORDS codes from an address that is a multiple of as many bytes, 8 or 16 of them at a time: 16
/// leave no bank of a tile's rows idle.
template <int WORDS>
struct CodeWords {
  uint32_t word[WORDS];

  __device__ __forceinline__ void load(uint32_t from) {
    if constexpr (WORDS == 2) {
      const uint2 data = ptx::load_shared_8(from);
      word[0] = data.x, word[1] = data.y;
    } else {
      static_assert(WORDS == 4);
      const uint4 data = ptx::load_shared_16(from);
      word[0] = data.x, word[1] = data.y, word[2] = data.z, word[3] = data.w;
    }
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

  /// S = Q K^T of N steps side by side, since a product waits for the one before it in its sums.
  /// All codes are read first: loads and products keep the order in which they stand.
  template <int N>
  __device__ __forceinline__ void scores(float (&rS)[N][1][NT][4], const uint32_t (&sK)[N]) const {
    constexpr int kLoads = kLaneColumns / Tile::kChunk;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    CodeWords<Tile::kChunk / 4> codes[N][NT][kLoads];
#pragma unroll
    for (int i = 0; i < N * NT * kLoads; ++i) {
      const int step = i / NT / kLoads, nt = i % NT, at = i / NT % kLoads;
      codes[step][nt][at].load(sK[step] +
                               Tile::place(g + 8 * nt, t * kLaneColumns + at * Tile::kChunk));
    }
#pragma unroll
    for (int e = 0; e < N * NT * 4; ++e) rS[e / 4 / NT][0][e / 4 % NT][e % 4] = 0.0f;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int i = 0; i < N * NT; ++i) {
        const uint2 pairs = widen<__half>(codes[i / NT][i % NT][k / 4].word[k % 4]);
        ptx::mma_16x8x16<__half>(rS[i / NT][0][i % NT], rQ[k], pairs.x, pairs.y);
      }
    }
#pragma unroll
    for (int e = 0; e < N * NT * 4; ++e) rS[e / 4 / NT][0][e / 4 % NT][e % 4] *= unit[e % 4 / 2];
  }

  __device__ __forceinline__ static void round(Slice& rP, const float (&rS)[1][NT][4], int) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float* pair = &rS[0][r / 2][r % 2 * 2];
      rP[0][r] = pack<__half>(pair[0], pair[1]);
    }
  }

  /// Codes of the values of the lane's four keys, DT channels each.
  struct Values {
    static constexpr int kRun = DT < Tile::kChunk ? DT : Tile::kChunk;
    CodeWords<kRun / 4> codes[4][DT / kRun];

    /// Those of channels dt to dt + 3; dt is a multiple of 4.
    __device__ __forceinline__ uint32_t word(int key, int dt) const {
      return codes[key][dt / kRun].word[dt % kRun / 4];
    }
  };
  /// Reads them, before they are needed.
  __device__ __forceinline__ static Values values_at(uint32_t sV) {
    constexpr int kRun = Values::kRun;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    Values values;
#pragma unroll
    for (int i = 0; i < DT / kRun * 4; ++i) {
      const int key = i % 4, row = 2 * t + key % 2 + key / 2 * 8;
      values.codes[key][i / 4].load(sV + Tile::place(row, g * DT + i / 4 * kRun));
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
        const int from = dt / 4 * 4;
        return widen<__half>(
            __byte_perm(values.word(key, from), values.word(key + 1, from), order));
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
