// The two products of a step whose keys and values are codes of 8 bits. Codes become float16 on
// their way from shared memory to the fragments, exactly: so lanes read runs of codes, and
// which of them are neighbours in a fragment is a matter of numbering channels alike on both sides.
// Queries become float16 too, relative to a power of two of their row.
//
//   lane 4 g + t      key g and g + 8: channels t D/4 .. (t + 1) D/4 - 1, four for each mma
//                     keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of the values: channels g D/8 and on, of
//                     which fragment dt of the output has one
//
// Of MT fragments of rows each code becomes a number once. The queries of one are held in
// registers; those of several lie in shared memory, as the lanes of all warps take them.
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

template <int HEAD_DIM, int MT, int kPitch>
struct CodeProducts {
  static constexpr int kSteps = HEAD_DIM / 16;
  static constexpr int DT = HEAD_DIM / 8;
  static constexpr int kLaneColumns = HEAD_DIM / 4;
  static constexpr int NT = 2;
  static constexpr int kFragmentBytes = 16 * kPitch;  // as many as rows of queries take
  static constexpr int kLaneBytes = 16;               // of a step's fragment
  static_assert(kFragmentBytes == kSteps * 32 * kLaneBytes, "fragments take the place of rows");
  using Layout = CodeTile<HEAD_DIM>;
  using Probabilities = uint32_t[MT][4];  // P, float16
  static constexpr int kHeldSteps = MT == 1 ? kSteps : 1;
  uint4 rQ[kHeldSteps];  // of one fragment of rows
  float2 rUnit;
  uint32_t sQ;  // where the lane's parts of several lie, and after them its rows' units

  /// Takes the queries from swizzled rows of float16, if they are `half`, or of bfloat16. They may
  /// be overwritten afterwards if there is one fragment of rows; of several, warp i has loaded the
  /// i-th, and the thread block calls it.
  __device__ __forceinline__ void start(uint32_t query, bool half) {
    if constexpr (MT == 1) {
      rUnit = convert(rQ, query, half);
    } else {
      const int warp = threadIdx.x / 32;
      sQ = query + threadIdx.x % 32 * kLaneBytes;
      if (warp < MT) {
        uint4 own[kSteps];
        const float2 unit = convert(own, query + warp * kFragmentBytes, half);
        __syncwarp();  // the rows have been read
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          ptx::store_shared_16(fragment_at(warp, step), own[step]);
        }
        ptx::store_shared_8(unit_of(warp), {__float_as_uint(unit.x), __float_as_uint(unit.y)});
      }
      __syncthreads();
    }
  }

  __device__ __forceinline__ uint32_t fragment_at(int mt, int step) const {
    return sQ + mt * kFragmentBytes + step * 32 * kLaneBytes;
  }
  __device__ __forceinline__ uint32_t unit_of(int mt) const { return fragment_at(MT, 0) + mt * 8; }

  /// The lane's part of a step of a fragment of rows.
  __device__ __forceinline__ uint4 query_at(int mt, int step) const {
    if constexpr (MT == 1) return rQ[step];
    return ptx::load_shared_16(fragment_at(mt, step));
  }
  /// What products of rows g and g + 8 are multiples of.
  __device__ __forceinline__ float2 unit_at(int mt) const {
    if constexpr (MT == 1) return rUnit;
    const uint2 unit = ptx::load_shared_8(unit_of(mt));
    return {__uint_as_float(unit.x), __uint_as_float(unit.y)};
  }

  /// Turns rows of queries into the lane's fragments, relative to the units that are returned.
  __device__ __forceinline__ static float2 convert(uint4 (&fragments)[kSteps], uint32_t query,
                                                   bool half) {
    auto numbers = [half](uint32_t pair) {
      return half ? unpack<__half>(pair) : unpack<__nv_bfloat16>(pair);
    };
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float unit[2];
    uint2 pairs[2][kSteps];
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
        pairs[h][step] = {pack<__half>(q[step].x * inverse, q[step].y * inverse),
                          pack<__half>(q[step].z * inverse, q[step].w * inverse)};
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      fragments[step] = {pairs[0][step].x, pairs[1][step].x, pairs[0][step].y, pairs[1][step].y};
    }
    return {unit[0], unit[1]};
  }

  /// S = Q K^T of N steps: side by side, since a product waits for the one before it in its sums,
  /// or one after the other where several fragments of rows lie side by side. All codes of what is
  /// side by side are read first: loads and products keep the order in which they stand.
  template <int N>
  __device__ __forceinline__ void scores(float (&rS)[N][MT][NT][4], const uint32_t (&sK)[N]) const {
    constexpr int kLoads = kLaneColumns / Layout::kChunk;
    constexpr int kBeside = MT == 1 ? N : 1;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int first = 0; first < N; first += kBeside) {
      CodeWords<Layout::kChunk / 4> codes[kBeside][NT][kLoads];
#pragma unroll
      for (int i = 0; i < kBeside * NT * kLoads; ++i) {
        const int step = i / NT / kLoads, nt = i % NT, at = i / NT % kLoads;
        const int column = t * kLaneColumns + at * Layout::kChunk;
        codes[step][nt][at].load(sK[first + step] + Layout::place(g + 8 * nt, column));
      }
#pragma unroll
      for (int i = 0; i < kBeside * MT * NT * 4; ++i) {
        rS[first + i / 4 / NT / MT][i / 4 / NT % MT][i / 4 % NT][i % 4] = 0.0f;
      }
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        uint4 q[MT];
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) q[mt] = query_at(mt, k);
#pragma unroll
        for (int i = 0; i < kBeside * NT; ++i) {
          const uint2 pairs = widen<__half>(codes[i / NT][i % NT][k / 4].word[k % 4]);
#pragma unroll
          for (int mt = 0; mt < MT; ++mt) {
            const uint32_t rows[4] = {q[mt].x, q[mt].y, q[mt].z, q[mt].w};
            ptx::mma_16x8x16<__half>(rS[first + i / NT][mt][i % NT], rows, pairs.x, pairs.y);
          }
        }
      }
    }
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
      const float2 unit = unit_at(mt);
#pragma unroll
      for (int i = 0; i < N * NT * 4; ++i) {
        rS[i / 4 / NT][mt][i / 4 % NT][i % 4] *= i % 4 < 2 ? unit.x : unit.y;
      }
    }
  }

  __device__ __forceinline__ static void round(Probabilities& rP, const float (&rS)[MT][NT][4],
                                               int) {
#pragma unroll
    for (int r = 0; r < MT * 4; ++r) {
      const float* pair = &rS[r / 4][r % 4 / 2][r % 2 * 2];
      rP[r / 4][r % 4] = pack<__half>(pair[0], pair[1]);
    }
  }

  /// Codes of the values of the lane's four keys, DT channels each.
  struct Values {
    static constexpr int kRun = DT < Layout::kChunk ? DT : Layout::kChunk;
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
      values.codes[key][i / 4].load(sV + Layout::place(row, g * DT + i / 4 * kRun));
    }
    return values;
  }

  /// O += P V.
  template <typename Prepare>
  __device__ __forceinline__ void output(float (&rO)[MT][DT][4], const Probabilities (&rP)[1],
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
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        ptx::mma_16x8x16<__half>(rO[mt][dt], rP[0][mt], first.x, second.x);
        ptx::mma_16x8x16<__half>(rO[mt][dt + 1], rP[0][mt], first.y, second.y);
      }
    }
  }

  /// Column of the head dim that element e (0 .. 3) of rO[.][dt] holds.
  __device__ __forceinline__ static int column(int dt, int e) {
    return (static_cast<int>(threadIdx.x) % 4 * 2 + e % 2) * DT + dt;
  }
};

}  // namespace sparse_attn::cuda::decode
