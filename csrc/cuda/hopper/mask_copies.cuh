// Tiles of attn_mask on their way to the scores: the warp that writes masks has the copy engine
// bring them ahead of the consumers, where elements have 16 bits and the engine can follow the
// strides. Other masks the consumers read from memory, see score_bias.cuh.
#pragma once

#include "../common/ptx/mbarrier.cuh"
#include "../common/ptx/tma.cuh"
#include "arguments.h"
#include "config.h"

namespace sparse_attn::cuda::hopper {

template <class C>
class MaskCopies {
 public:
  __device__ __forceinline__ MaskCopies(const Arguments& args, const TensorMaps& maps,
                                        SharedStorage<C>& smem)
      : mask_(args.params.scores.mask), map_(&maps.mask), smem_(smem) {
    ring_.parity = 1;  // the first pass finds every stage empty
  }

  /// Copies the columns of the key tile that begins with `key`, for the rows of the query tile:
  /// zeros past those that exist. Run by one lane.
  __device__ __forceinline__ void copy(const Work& work, int32_t key) {
    const uint32_t full = ptx::shared_address(&smem_.mask_tile_full[ring_.index]);
    const uint32_t tile = ptx::shared_address(smem_.mask_tile[ring_.index]);
    ptx::mbarrier_wait(ptx::shared_address(&smem_.mask_tile_empty[ring_.index]), ring_.parity);
    ptx::mbarrier_arrive_expect(full, C::kMaskTileBytes);
    const bool shared = mask_.stride_h == 0;  // by heads, which read it at the same time
#pragma unroll 1
    for (int32_t slab = 0; slab < C::BLOCK_KV / kMaskColumns; ++slab) {
      ptx::tma_load(tile + slab * C::kMaskSlabBytes, map_,
                    {key + slab * kMaskColumns, work.first_row, 0, shared ? 0 : work.head,
                     mask_.stride_b == 0 ? 0 : work.batch},
                    full, shared ? ptx::kEvictLast : ptx::kEvictFirst);
    }
    ring_.advance();
  }

 private:
  const MaskView& mask_;
  const CUtensorMap* map_;
  SharedStorage<C>& smem_;
  Ring<C::kMaskStages> ring_;
};

}  // namespace sparse_attn::cuda::hopper
