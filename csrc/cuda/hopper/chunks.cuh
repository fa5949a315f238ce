// A chunk of what a query tile visits.
#pragma once

#include "arguments.h"
#include "config.h"

namespace sparse_attn::cuda::hopper {

/// `count` of the key tiles that are visited, from number `first` on: lead tiles, then main tiles,
/// against the order of the walk, so that who takes all chunks in turn ends with the first one.
__device__ __forceinline__ Tiles take_tiles(Tiles tiles, int32_t first, int32_t count) {
  auto take = [&](Interval& run) {
    const int32_t begin = run.begin + first;
    first -= run.size();
    run = intersect(run, {begin, begin + count});
  };
  take(tiles.lead_left);
  take(tiles.lead_right);
  take(tiles.main);
  return tiles;
}

/// Whether the thread block takes chunks of its tiles in turn. Of sequences that differ in length
/// the device alone knows; wide tiles of theirs all do, some in one chunk, since there are no
/// registers for two ways to the end.
template <class C>
__device__ __forceinline__ bool folds(const Arguments& args,
                                      const typename SharedStorage<C>::Work& work) {
  if constexpr (C::kDeals || (C::kRagged && C::kWide && C::kFolds)) {
    return true;
  } else if constexpr (C::kRagged) {
    return C::kFolds && work.chunk_tiles > 0;
  } else {
    return C::kFolds && args.folds != Fold::kNone;
  }
}

}  // namespace sparse_attn::cuda::hopper
