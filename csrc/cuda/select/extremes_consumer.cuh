// One of the warpgroups of extremes_hopper.cu: the bounds of 64 rows on the key blocks of a tile,
// and what becomes of them. A bound takes of every element the greatest value or the least,
// so that of [greatest, least] side by side one meets a zero: a sparse product with 2 of 4
// elements, whose places are the queries' signs. Of zeros, infinities and NaN too each has one of
// both signs, so that no element of a query can make places that are not allowed.
#pragma once

#include "../common/log2_units.h"
#include "../common/ptx/math.cuh"
#include "../common/ptx/mbarrier.cuh"
#include "../common/ptx/warpgroup.cuh"
#include "../common/ptx/wgmma.cuh"
#include "../common/swizzle.cuh"
#include "extremes_unit.cuh"

namespace sparse_attn::cuda::extremes {

/// The signs of 8 elements of a row, and of the row 8 below it, as places of a sparse product: two
/// bits an element, of which the lower one takes the least value, and the upper one is set for the
/// second element of each pair.
__device__ __forceinline__ uint32_t places_of(const uint4& row, const uint4& below, bool turned) {
  constexpr int kWeights = static_cast<int>(0xC0F0FCFF);  // -64, -16, -4, -1
  const uint32_t words[8] = {row.x, row.y, row.z, row.w, below.x, below.y, below.z, below.w};
  int places = 0;
#pragma unroll
  for (int i = 3; i >= 0; --i) {
    int signs;  // four bytes, 0 or -1
    asm("prmt.b32 %0, %1, %2, 0xFDB9;" : "=r"(signs) : "r"(words[2 * i]), "r"(words[2 * i + 1]));
    places = __dp4a(signs, kWeights, places << 8);
  }
  return static_cast<uint32_t>(places) ^ (turned ? 0xDDDDDDDDu : 0x88888888u);
}

/// Adds what the lanes of a column hold, each lane for half of its kHeld columns.
template <int kStep, int kHeld>
__device__ __forceinline__ void halve_columns(float* columns) {
  const bool upper = threadIdx.x & kStep;
#pragma unroll
  for (int i = 0; i < kHeld / 2; ++i) {
    const float kept = upper ? columns[kHeld / 2 + i] : columns[i];
    const float given = upper ? columns[i] : columns[kHeld / 2 + i];
    columns[i] = kept + __shfl_xor_sync(~0u, given, kStep);
  }
}

template <typename C, Pass kPass>
struct Consumer {
  using Product = ptx::WgmmaSparse<C::kDtype, kChunk>;
  using Scores = float[kChunk / 2];
  static constexpr int kQuarters = kChunk / kQuarter, kFragments = kQuarter / 8;

  const Arguments& args;
  Storage<C>& storage;
  const int consumer;
  const int warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32, quad = lane % 4;
  const int row = warp * 16 + lane / 4;  // of the half, and the row 8 below it
  uint32_t parity = 0;                   // of the queries
  int buffer = 0;                        // of sums
  // Of the half at hand; key blocks count from the tile's first one.
  Item item;
  int32_t first;       // row
  int32_t limits[2];   // key blocks before it are seen, by row
  int32_t every, end;  // the same by all rows, and by some
  float lse[2];        // kShares: of the row
  float unit;          // what makes a product a score of log2

  __device__ static void arrive(uint64_t& barrier) {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::smem_address(&barrier));
  }

  __device__ __forceinline__ void begin(int half) {
    first = item.row * kTileRows + half * kRows;
    const int32_t j0 = item.column * C::kColumns, last = first + kRows - 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t i = first + row + 8 * r;
      limits[r] = i < item.rows ? args.seen(item, i) - j0 : 0;
      // Infinity where it sees nothing. The load ends under the products.
      if (kPass == Pass::kShares) lse[r] = limits[r] > 0 ? *args.masses_of(item.head, i) : INFINITY;
    }
    every = last < item.rows ? args.seen(item, first) - j0 : 0;
    end = args.seen(item, imin(last, item.rows - 1)) - j0;
    every = __shfl_sync(~0u, every, 0);
    end = __shfl_sync(~0u, end, 0);
  }

  using Places = uint32_t[C::HEAD_DIM / 32];
  /// Lanes 0 and 1 of a quad have the places of a step of 16 columns, lanes 2 and 3 the next one's.
  __device__ __forceinline__ void load_places(Places& places) const {
    const uint8_t* query = storage.query[consumer];
    const bool turned = args.params.scores.scale < 0;
#pragma unroll
    for (int i = 0; i < C::HEAD_DIM / 32; ++i) {
      const uint8_t* at =
          query + i / 2 * kRows * kRowBytes + swizzled<kRowBytes>(row, i % 2 * 4 + quad);
      places[i] = places_of(*reinterpret_cast<const uint4*>(at),
                            *reinterpret_cast<const uint4*>(at + 8 * kRowBytes), turned);
    }
  }
  __device__ static uint64_t descriptor(const uint8_t* tile) {
    return ptx::wgmma_descriptor(ptx::smem_address(tile), 16, 8 * kRowBytes,
                                 ptx::Swizzle::k128Bytes);
  }
  /// The products with a chunk of the tile's key blocks.
  __device__ __forceinline__ void multiply(Scores& scores, Places& places, int chunk) const {
    const uint64_t queries = descriptor(storage.query[consumer]);
    const uint64_t keys = descriptor(storage.key + chunk * kChunk * kRowBytes);
    ptx::pin(scores);
    ptx::pin(places);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::HEAD_DIM / 16; ++i) {
      const uint64_t a = ptx::wgmma_advance(queries, i / 4 * kRows * kRowBytes + i % 4 * 32);
      const uint64_t b = ptx::wgmma_advance(keys, i / 2 * C::kColumns * kRowBytes + i % 2 * 64);
      if (i % 2 == 0) {
        Product::template ss<0>(scores, a, b, places[i / 2], i > 0);
      } else {
        Product::template ss<1>(scores, a, b, places[i / 2], true);
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::pin(scores);
    ptx::pin(places);
  }

  /// Makes the products scores but for the scale, where that is plain.
  __device__ __forceinline__ void finish(Scores& scores) {
    const float softcap = args.params.scores.softcap, scale = args.params.scores.scale;
    const float all = scale * (softcap != 0 ? 1.0f / softcap : kLog2e);
    const bool plain = softcap == 0 && is_common_scale(scale);
    unit = plain ? all : 1.0f;
    if (plain) return;
#pragma unroll
    for (float& x : scores) {
      x *= all;
      if (softcap != 0) x = kLog2e * softcap * tanhf(x);
    }
  }
  /// Calls `visit(quarter)` for those of a chunk that some row sees.
  template <typename Visit>
  __device__ __forceinline__ void for_each_quarter(int chunk, const Visit& visit) const {
#pragma unroll
    for (int q = 0; q < kQuarters; ++q) {
      if (chunk * kChunk + q * kQuarter >= end) break;
      visit(q);
    }
  }
  /// Hides what a row does not see of the quarters that some row sees.
  __device__ __forceinline__ void mask(Scores& scores, int chunk) const {
    for_each_quarter(chunk, [&](int q) {
      const int32_t j0 = chunk * kChunk + q * kQuarter;
      if (j0 + kQuarter <= every) return;
#pragma unroll
      for (int i = 0; i < kQuarter / 2; ++i) {
        float& x = scores[q * kQuarter / 2 + i];
        const int32_t j = j0 + i / 4 * 8 + 2 * quad + i % 2;
        x = j < limits[i / 2 % 2] ? x : -INFINITY;
      }
    });
  }

  /// The rows' masses in a chunk relative to `base`.
  __device__ __forceinline__ void sum_rows(const Scores& scores, int chunk, const float (&base)[2],
                                           float (&total)[2]) const {
    float sums[2][2] = {};
    for_each_quarter(chunk, [&](int q) {
#pragma unroll
      for (int i = 0; i < kQuarter / 2; ++i) {
        const int r = i / 2 % 2;
        sums[r][i % 2] += ptx::exp2_approx(fmaf(scores[q * kQuarter / 2 + i], unit, -base[r]));
      }
    });
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      total[r] = sums[r][0] + sums[r][1];
      total[r] += __shfl_xor_sync(~0u, total[r], 1);
      total[r] += __shfl_xor_sync(~0u, total[r], 2);
    }
  }
  /// The masses of the tile's rows, as log2. A chunk's are summed as they are, and only where they
  /// then are too large or too small relative to the highest score.
  __device__ __forceinline__ void add_masses(const Scores& scores, int chunk,
                                             float (&masses)[2]) const {
    constexpr float kLarge = 1e30f;
    float base[2] = {}, total[2];
    sum_rows(scores, chunk, base, total);
    bool fits = true;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      fits &= limits[r] <= chunk * kChunk || (total[r] < kLarge && total[r] > 1 / kLarge);
    }
    if (!__all_sync(~0u, fits)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float top = -INFINITY;
        for_each_quarter(chunk, [&](int q) {
#pragma unroll
          for (int i = 0; i < kQuarter / 2; i += 4) {
            const float* x = scores + q * kQuarter / 2 + i + 2 * r;
            top = fmaxf(top, fmaxf(x[0], x[1]));
          }
        });
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        base[r] = top == -INFINITY ? 0.0f : top * unit;
      }
      sum_rows(scores, chunk, base, total);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float mass = base[r] + __log2f(total[r]);
      masses[r] = chunk == 0 ? mass : log2_sum(masses[r], mass);
    }
  }
  /// log2(2^a + 2^b), where b may be -inf.
  __device__ __forceinline__ static float log2_sum(float a, float b) {
    const float high = fmaxf(a, b), low = fminf(a, b);
    const float sum = high + __log2f(1.0f + ptx::exp2_approx(low - high));
    return isnan(a) || isnan(b) ? a + b : low == -INFINITY ? high : sum;
  }
  __device__ __forceinline__ void write_masses(const float (&masses)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (quad != 0 || limits[r] <= 0) continue;
      args.masses_of(item.head, first + row + 8 * r)[item.column] = masses[r];
    }
  }

  /// Adds the shares of a chunk to the warp's sums, whose `first` they are or not.
  __device__ __forceinline__ void add_shares(const Scores& scores, int chunk, bool first_ones) {
    float* sums = storage.sums[consumer][buffer][warp] + chunk * kChunk + 2 * lane;
#pragma unroll
    for (int q = 0; q < kQuarters; ++q) {
      float some[2 * kFragments] = {};
      if (chunk * kChunk + q * kQuarter < end) {
#pragma unroll
        for (int i = 0; i < 2 * kFragments; ++i) {
          const float* x = scores + q * kQuarter / 2 + i / 2 * 4 + i % 2;
          some[i] = ptx::exp2_approx(fmaf(x[0], unit, -lse[0])) +
                    ptx::exp2_approx(fmaf(x[2], unit, -lse[1]));
        }
        halve_columns<16, 2 * kFragments>(some);
        halve_columns<8, kFragments>(some);
        halve_columns<4, kFragments / 2>(some);
      }
      auto& sum = *reinterpret_cast<float2*>(sums + q * kQuarter);
      const float2 before = first_ones ? make_float2(0.0f, 0.0f) : sum;
      sum = make_float2(before.x + some[0], before.y + some[1]);
    }
  }
  /// Writes the shares of the half's query blocks, or of the tile's, from its warps' sums.
  __device__ __forceinline__ void write_shares() {
    const SelectParams& params = args.params;
    float (&sums)[kWarps][C::kColumns] = storage.sums[consumer][buffer];
    buffer ^= 1;
    ptx::named_barrier_sync(kWarpgroupBarrier + consumer, kWarpgroup);
    const int warps = imin(params.block_q / 16, kWarps);
    const int32_t block = first / params.block_q;
    float* shares =
        args.shares + (int64_t{args.first_head + item.head} * params.num_q + block) * params.num_kv;
    const int blocks = imin(kWarps / warps, params.num_q - block);
#pragma unroll 1
    for (int c = 0; c < C::kColumns; c += kWarpgroup) {
      const int column = c + threadIdx.x % kWarpgroup;
      const int32_t j = item.column * C::kColumns + column;
      if (j >= params.num_kv) break;
      for (int i = 0; i < blocks; ++i) {
        float share = 0.0f;
        for (int w = 0; w < warps; ++w) share += sums[i * warps + w][column];
        shares[int64_t{i} * params.num_kv + j] = share;
      }
    }
  }

  /// The masses of a half of a tile, or its shares. Chunks that no row sees have shares of 0.
  __device__ __forceinline__ void take_half(int half, bool first_ones) {
    begin(half);
    ptx::mbarrier_wait(ptx::smem_address(&storage.query_full[consumer]), parity);
    parity ^= 1;
    Places places;
    load_places(places);
    float masses[2];
    constexpr int kChunks = C::kColumns / kChunk;
    const int seen = imin(ceil_div(imax(end, 1), kChunk), kChunks);
#pragma unroll 1
    for (int chunk = 0; chunk < (kPass == Pass::kShares ? kChunks : seen); ++chunk) {
      Scores scores;
      if (chunk < seen) multiply(scores, places, chunk);
      if (chunk == seen - 1) arrive(storage.query_empty[consumer]);
      if (chunk < seen) finish(scores);
      mask(scores, chunk);
      if constexpr (kPass == Pass::kTotals) {
        add_masses(scores, chunk, masses);
      } else {
        add_shares(scores, chunk, first_ones);
      }
    }
    if (kPass == Pass::kTotals) write_masses(masses);
  }

  __device__ __forceinline__ void run() {
    for (int turn = 0;; ++turn) {
      const int slot = turn % kItems;
      ptx::mbarrier_wait(ptx::smem_address(&storage.item_full[consumer][slot]), turn / kItems % 2);
      item = storage.item[consumer][slot];
      __syncwarp();
      arrive(storage.item_empty[consumer][slot]);
      if (__shfl_sync(~0u, item.head, 0) < 0) return;
      ptx::mbarrier_wait(ptx::smem_address(&storage.key_full), (item.fill - 1) % 2);
      const int halves = __shfl_sync(~0u, item.halves, 0);
      bool first_ones = true;
#pragma unroll 1
      for (int half = 0; half < halves; ++half) {
        take_half(half, first_ones);
        if (kPass == Pass::kTotals) continue;
        first_ones = args.params.block_q != kTileRows || half + 1 == halves;
        if (first_ones) write_shares();
      }
    }
  }
};

}  // namespace sparse_attn::cuda::extremes
