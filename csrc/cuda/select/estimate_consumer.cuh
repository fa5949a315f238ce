// One of the warpgroups of estimate_hopper.cu: products of its 64 query vectors with tiles of
// key vectors, and the masses of their key blocks. At a walk's end estimate_shares.cuh makes them
// shares of its query blocks.
#pragma once

#include "../common/log2_units.h"
#include "../common/ptx/cluster.cuh"
#include "../common/ptx/global.cuh"
#include "../common/ptx/math.cuh"
#include "../common/ptx/mbarrier.cuh"
#include "../common/ptx/warpgroup.cuh"
#include "../common/ptx/wgmma.cuh"
#include "../common/quad.cuh"
#include "estimate_shares.cuh"
#include "estimate_unit.cuh"

namespace sparse_attn::cuda::estimates {

/// The walk of one warpgroup over all its items.
template <typename C>
struct Consumer {
  using Product = ptx::Wgmma<C::kDtype, kKeys>;
  using ScoreFragment = float[kKeys / 2];

  const Arguments& args;
  Storage<C>& storage;
  const int consumer;
  float* const masses;
  const int lane = threadIdx.x % 32, quad = threadIdx.x % 4;
  const int row = threadIdx.x % kWarpgroup / 32 * 16 + lane / 4;  // and the row 8 below it
  int stage = 0;
  uint32_t parity = 0;
  // Of the item at hand.
  uint64_t query = 0;     // descriptor
  int32_t limits[2];      // key vectors before it are seen, by row
  int32_t every;          // the same by all rows of the warpgroup
  float base[2], sum[2];  // of the row: what its terms are relative to; those of the lane

  // Warpgroups multiply in turns, each alone: together they would all multiply, then all
  // exponentiate. The next one starts under the last half of the steps.
  __device__ __forceinline__ void take_turn() const {
    ptx::named_barrier_sync(kTurnBarrier + consumer, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void pass_turn() const {
    const int next = consumer == kConsumers - 1 ? 0 : consumer + 1;
    ptx::named_barrier_arrive(kTurnBarrier + next, 2 * kWarpgroup);
  }

  __device__ __forceinline__ void multiply(ScoreFragment& scores) const {
    const uint64_t keys = ptx::slab_descriptor(ptx::shared_address(storage.key[stage]));
    constexpr int kSteps = kSlabColumns / 16;
    ptx::pin(scores);
    take_turn();
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::HEAD_DIM / 16; ++i) {
      const uint32_t in_slab = i % kSteps * 32;
      Product::ss(scores,
                  ptx::wgmma_advance(query, i / kSteps * kVectors * kSlabRowBytes + in_slab),
                  ptx::wgmma_advance(keys, i / kSteps * kKeys * kSlabRowBytes + in_slab), i > 0);
      if (i == C::HEAD_DIM / 32 - 1) ptx::wgmma_commit();
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    pass_turn();
    ptx::wgmma_wait<0>();
    ptx::pin(scores);
  }
  __device__ __forceinline__ void release() {
    ptx::mbarrier_arrive_warp(storage.key_empty[stage]);
    if (++stage == C::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }

  /// Stores the masses of kBlocks key blocks, of which each lane of the quad sums some.
  template <int kBlocks>
  __device__ __forceinline__ void store(FragmentTerms& terms, int32_t block) const {
    using Sums = BlockSums<kBlocks>;
    Sums::join(terms);
    block += Sums::block(0);
    float* to = masses + int64_t{block} * kVectors + row;
#pragma unroll
    for (int i = 0; i < Sums::kHeld; ++i) {
      const bool stores = !Sums::is_copy() && block + i < args.params.num_kv;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        ptx::store_global_if(stores, to + i * kVectors + 8 * r, base[r] + __log2f(terms[r][i]));
      }
    }
  }

  /// Hides what a row does not see.
  __device__ __forceinline__ void mask(ScoreFragment& scores, int32_t first) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int j = 0; j < kFragments; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = scores[4 * j + 2 * r + e];
          x = first + 8 * j + 2 * quad + e < limits[r] ? x : -INFINITY;
        }
      }
    }
  }

  /// Makes the highest score that a row has seen what its terms are relative to.
  __device__ __forceinline__ void rebase(const ScoreFragment& scores, bool first) {
    float top[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float tops[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
      for (int j = 0; j < kFragments; ++j) {
        const float* x = scores + 4 * j + 2 * r;
        tops[j % 4] = fmaxf(tops[j % 4], fmaxf(x[0], x[1]));
      }
      top[r] = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
#pragma unroll
      for (int r = 0; r < 2; ++r) top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], step));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float own = top[r] * args.params.scores.scale * kLog2e, before = first ? own : base[r];
      if (own == -INFINITY) continue;
      base[r] = fmaxf(before, own);
      sum[r] *= ptx::exp2_approx(before - base[r]);
    }
  }
  /// Adds up neighbours until kLeft terms are left, which come first.
  template <int kTerms, int kLeft>
  __device__ __forceinline__ static void add_neighbours(FragmentTerms& terms) {
    if constexpr (kTerms > kLeft) {
#pragma unroll
      for (int i = 0; i < kTerms / 2; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) terms[r][i] = terms[r][2 * i] + terms[r][2 * i + 1];
      }
      add_neighbours<kTerms / 2, kLeft>(terms);
    }
  }
  /// The terms of a tile's kBlocks key blocks, and the lane's own sum of each row: both rows at
  /// once, as each alone waits for itself.
  template <int kBlocks>
  __device__ __forceinline__ void weigh(const ScoreFragment& scores, FragmentTerms& terms,
                                        float (&total)[2]) const {
    const float scale = args.params.scores.scale * kLog2e;
#pragma unroll
    for (int j = 0; j < kFragments; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float* x = scores + 4 * j + 2 * r;
        terms[r][j] = ptx::exp2_approx(fmaf(x[0], scale, -base[r])) +
                      ptx::exp2_approx(fmaf(x[1], scale, -base[r]));
      }
    }
    add_neighbours<kFragments, kBlocks>(terms);
    FragmentTerms all;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) all[r][i] = terms[r][i];
    }
    add_neighbours<kBlocks, 1>(all);
#pragma unroll
    for (int r = 0; r < 2; ++r) total[r] = all[r][0];
  }
  /// Takes in the scores of a tile. Terms stay relative to the highest score of a segment's first
  /// tile until they grow too large, so that later maxima are never looked for.
  template <int kBlocks>
  __device__ __forceinline__ void take(const ScoreFragment& scores, int32_t tile, bool first) {
    constexpr float kLarge = 1e18f;
    FragmentTerms terms;
    float total[2];
    if (first) rebase(scores, true);
    weigh<kBlocks>(scores, terms, total);
    if (__any_sync(~0u, !(total[0] + total[1] < kLarge))) {
      rebase(scores, false);
      weigh<kBlocks>(scores, terms, total);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] += total[r];
    store<kBlocks>(terms, tile * kBlocks);
  }

  __device__ void begin(const Unit& unit, uint32_t tile) {
    query = ptx::slab_descriptor(tile);
    every = kUnlimited;
    for (int32_t v = unit.vectors.begin; v < unit.vectors.begin + kVectors; v += kVectors - 1) {
      const int32_t end = unit.vectors.contains(v) ? unit.seen(args, v) : 0;
      every = imin(every, end);
    }
    every = __shfl_sync(~0u, every, 0);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t vector = unit.vectors.begin + row + 8 * r;
      limits[r] = unit.vectors.contains(vector) ? unit.seen(args, vector) : 0;
    }
  }

  /// Leaves what the rows' terms of a segment are relative to, and their sums.
  __device__ __forceinline__ void write_state(int32_t segment) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float total = quad_sum(sum[r]);
      if (quad == 0) storage.states[consumer][segment][row + 8 * r] = {base[r], total};
      base[r] = sum[r] = 0.0f;
    }
  }
  /// Walks over the tiles of this thread block that the unit sees, and lets the others pass.
  template <int kBlocks>
  __device__ __forceinline__ void walk(int32_t own, int32_t all, int32_t length) {
    const Interval segments = own_segments(args);
    base[0] = base[1] = sum[0] = sum[1] = 0.0f;
    for (int32_t segment = segments.begin; segment < segments.end; ++segment) {
      const int32_t begin = segment * length, end = imin(begin + length, all);
      for (int32_t tile = begin; tile < end; ++tile) {
        ptx::mbarrier_wait(ptx::shared_address(&storage.key_full[stage]), parity);
        if (tile >= own) {
          take_turn();
          pass_turn();
          release();
          continue;
        }
        ScoreFragment scores;
        multiply(scores);
        release();
        if ((tile + 1) * kKeys > every) mask(scores, tile * kKeys);
        take<kBlocks>(scores, tile, tile == begin);
      }
      write_state(segment);
    }
  }

  /// Writes what each row's shares are relative to, from the segments of all of the cluster:
  /// infinity where it sees nothing.
  __device__ void write_lse() const {
    if (quad != 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float high = 0.0f, total = 0.0f;
      for (int segment = 0; segment < kSegments; ++segment) {
        const float2 state = *ptx::at_rank(&storage.states[consumer][segment][row + 8 * r],
                                           segment * args.parts / kSegments);
        if (state.y == 0.0f) continue;
        const float both = total == 0.0f ? state.x : fmaxf(high, state.x);
        if (total != 0.0f) total *= ptx::exp2_approx(high - both);
        total = fmaf(state.y, ptx::exp2_approx(state.x - both), total);
        high = both;
      }
      storage.lse[consumer][row + 8 * r] = limits[r] > 0 ? high + __log2f(total) : INFINITY;
    }
  }

  __device__ __forceinline__ void begin_and_walk() {
    int32_t tiles = 0;
#pragma unroll 1
    for (int other = 0; other < kConsumers; ++other) {
      tiles = imax(tiles, Unit(args, storage.item, other).tiles(args));
    }
    const Unit unit(args, storage.item, consumer);
    begin(unit, ptx::shared_address(storage.query[consumer]));
    const int32_t own = __shfl_sync(~0u, unit.tiles(args), 0);
    tiles = __shfl_sync(~0u, tiles, 0);
    const int32_t length = __shfl_sync(~0u, unit.segment_tiles(args), 0);
    switch (args.estimate.per_block) {
      case 8:
        return walk<16>(own, tiles, length);
      case 16:
        return walk<8>(own, tiles, length);
      case 32:
        return walk<4>(own, tiles, length);
      case 64:
        return walk<2>(own, tiles, length);
      default:
        return walk<1>(own, tiles, length);
    }
  }

  __device__ void run() {
    if (consumer == kConsumers - 1) pass_turn();  // the first one's
    for (int turn = 0;; ++turn) {
      ptx::mbarrier_wait(ptx::shared_address(&storage.item_full), turn % 2);
      if (storage.item < 0) break;
      begin_and_walk();
      const Unit unit(args, storage.item, consumer);  // again, to hold nothing while it walks
      ptx::mbarrier_arrive(ptx::shared_address(&storage.item_empty));
      if (args.parts > 1) ptx::sync_cluster();  // all have their segments' sums
      write_lse();
      if (args.parts > 1) ptx::sync_cluster();  // and nobody reads them any more
      const Shares<C> shares{args, storage, consumer, masses};
      shares.write_owners(unit);
      synchronise(consumer);
      if (!unit.blocks.empty()) shares.write(unit);
      synchronise(consumer);  // masses and lse may be written again
    }
    if (consumer == 0) take_turn();  // the last one's
  }
};

}  // namespace sparse_attn::cuda::estimates
