// The portable engine's score tiles for the ranking pass of token top-k: queries in registers, keys
// in two slots of shared memory.
#pragma once

#include "topk_rows.cuh"

namespace sparse_attn::cuda::portable {

template <typename Config>
struct TileScores {
  const QueryTile<Config>& tile;
  const typename Config::Products& products;
  uint32_t ring;

  template <typename Function>
  __device__ __forceinline__ void visit(Stride stride, const Function& function) const {
    uint32_t slot = ring;
    uint32_t other = ring + Config::kShape.slot_bytes();
    typename Config::Step step = stride.step_at(tile.walk(), 0);
    if (step.exists()) tile.load_keys(slot, step);
    ptx::cp_async_commit();
#pragma unroll 1
    for (int32_t i = 1; step.exists(); ++i) {
      const typename Config::Step next_step = stride.step_at(tile.walk(), i);
      ptx::cp_async_wait<0>();
      __syncthreads();  // keys have landed; the tile before them has been read
      if (next_step.exists()) tile.load_keys(other, next_step);
      ptx::cp_async_commit();
      const WarpStep warp_step = refine(tile, step);
      if (warp_step.visited) {
        typename Config::Scores rS;
        products.scores(rS, slot);
        if (warp_step.masked) mask_scores(rS, tile, step);
        function(rS, step);
      }
      uint32_t swap = slot;
      slot = other;
      other = swap;
      step = next_step;
    }
    __syncthreads();
  }
};

}  // namespace sparse_attn::cuda::portable
