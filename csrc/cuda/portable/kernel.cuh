// The portable attention kernel (Dao 2023, FlashAttention-2): a thread block holds one query tile
// and walks its visited key tiles with an online softmax. Keys and values pass through a ring of
// slots in shared memory, K0 V0 K1 V1 ..., two loads ahead of the products.
#pragma once

#include "../common/plain_scores.h"
#include "chunks.cuh"
#include "mask.cuh"
#include "store.cuh"
#include "topk_keep.cuh"
#include "transform.cuh"

namespace sparse_attn::cuda::portable {

template <typename Config>
__device__ __forceinline__ void rescale_output(Output<Config>& rO,
                                               const float (&rescale)[Config::MT][2]) {
#pragma unroll
  for (int mt = 0; mt < Config::MT; ++mt) {
    // Once the maxima have settled there is nothing to do; a factor of 1 changes no bit.
    if (!__any_sync(~0u, rescale[mt][0] != 1.0f || rescale[mt][1] != 1.0f)) continue;
#pragma unroll
    for (int dt = 0; dt < Config::DT; ++dt) {
#pragma unroll
      for (int e = 0; e < 4; ++e) rO[mt][dt][e] *= rescale[mt][e / 2];
    }
  }
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    attention_kernel(const __grid_constant__ AttentionParams params,
                     const __grid_constant__ GridPlan plan, const Threshold* thresholds,
                     bool aligned, const __grid_constant__ typename Config::Partials partials) {
  constexpr TileShape kShape = Config::kShape;
  extern __shared__ __align__(128) char dynamic_smem[];
  char* smem = held_address(dynamic_smem);
  QueryTile<Config> tile(params, smem, aligned);
  if (!tile.find(plan)) return;
  const uint32_t ring =
      ptx::shared_address(smem) + (kShape.query_registers ? 0 : kShape.query_bytes());
  const uint32_t sQ =
      kShape.query_registers ? ring + kShape.slot_bytes() : ptx::shared_address(smem);
  tile.load_queries(sQ);
  ptx::cp_async_commit();
  tile.prepare();

  const auto walk = tile.walk();
  uint32_t key_slot = ring;
  uint32_t value_slot = ring + kShape.slot_bytes();
  uint32_t free_slot = ring + (kShape.slots - 1) * kShape.slot_bytes();

  int32_t position = 0;
  KernelChunks<Config> chunks(tile, partials);
  if (!chunks.find(position)) return;
  typename Config::Step step = walk.next(position);
  chunks.enter(position);
  if (step.exists()) tile.load_keys(key_slot, step);
  ptx::cp_async_commit();
  ptx::cp_async_wait<1>();
  __syncthreads();
  using Products = typename Config::Products;
  Products products;
  products.start(sQ + threadIdx.x / 32 * Config::kWarpRows * Config::kPitch);
  if (kShape.query_registers) __syncthreads();
  if (step.exists()) tile.load_values(value_slot, step);
  ptx::cp_async_commit();

  KeptScores<Config> kept;
  if constexpr (Config::kTop) kept.load(tile, thresholds);
  SoftmaxState<Config::MT, Config::kFloat> state;
  state.init();
  Output<Config> rO = {};
  const bool transformed =
      Config::kGeneral && (!has_plain_scores(params) || params.pattern.topk > 0);
  const Exponent exponent = {transformed ? kLog2e : tile.score_scale() * kLog2e, transformed};

  const bool has_bits = params.pattern.list.has_bits();

  while (step.exists()) {
    const typename Config::Step next_step = walk.next(position);
    const WarpStep warp_step = refine(tile, step);

    ptx::cp_async_wait<1>();
    __syncthreads();  // keys have landed; the values before them have been read
    if (next_step.exists()) tile.load_keys(free_slot, next_step);
    ptx::cp_async_commit();
    typename Config::ScoreFragment rS;
    typename Products::Probabilities rP[Products::kSlices];
    float rescale[Config::MT][2];
    float sum[Config::MT][2] = {};
    if (warp_step.visited) {
      products.scores(rS, key_slot);
      if (warp_step.masked) mask_scores(rS, tile, step);
      if (Config::kBits && has_bits && step.partial()) mask_by_bits(rS, tile, step);
      if constexpr (Config::kTop) kept.drop_others(rS, tile, step);
      if constexpr (Config::kGeneral) {
        if (transformed) transform_scores(rS, tile, step, thresholds);
      }
      state.raise(rS, exponent, rescale);
      rescale_output<Config>(rO, rescale);
      if constexpr (!Config::kInterleaved) {
        state.exponentiate(rS, exponent, 0, Config::NT, sum);
        state.add(rescale, sum);
#pragma unroll
        for (int slice = 0; slice < Products::kSlices; ++slice) {
          Products::round(rP[slice], rS, slice);
        }
      }
    }

    ptx::cp_async_wait<1>();
    __syncthreads();  // values have landed; the keys before them have been read
    if (next_step.exists()) tile.load_values(key_slot, next_step);
    ptx::cp_async_commit();
    if (warp_step.visited) {
      products.output(rO, rP, value_slot, [&](int slice) {
        if constexpr (Config::kInterleaved) {
          state.exponentiate(rS, exponent, 2 * slice, 2 * slice + 2, sum);
          Products::round(rP[slice], rS, slice);
        }
      });
      if constexpr (Config::kInterleaved) state.add(rescale, sum);
    }

    uint32_t read = value_slot;
    value_slot = key_slot;
    key_slot = free_slot;
    free_slot = read;
    step = next_step;
    if (chunks.left(step.exists(), position)) chunks.turn(rO, state, exponent, position);
  }
  ptx::cp_async_wait<0>();
  chunks.store(rO, state, exponent, smem);
}

}  // namespace sparse_attn::cuda::portable
