// One of the two warpgroups of slices_hopper.cu: products of 64 query vectors with 256 key vectors,
// slice by slice, and what becomes of their scores.
#pragma once

#include "../common/log2_units.h"
#include "../common/ptx/math.cuh"
#include "../common/ptx/mbarrier.cuh"
#include "../common/ptx/wgmma.cuh"
#include "../common/row_maximum.cuh"
#include "fragment.cuh"
#include "slices_unit.cuh"

namespace sparse_attn::cuda::slices {

template <Dtype kDtype>
struct Consumer {
  using Product = ptx::Wgmma<kDtype, kSliceKeys>;
  using ScoreFragment = float[kSliceKeys / 2];
  static constexpr int kHalves = kSliceKeys / kFragmentColumns;
  static constexpr int kColumnFragments = kSliceKeys / 8;
  static constexpr int kSteps = kSlabColumns / 16;  // of a slab

  const Arguments& args;
  Storage& storage;
  const int consumer;
  const int warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32, quad = lane % 4;
  const int row = consumer * kRows + warp * 16 + lane / 4;  // of the tile, and the row 8 below it
  int stage = 0;
  uint32_t parity = 0;
  // Of the tile at hand.
  Tile tile;
  int32_t limits[2];                // key vectors before it are seen, by row
  int32_t pairs[2], last_pairs[2];  // of an antidiagonal, and of the last key vector's

  __device__ int32_t vector(int r) const { return tile.row * kTileRows + row + 8 * r; }

  /// Lets the stage before this one go once its products have ended, and goes on to the next.
  __device__ __forceinline__ void advance(bool first) {
    ptx::wgmma_wait<1>();
    if (!first) ptx::mbarrier_arrive_warp(storage.empty[(stage + kStages - 1) % kStages]);
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void multiply(ScoreFragment& scores, bool first) {
    ptx::mbarrier_wait(ptx::shared_address(&storage.full[stage]), parity);
    const uint64_t keys = ptx::slab_descriptor(ptx::shared_address(storage.key[stage]));
    const uint64_t queries = ptx::slab_descriptor(ptx::shared_address(storage.query[stage]) +
                                                  consumer * kRows * kSlabRowBytes);
    ptx::pin(scores);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      Product::ss(scores, ptx::wgmma_advance(queries, i * 32), ptx::wgmma_advance(keys, i * 32),
                  i > 0 || !first);
    }
    ptx::wgmma_commit();
    advance(first);
  }
  __device__ __forceinline__ void multiply_all(ScoreFragment& scores) {
    const int steps = ceil_div(args.params.problem.head_dim, kSlabColumns) * args.estimate.slices;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) multiply(scores, step == 0);
    ptx::wgmma_wait<0>();
    ptx::pin(scores);
    ptx::mbarrier_arrive_warp(storage.empty[(stage + kStages - 1) % kStages]);
  }

  /// Finds what the row sees; the square of the last vectors may have no pair.
  __device__ __forceinline__ void begin() {
    const int32_t slices = args.estimate.slices;
    const Count queries = tile.queries, keys = tile.keys;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      limits[r] = vector(r) < queries.vectors ? args.seen(tile.head, vector(r)) : 0;
      pairs[r] = vector(r) == queries.vectors - 1 ? queries.last : slices;
      last_pairs[r] = pairs[r] + keys.last - slices;
      if (last_pairs[r] <= 0) limits[r] = imin(limits[r], keys.vectors - 1);
    }
  }
  /// Makes the products scores but for the factors of rows, and -inf where a row does not see the
  /// key. Most tiles have nothing else to be done.
  __device__ __forceinline__ void finish(ScoreFragment& scores, float (&factors)[2]) {
    const float softcap = args.params.scores.softcap;
    const float all = args.params.scores.scale * (softcap != 0 ? 1.0f / softcap : kLog2e);
    const int32_t j0 = tile.column * kSliceKeys;
    const bool whole = __all_sync(~0u, imin(limits[0], limits[1]) >= j0 + kSliceKeys);
#pragma unroll
    for (int r = 0; r < 2; ++r) factors[r] = all / static_cast<float>(pairs[r]);
    if (whole && softcap == 0 && all > 0 && j0 + kSliceKeys < tile.keys.vectors) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float factor = factors[r];
      factors[r] = 1.0f;
#pragma unroll
      for (int j = 0; j < kColumnFragments; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) scores[4 * j + 2 * r + e] *= factor;
      }
    }
    if (j0 + kSliceKeys >= tile.keys.vectors) {
      const int32_t last = tile.keys.vectors - 1 - j0 - 2 * quad;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float ratio =
            static_cast<float>(pairs[r]) / static_cast<float>(imax(last_pairs[r], 1));
#pragma unroll
        for (int j = 0; j < kColumnFragments; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) scores[4 * j + 2 * r + e] *= 8 * j + e == last ? ratio : 1.0f;
        }
      }
    }
    if (softcap != 0) {
#pragma unroll
      for (float& x : scores) x = kLog2e * softcap * tanhf(x);
    }
    if (whole) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int j = 0; j < kColumnFragments; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = scores[4 * j + 2 * r + e];
          x = j0 + 8 * j + 2 * quad + e < limits[r] ? x : -INFINITY;
        }
      }
    }
  }

  __device__ __forceinline__ float* masses_of(int r) const {
    return args.masses + (int64_t{tile.head} * args.num_queries + vector(r)) * args.pitch;
  }
  template <typename Sums>
  __device__ __forceinline__ void store(FragmentTerms& terms, const float (&base)[2],
                                        int32_t block) const {
    Sums::add(terms);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (Sums::is_copy() || vector(r) >= args.num_queries) continue;
      float* to = masses_of(r) + block;
#pragma unroll
      for (int i = 0; i < Sums::kHeld; ++i) {
        to[Sums::block(i)] = base[r] + __log2f(terms[r][i]);
      }
    }
  }

  /// Writes the masses of the tile's key blocks.
  __device__ __forceinline__ void write_masses(const ScoreFragment& scores,
                                               const float (&factors)[2]) const {
    float base[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float top = quad_max(highest(scores, r));
      base[r] = top == -INFINITY ? 0.0f : top * factors[r];
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      FragmentTerms terms;
#pragma unroll
      for (int j = 0; j < kFragments; ++j) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float* x = scores + 4 * (half * kFragments + j) + 2 * r;
          terms[r][j] = ptx::exp2_approx(fmaf(x[0], factors[r], -base[r])) +
                        ptx::exp2_approx(fmaf(x[1], factors[r], -base[r]));
        }
      }
      const int32_t per_block = args.estimate.per_block;
      const int32_t first = tile.column * kSliceKeys + half * kFragmentColumns;
      with_block_sums(per_block,
                      [&](auto sums) { store<decltype(sums)>(terms, base, first / per_block); });
    }
  }

  __device__ void run() {
    for (int turn = 0;; ++turn) {
      const int slot = turn % kItems;
      ptx::mbarrier_wait(ptx::shared_address(&storage.item_full[slot]), turn / kItems % 2);
      tile = storage.item[slot];
      ptx::mbarrier_arrive(ptx::shared_address(&storage.item_empty[slot]));
      if (__shfl_sync(~0u, tile.head, 0) < 0) return;
      begin();
      ScoreFragment scores;
      multiply_all(scores);
      float factors[2];
      finish(scores, factors);
      write_masses(scores, factors);
    }
  }
};

}  // namespace sparse_attn::cuda::slices
