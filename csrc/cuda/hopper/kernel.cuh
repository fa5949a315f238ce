// The kernel: out = softmax(scale Q K^T over the pattern's keys) V, tile by tile, warp-specialised
// and persistent (Shah et al. 2024, "FlashAttention-3"). Launched by launch.cuh.
#pragma once

#include "consumer.cuh"
#include "loader.cuh"
#include "mask_writer.cuh"
#include "planner.cuh"

namespace sparse_attn::cuda::hopper {

/// Arrivals are those of a producer's lane or of consumers' warps.
template <class C>
__device__ __forceinline__ void init_barriers(SharedStorage<C>& smem) {
  constexpr int kWarps = kWarpgroup / kWarp;
  auto init = [](auto& full, auto& empty, int count, int releases) {
    for (int i = 0; i < count; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&full[i]), 1);
      ptx::mbarrier_init(ptx::shared_address(&empty[i]), releases);
    }
  };
  for (int buffer = 0; buffer < C::kQueryBuffers; ++buffer) {
    init(smem.query_full[buffer], smem.query_empty[buffer], C::kConsumers, kWarps);
  }
  init(smem.key_full, smem.key_empty, C::kKeyStages, kWarps * C::kConsumers);
  init(smem.value_full, smem.value_empty, C::kValueStages, kWarps * C::kConsumers);
  init(smem.work_full, smem.work_empty, SharedStorage<C>::kWorkSlots,
       kWarps * C::kConsumers + (C::kMaskWriter || C::kFewQueries ? 3 : 2));  // and the others
  for (int consumer = 0; consumer < C::kConsumers; ++consumer) {
    for (int mask = 0; mask < C::kMasks; ++mask) {
      ptx::mbarrier_init(ptx::shared_address(&smem.mask_full[mask][consumer]), kWarp);
      ptx::mbarrier_init(ptx::shared_address(&smem.mask_empty[mask][consumer]), kWarps);
    }
  }
  if constexpr (C::kCopiesMask) {
    for (int stage = 0; stage < C::kMaskStages; ++stage) {
      ptx::mbarrier_init(ptx::shared_address(&smem.mask_tile_full[stage]), 1);
      ptx::mbarrier_init(ptx::shared_address(&smem.mask_tile_empty[stage]), kWarps * C::kConsumers);
    }
  }
  for (uint64_t& event : smem.event) ptx::mbarrier_init(ptx::shared_address(&event), 1);
  ptx::mbarrier_fence_init();
  ptx::fence_async_proxy();
}

/// The arguments of a call whose keys lie in no pages.
__device__ __forceinline__ Arguments unpaged(const Arguments& args) {
  Arguments all = args;
  all.params.keys.table = nullptr;
  all.copy_rows = all.box_rows;
  all.copies = all.boxes;
  return all;
}

/// Those of a call without dilation.
__device__ __forceinline__ Arguments undilated(const Arguments& args) {
  Arguments all = args;
  all.params.pattern.dilation = 1;
  all.classes = 1;
  return all;
}

/// The arguments, with what follows from the features of the kernel written out, so that the
/// compiler leaves out the code that none of its calls needs: of a plain one two thirds of all.
template <class C>
__device__ __forceinline__ Arguments known(const Arguments& args) {
  Arguments all = args;
  Pattern& pattern = all.params.pattern;
  if (C::kListed) {
    Pattern listed;
    listed.causal = pattern.causal;
    listed.list = pattern.list;
    if (!C::kPartial) listed.list.partial = nullptr;
    pattern = listed;
  } else {
    pattern.list = {};
    pattern.global_bits = nullptr;
    all.order = nullptr;
    all.box_rows = C::BLOCK_KV;
    all.boxes = 1;
  }
  if (!C::kRagged) {
    all.params.sequences.first_rows = all.params.sequences.first_keys = nullptr;
    all.params.sequences.used_keys = nullptr;
    all = unpaged(all);
  }
  if (!C::kScaled) all.params.keys.key_scale = all.params.keys.value_scale = {};
  if (!C::kLeads) pattern.lead = {};
  if (!C::kStridedLeads) pattern.lead.step = 1;
  if (!C::kGlobalRows) {
    pattern.global_count = 0;
    pattern.global_bits = nullptr;
  }
  if (!C::kLeadKeys) pattern.lead_keys = nullptr;
  if (!C::kSplits) all.split = {};
  if (C::kFewQueries) {  // every tile of its calls is split
    all.split.all = true;
    all.partials.tile_rows = 0;
  }
  if (C::kDeals) all = undilated(all);
  if (!C::kFolds) all.folds = Fold::kNone;
  if (!C::kPacks) all.packing = {1, C::BLOCK_Q};
  if (!C::kBounds) all.params.scores.bounds = {};
  if (!C::kCaps) all.capped = false;
  if (!C::kTransforms) all.transform = false;
  return all;
}

/// The planner's warp. Calls without dilation have code of their own, of a third of the
/// instructions, since nothing is divided.
template <class C>
__device__ __forceinline__ void plan(const Arguments& args, SharedStorage<C>& smem) {
  if (args.params.pattern.dilation == 1) {
    Planner<C>(undilated(args), smem).run();
  } else {
    Planner<C>(args, smem).run();
  }
}

/// A loader's warp, likewise of calls without pages: of their tiles one lane makes one copy.
template <class C, Loads kLoads>
__device__ __forceinline__ void load(const Arguments& args, const TensorMaps& maps,
                                     SharedStorage<C>& smem) {
  if (C::kRagged && !args.params.keys.paged()) {
    Loader<C, kLoads>(unpaged(args), maps, smem).run();
  } else {
    Loader<C, kLoads>(args, maps, smem).run();
  }
}

/// Fetches the tensor maps that the first tile most often needs, while it is planned.
__device__ __forceinline__ void prefetch_maps(const TensorMaps& maps) {
  ptx::tma_prefetch_map(&maps.query[kShortClass]);
  ptx::tma_prefetch_map(&maps.key[kShortClass]);
  ptx::tma_prefetch_map(&maps.value[kShortClass]);
  ptx::tma_prefetch_map(&maps.out[kShortClass]);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm)
    attention(const __grid_constant__ TensorMaps maps,
              const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& smem = *reinterpret_cast<SharedStorage<C>*>(shared);
  const Arguments args = known<C>(arguments);
  if (threadIdx.x == 0) init_barriers(smem);
  if (threadIdx.x == kWarp) prefetch_maps(maps);
  __syncthreads();

  const int warp = __shfl_sync(~0u, threadIdx.x / kWarp, 0);
  const int warpgroup = warp / (kWarpgroup / kWarp);
  if (warpgroup == 0) {
    ptx::give_registers_back<C::kProducerRegisters>();
    if (warp == 0) plan<C>(args, smem);
    if (warp == 1) load<C, C::kFewQueries ? Loads::kKey : Loads::kQueryAndKey>(args, maps, smem);
    if (warp == 2) load<C, Loads::kValue>(args, maps, smem);
    if constexpr (C::kMaskWriter) {
      if (warp == 3) MaskWriter<C>(args, maps, smem).run();
    } else if constexpr (C::kFewQueries) {
      if (warp == 3) Loader<C, Loads::kQuery>(args, maps, smem).run();
    }
  } else {
    ptx::take_registers<C::kConsumerRegisters>();
    Consumer<C>(args, maps, smem, warpgroup - 1).run();
  }
}

}  // namespace sparse_attn::cuda::hopper
