// One of the two warpgroups of slices_hopper.cu: products of 64 query vectors with 256 key vectors,
// slice by slice, and what becomes of their scores.
#pragma once

#include "../common/log2_units.h"
#include "../common/ptx/ldmatrix.cuh"
#include "../common/ptx/math.cuh"
#include "../common/ptx/mbarrier.cuh"
#include "../common/ptx/warpgroup.cuh"
#include "../common/ptx/wgmma.cuh"
#include "../common/swizzle.cuh"
#include "../common/types.cuh"
#include "fragment.cuh"
#include "slices_unit.cuh"

namespace sparse_attn::cuda::slices {

template <Dtype kDtype>
using Pair = std::conditional_t<kDtype == Dtype::kFloat16, __half2, __nv_bfloat162>;

template <Dtype kDtype, Pass kPass>
struct Consumer {
  using Product = ptx::Wgmma<kDtype, kSliceKeys>;
  using Scores = float[kSliceKeys / 2];
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
  int32_t pairs[2], last_pairs[2];  // kMasses: of an antidiagonal, and of the last key vector's
  float lse[2];                     // kShares: of the row
  float unit;                       // minmax: what makes a finished score one of log2

  __device__ static void arrive(uint64_t& barrier) {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::smem_address(&barrier));
  }
  __device__ static uint64_t descriptor(uint32_t slab) {
    return ptx::wgmma_descriptor(slab, 16, 8 * kRowBytes, ptx::Swizzle::k128Bytes);
  }
  __device__ int32_t vector(int r) const { return tile.row * kTileRows + row + 8 * r; }

  /// The elements of the queries above 0, or below, as they meet a slice of extremes.
  template <bool kAbove>
  __device__ __forceinline__ uint32_t part(uint32_t bits) const {
    using T = Pair<kDtype>;
    if (args.params.scores.scale < 0) bits ^= 0x80008000u;
    const T x = reinterpret_cast<const T&>(bits);
    uint32_t zero_bits = 0;
    const T zero = reinterpret_cast<const T&>(zero_bits);
    const T y = kAbove ? __hmax2(x, zero) : __hmin2_nan(x, zero);
    return reinterpret_cast<const uint32_t&>(y);
  }
  using Fragments = uint32_t[kSteps][4];
  template <bool kAbove>
  __device__ __forceinline__ void load_part(Fragments& parts) const {
    const uint32_t rows =
        ptx::smem_address(storage.query[stage]) + (consumer * kRows + warp * 16) * kRowBytes;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      ptx::ldmatrix_x4(parts[i], rows + swizzled<kRowBytes>(lane % 16, 2 * i + lane / 16));
#pragma unroll
      for (uint32_t& bits : parts[i]) bits = part<kAbove>(bits);
    }
  }

  __device__ __forceinline__ void wait_full() const {
    ptx::mbarrier_wait(ptx::smem_address(&storage.full[stage]), parity);
  }
  /// Lets the stage before this one go once its products have ended, and goes on to the next.
  __device__ __forceinline__ void advance(bool first) {
    ptx::wgmma_wait<1>();
    if (!first) arrive(storage.empty[(stage + kStages - 1) % kStages]);
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void multiply(Scores& scores, bool first) {
    wait_full();
    const uint64_t keys = descriptor(ptx::smem_address(storage.key[stage]));
    const uint64_t queries =
        descriptor(ptx::smem_address(storage.query[stage]) + consumer * kRows * kRowBytes);
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
  /// The same by the queries' elements of one sign.
  template <bool kAbove>
  __device__ __forceinline__ void multiply_part(Scores& scores, Fragments& parts, bool first) {
    wait_full();
    load_part<kAbove>(parts);
    const uint64_t keys = descriptor(ptx::smem_address(storage.key[stage]));
    ptx::pin(scores);
#pragma unroll
    for (auto& part : parts) ptx::pin(part);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      Product::template rs<false>(scores, parts[i][0], parts[i][1], parts[i][2], parts[i][3],
                                  ptx::wgmma_advance(keys, i * 32));
    }
    ptx::wgmma_commit();
    advance(first);
#pragma unroll
    for (auto& part : parts) ptx::pin(part);
  }
  __device__ __forceinline__ void multiply_all(Scores& scores) {
    const int slabs = ceil_div(args.params.problem.head_dim, kSlabColumns);
    if constexpr (kPass == Pass::kMasses) {
      const int steps = slabs * args.estimate.slices;
#pragma unroll 1
      for (int step = 0; step < steps; ++step) multiply(scores, step == 0);
    } else {
#pragma unroll
      for (float& x : scores) x = 0.0f;
      Fragments above, below;
#pragma unroll 1
      for (int slab = 0; slab < slabs; ++slab) {
        multiply_part<true>(scores, above, slab == 0);
        multiply_part<false>(scores, below, false);
      }
    }
    ptx::wgmma_wait<0>();
    ptx::pin(scores);
    arrive(storage.empty[(stage + kStages - 1) % kStages]);
  }

  /// Finds what the row sees; the square of the last vectors may have no pair.
  __device__ __forceinline__ void begin() {
    const int32_t slices = args.estimate.slices;
    const Count queries = tile.queries, keys = tile.keys;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      limits[r] = vector(r) < queries.vectors ? args.seen(tile.head, vector(r)) : 0;
      // Infinity where it sees nothing. The load ends under the products.
      if (kPass == Pass::kShares) lse[r] = limits[r] > 0 ? masses_of(r)[0] : INFINITY;
      if (kPass != Pass::kMasses) continue;
      pairs[r] = vector(r) == queries.vectors - 1 ? queries.last : slices;
      last_pairs[r] = pairs[r] + keys.last - slices;
      if (last_pairs[r] <= 0) limits[r] = imin(limits[r], keys.vectors - 1);
    }
  }
  /// Makes the products scores, -inf where a row does not see the key; minmax leaves a plain scale
  /// to the exponentials.
  __device__ __forceinline__ void finish(Scores& scores) {
    const float softcap = args.params.scores.softcap;
    const float scale =
        kPass == Pass::kMasses ? args.params.scores.scale : fabsf(args.params.scores.scale);
    const float all = scale * (softcap != 0 ? 1.0f / softcap : kLog2e);
    const int32_t j0 = tile.column * kSliceKeys;
    unit = kPass != Pass::kMasses && softcap == 0 && is_common_scale(scale) ? all : 1.0f;
    if (kPass == Pass::kMasses || unit != all) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float factor = kPass == Pass::kMasses ? all / static_cast<float>(pairs[r]) : all;
#pragma unroll
        for (int j = 0; j < kColumnFragments; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) scores[4 * j + 2 * r + e] *= factor;
        }
      }
    }
    if (kPass == Pass::kMasses && j0 + kSliceKeys >= tile.keys.vectors) {
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
    const bool whole = __all_sync(~0u, imin(limits[0], limits[1]) >= j0 + kSliceKeys);
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

  __device__ __forceinline__ float weight(float score, float base) const {
    return ptx::exp2_approx(kPass == Pass::kMasses ? score - base : fmaf(score, unit, -base));
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

  /// Writes the masses of the tile's key blocks, or the tile's own.
  __device__ __forceinline__ void write_masses(const Scores& scores) const {
    float base[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float tops[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
      for (int j = 0; j < kColumnFragments; ++j) {
        const float* x = scores + 4 * j + 2 * r;
        tops[j % 4] = fmaxf(tops[j % 4], fmaxf(x[0], x[1]));
      }
      float top = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      base[r] = top == -INFINITY ? 0.0f : top * unit;
    }
    float total[2] = {};
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      FragmentTerms terms;
#pragma unroll
      for (int j = 0; j < kFragments; ++j) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float* x = scores + 4 * (half * kFragments + j) + 2 * r;
          terms[r][j] = weight(x[0], base[r]) + weight(x[1], base[r]);
          if (kPass == Pass::kTotals) total[r] += terms[r][j];
        }
      }
      if constexpr (kPass == Pass::kMasses) {
        const int32_t per_block = args.estimate.per_block;
        const int32_t first = tile.column * kSliceKeys + half * kFragmentColumns;
        with_block_sums<4>(
            per_block, [&](auto sums) { store<decltype(sums)>(terms, base, first / per_block); });
      }
    }
    if constexpr (kPass == Pass::kTotals) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        total[r] += __shfl_xor_sync(~0u, total[r], 1);
        total[r] += __shfl_xor_sync(~0u, total[r], 2);
        if (quad == 0 && vector(r) < args.num_queries) {
          masses_of(r)[tile.column] = base[r] + __log2f(total[r]);
        }
      }
    }
  }

  /// Adds what the lanes of a column hold, each lane for half of its kHeld columns.
  template <int kStep, int kHeld>
  __device__ __forceinline__ static void halve_columns(float* columns) {
    const bool upper = threadIdx.x & kStep;
#pragma unroll
    for (int i = 0; i < kHeld / 2; ++i) {
      const float kept = upper ? columns[kHeld / 2 + i] : columns[i];
      const float given = upper ? columns[i] : columns[kHeld / 2 + i];
      columns[i] = kept + __shfl_xor_sync(~0u, given, kStep);
    }
  }
  /// Writes the shares of the tile's query blocks, which are whole, each from its warps' sums.
  __device__ __forceinline__ void write_shares(const Scores& scores, int turn) const {
    constexpr int kHeld = kSliceKeys / 4;
    float columns[kHeld];
#pragma unroll
    for (int j = 0; j < kColumnFragments; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        columns[2 * j + e] =
            weight(scores[4 * j + e], lse[0]) + weight(scores[4 * j + 2 + e], lse[1]);
      }
    }
    halve_columns<16, kHeld>(columns);
    halve_columns<8, kHeld / 2>(columns);
    halve_columns<4, kHeld / 4>(columns);
    float (&sums)[kWarps][kSliceKeys] = storage.sums[turn % 2];
    const int fragment = lane / 4;  // bits 16, 8 and 4 of the lane, in this order
    const int own = (fragment >> 2 & 1) * 16 + (fragment >> 1 & 1) * 8 + (fragment & 1) * 4;
#pragma unroll
    for (int i = 0; i < kHeld / 16; ++i) {
      *reinterpret_cast<float2*>(&sums[consumer * 4 + warp][8 * (own + i) + 2 * quad]) =
          make_float2(columns[2 * i], columns[2 * i + 1]);
    }
    ptx::named_barrier_sync(kConsumerBarrier, kConsumers * kWarpgroup);
    const SelectParams& params = args.params;
    const int warps = params.block_q / 16, column = threadIdx.x - kWarpgroup;
    const int32_t j = tile.column * kSliceKeys + column;
    if (j >= params.num_kv) return;
    const int32_t first = tile.row * kTileRows / params.block_q;
    float* shares =
        args.shares + int64_t{args.first_head + tile.head} * params.num_q * params.num_kv;
    for (int block = 0; block * warps < kWarps && first + block < params.num_q; ++block) {
      float share = 0.0f;
      for (int i = 0; i < warps; ++i) share += sums[block * warps + i][column];
      shares[int64_t{first + block} * params.num_kv + j] = share;
    }
  }

  __device__ void run() {
    for (int turn = 0;; ++turn) {
      const int slot = turn % kItems;
      ptx::mbarrier_wait(ptx::smem_address(&storage.item_full[slot]), turn / kItems % 2);
      tile = storage.item[slot];
      __syncwarp();
      arrive(storage.item_empty[slot]);
      if (tile.head < 0) return;
      begin();
      Scores scores;
      multiply_all(scores);
      finish(scores);
      if constexpr (kPass == Pass::kShares) {
        write_shares(scores, turn);
      } else {
        write_masses(scores);
      }
    }
  }
};

}  // namespace sparse_attn::cuda::slices
