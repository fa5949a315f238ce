// A chunk of what a query tile visits.
#pragma once

#include "arguments.h"
#include "config.h"

namespace sparse_attn::cuda::hopper {

/// `count` of the key tiles that are visited, from number `first` on: main tiles, then lead tiles.
__device__ __forceinline__ Tiles part_of(Tiles tiles, int32_t first, int32_t count) {
  auto take = [&](Interval& run) {
    const int32_t begin = run.begin + first;
    first -= run.size();
    run = intersect(run, {begin, begin + count});
  };
  take(tiles.main);
  take(tiles.lead_left);
  take(tiles.lead_right);
  return tiles;
}

}  // namespace sparse_attn::cuda::hopper
