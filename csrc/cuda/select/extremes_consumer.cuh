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
#include "../common/quad.cuh"
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

template <typename C>
struct Consumer {
  using Product = ptx::WgmmaSparse<C::kDtype, C::kChunk>;
  using ScoreFragment = float[C::kChunk / 2];
  using Places = uint32_t[C::HEAD_DIM / 32];
  static constexpr int kChunk = C::kChunk;
  static constexpr int kQuarters = kChunk / kQuarter, kFragments = kQuarter / 8;

  const Arguments& args;
  Storage<C>& storage;
  const int consumer;
  const int warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32, quad = lane % 4;
  const int row = warp * 16 + lane / 4;  // of the warpgroup, and the row 8 below it
  uint32_t parity = 0;                   // of the queries
  int stage = 0;                         // of key blocks
  uint32_t stage_parity = 0;
  int buffer = 0;  // of sums
  // Warpgroups that have a query block together, the first of them, and the warps of a block.
  const int team = args.params.block_q > kRows ? 2 : 1, leader = consumer / team * team;
  const int warps = args.params.block_q / 16;
  // Of the tile at hand.
  int32_t first;       // row of the warpgroup
  int32_t limits[2];   // key blocks before it are seen, by row
  int32_t every, end;  // the same by all rows, and by some
  float unit;          // what makes a product a score of log2
  int blocks;          // of queries, of the team
  float* shares;       // of the first one

  __device__ __forceinline__ void wait_keys() const {
    ptx::mbarrier_wait(ptx::shared_address(&storage.key_full[stage]), stage_parity);
  }
  __device__ __forceinline__ void release_keys() {
    ptx::mbarrier_arrive_warp(storage.key_empty[stage]);
    stage = stage + 1 == C::kStages ? 0 : stage + 1;
    stage_parity ^= stage == 0;
  }

  __device__ __forceinline__ void begin(const Tile& tile) {
    first = tile.first + consumer * kRows;
    const int32_t last = imin(first + kRows, tile.rows) - 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t i = first + row + 8 * r;
      limits[r] = i < tile.rows ? args.seen(tile, i) : 0;
    }
    every = last + 1 == first + kRows ? args.seen(tile, first) : 0;
    end = last >= first ? args.seen(tile, last) : 0;
    every = __shfl_sync(~0u, every, 0);
    end = __shfl_sync(~0u, end, 0);
    const SelectParams& params = args.params;
    const int32_t block = (tile.first + leader * kRows) / params.block_q;
    blocks = imin(team * kWarps / warps, params.num_q - block);
    const int64_t head = int64_t{tile.batch} * params.problem.heads_q + tile.head;
    shares = args.shares + (head * params.num_q + block) * params.num_kv;
  }

  /// Lanes 0 and 1 of a quad have the places of a step of 16 columns, lanes 2 and 3 the next one's.
  __device__ __forceinline__ void load_places(Places& places) const {
    const uint8_t* query = storage.query[consumer];
    const bool turned = args.params.scores.scale < 0;
#pragma unroll
    for (int i = 0; i < C::HEAD_DIM / 32; ++i) {
      const uint8_t* at =
          query + i / 2 * kRows * kSlabRowBytes + swizzled<kSlabRowBytes>(row, i % 2 * 4 + quad);
      places[i] = places_of(*reinterpret_cast<const uint4*>(at),
                            *reinterpret_cast<const uint4*>(at + 8 * kSlabRowBytes), turned);
    }
  }
  /// The products with the chunk of key blocks that is there.
  __device__ __forceinline__ void multiply(ScoreFragment& scores, Places& places) const {
    const uint64_t queries = ptx::slab_descriptor(ptx::shared_address(storage.query[consumer]));
    const uint64_t keys = ptx::slab_descriptor(ptx::shared_address(storage.key[stage]));
    ptx::pin(scores);
    ptx::pin(places);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::HEAD_DIM / 16; ++i) {
      const uint64_t a = ptx::wgmma_advance(queries, i / 4 * kRows * kSlabRowBytes + i % 4 * 32);
      const uint64_t b = ptx::wgmma_advance(keys, i / 2 * kChunk * kSlabRowBytes + i % 2 * 64);
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
  __device__ __forceinline__ void finish(ScoreFragment& scores) {
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
  __device__ __forceinline__ void mask(ScoreFragment& scores, int chunk) const {
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

  /// Adds the masses of the lane's columns, relative to `base`.
  __device__ __forceinline__ void sum_rows(const ScoreFragment& scores, int chunk,
                                           const float (&base)[2], float (&total)[2]) const {
    float sums[2][2] = {};
    for_each_quarter(chunk, [&](int q) {
#pragma unroll
      for (int i = 0; i < kQuarter / 2; ++i) {
        const int r = i / 2 % 2;
        sums[r][i % 2] += ptx::exp2_approx(fmaf(scores[q * kQuarter / 2 + i], unit, -base[r]));
      }
    });
#pragma unroll
    for (int r = 0; r < 2; ++r) total[r] += sums[r][0] + sums[r][1];
  }
  /// Adds a chunk to the rows' masses, of which a lane has its columns' `total` relative to
  /// 2^base. The base is the highest score so far, but only where 0 would not do.
  __device__ __forceinline__ void add_masses(const ScoreFragment& scores, int chunk,
                                             float (&base)[2], float (&total)[2]) const {
    constexpr float kLarge = 1e30f;
    const float before[2] = {total[0], total[1]};
    sum_rows(scores, chunk, base, total);
    bool fits = true;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      fits &=
          limits[r] <= chunk * kChunk + 2 * quad || (total[r] < kLarge && total[r] > 1 / kLarge);
    }
    if (__all_sync(~0u, fits)) return;
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
      const bool none = quad_sum(before[r]) == 0.0f;
      const float high = top == -INFINITY ? base[r]
                         : none           ? top * unit
                                          : fmaxf(base[r], top * unit);
      total[r] = none ? 0.0f : before[r] * ptx::exp2_approx(base[r] - high);
      base[r] = high;
    }
    sum_rows(scores, chunk, base, total);
  }

  /// Writes the shares of a chunk: columns are summed by warps, and these by query blocks, for
  /// which two warpgroups may have rows.
  __device__ __forceinline__ void write_shares(const ScoreFragment& scores, int chunk,
                                               const float (&lse)[2]) {
    float* sums = storage.sums[buffer][consumer * kWarps + warp] + 2 * lane;
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
      *reinterpret_cast<float2*>(sums + q * kQuarter) = make_float2(some[0], some[1]);
    }
    ptx::named_barrier_sync(kWarpgroupBarrier + leader, team * kWarpgroup);
#pragma unroll 1
    for (int at = threadIdx.x % kWarpgroup + (consumer - leader) * kWarpgroup; at < blocks * kChunk;
         at += team * kWarpgroup) {
      const int block = at / kChunk, column = at % kChunk;
      const int32_t j = chunk * kChunk + column;
      if (j >= args.params.num_kv) continue;
      const int first_warp = leader * kWarps + block * warps;
      float share = 0.0f;
#pragma unroll 1
      for (int w = first_warp; w < first_warp + warps; ++w)
        share += storage.sums[buffer][w][column];
      shares[int64_t{block} * args.params.num_kv + j] = share;
    }
    buffer ^= 1;
  }

  /// Calls `visit(scores, chunk)` for the tile's chunks of key blocks, those that no row of the
  /// warpgroup sees included; `last` when all products are made.
  template <typename Visit, typename Last>
  __device__ __forceinline__ void walk(Places& places, int chunks, const Visit& visit,
                                       const Last& last) {
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      ScoreFragment scores;
      const bool seen = chunk * kChunk < end;
      wait_keys();
      if (seen) multiply(scores, places);
      release_keys();
      if (chunk + 1 == chunks) last();
      if (seen) {
        finish(scores);
        mask(scores, chunk);
      }
      visit(scores, chunk);
    }
  }

  __device__ __forceinline__ void take(const Tile& tile) {
    begin(tile);
    ptx::mbarrier_wait(ptx::shared_address(&storage.query_full[consumer]), parity);
    parity ^= 1;
    Places places;
    load_places(places);
    const int chunks = __shfl_sync(~0u, tile.chunks, 0);
    float base[2] = {}, total[2] = {};
    walk(
        places, chunks,
        [&](const ScoreFragment& scores, int chunk) {
          if (chunk * kChunk < end) add_masses(scores, chunk, base, total);
        },
        [] {});
    float lse[2];  // infinity where it sees nothing
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float all = quad_sum(total[r]);
      lse[r] = limits[r] > 0 ? base[r] + __log2f(all) : INFINITY;
    }
    walk(
        places, chunks,
        [&](const ScoreFragment& scores, int chunk) { write_shares(scores, chunk, lse); },
        [&] { ptx::mbarrier_arrive_warp(storage.query_empty[consumer]); });
  }

  __device__ __forceinline__ void run() {
    for_each_tile<C>(args, [&](const Tile& tile) { take(tile); });
  }
};

}  // namespace sparse_attn::cuda::extremes
