// A chunk of what a query tile visits, and where its rows' partial results lie.
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

/// The number of a head's row r of a split tile among those of Partials.
__device__ __forceinline__ int64_t partial_row(const Arguments& args, const Work& work,
                                               int32_t head_idx, int32_t r) {
  const Partials& partials = args.partials;
  const int32_t first = partials.first_query(imax(0, work.slice.origin), work.slice.offset);
  const int64_t head = int64_t{work.batch} * args.params.problem.heads_q + head_idx;
  return (head - partials.first_head) * partials.rows + work.slice.rows.at(r) - first;
}

}  // namespace sparse_attn::cuda::hopper
