// Score tiles of the passes that rank, by mma.sync: the keys of visited tiles, one after the other
// or sampled, in two slots of shared memory. Called by the threshold pass of every top-k (topk.cuh)
// and by the ranking pass of plain ones (topk_launch.cuh).
#pragma once

#include "../topk/score_tiles.cuh"
#include "mask.cuh"

namespace sparse_attn::cuda::portable {

/// Calls function(rS, step) for the warp's part of visited tiles: rS = Q K^T, -inf where the
/// pattern does not allow a key.
template <typename Config>
struct ScoreSource {
  const QueryTile<Config>& tile;
  const typename Config::Products& products;
  uint32_t ring;

  template <typename Function>
  __device__ __forceinline__ void visit(topk::Stride stride, const Function& function) const {
    const auto walk = tile.walk();
    const bool has_bits = tile.params.pattern.list.has_bits();
    int32_t position = stride.first();
    auto next = [&] {
      const typename Config::Step step = walk.next(position);
      position += stride.step - 1;
      return step;
    };
    uint32_t slot = ring;
    uint32_t other = ring + Config::kShape.slot_bytes();
    typename Config::Step step = next();
    if (step.exists()) tile.load_keys(slot, step);
    ptx::cp_async_commit();
#pragma unroll 1
    while (step.exists()) {
      const typename Config::Step next_step = next();
      ptx::cp_async_wait<0>();
      __syncthreads();  // keys have landed; the tile before them has been read
      if (next_step.exists()) tile.load_keys(other, next_step);
      ptx::cp_async_commit();
      const WarpStep warp_step = refine(tile, step);
      if (warp_step.visited) {
        typename Config::ScoreFragment rS;
        products.scores(rS, slot);
        if (warp_step.masked) mask_scores(rS, tile, step);
        if (Config::kBits && has_bits && step.partial()) mask_by_bits(rS, tile, step);
        function(rS, step);
      }
      uint32_t swap = slot;
      slot = other;
      other = swap;
      step = next_step;
    }
    __syncthreads();
  }

  template <typename Function>
  __device__ __forceinline__ void visit_straight(topk::Stride stride,
                                                 const Function& function) const {
    visit(stride, function);
  }
};

}  // namespace sparse_attn::cuda::portable
