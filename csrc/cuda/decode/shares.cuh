// How thread blocks are shared out among sequences that differ in length, which the device alone
// knows: each takes about as many keys as the others. Which one computes a chunk changes no bit.
#pragma once

#include "plan.h"

namespace sparse_attn::cuda::decode {

/// A thread block's part of a sequence: one of `splits` that share its chunks; none where those
/// are 0.
struct Share {
  int32_t sequence = 0, split = 0, splits = 0;
};

/// The part that stands at `place` among the parts of all sequences, in their order; a warp calls
/// it. There are at most as many as the grid's shares, and one more for each sequence.
__device__ inline Share find_share(const AttentionParams& params, const Pattern& pattern,
                                   const SplitGrid& grid, int32_t place) {
  const int32_t batch = params.problem.batch;
  int32_t shares = grid.shares;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  int64_t keys = 0;
  int32_t longest = 0;
#pragma unroll 4
  for (int32_t b = lane; b < batch; b += 32) {
    const int32_t visited = visited_keys(pattern, params.sequences.of(b).keys);
    keys += visited;
    longest = imax(longest, visited);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    keys += __shfl_xor_sync(~0u, keys, step);
    longest = imax(longest, __shfl_xor_sync(~0u, longest, step));
  }
  // Where the longest sequence has up to 5/4 of the mean, half as many parts end evenly too, and
  // each has to start.
  if (int64_t{longest} * batch * 4 <= keys * 5) shares = ceil_div(shares, 2);
  keys = keys / shares + 1;  // of a part
  const int32_t each = keys < kMaxLength ? static_cast<int32_t>(keys) : kMaxLength;
  int32_t before = 0;
#pragma unroll 1
  for (int32_t first = 0; first < batch; first += 32) {
    int32_t splits = 0;
    if (first + lane < batch) {
      const Sequence sequence = params.sequences.of(first + lane);
      const int32_t visited = visited_keys(pattern, sequence.keys);
      const int32_t steps = chunk_steps(pattern, params.features, sequence.keys, sequence.rows,
                                        params.problem.widest_dim());
      const int32_t chunk = steps * kStepKeys, chunks = ceil_div(visited, chunk);
      const int32_t wanted = (visited + each / 2) / each;
      // A long text's groups, of which each leaves one sum, while they are as many as fill a
      // device.
      const int32_t group = group_of(params.features, sequence.keys, chunk);
      const int32_t groups = group <= kSmallGroup ? ceil_div(chunks, group) : 0;
      const bool whole = groups > 0 && (grid.whole_groups || wanted <= 5 * groups);
      splits = imax(1, imin(wanted, whole ? groups : chunks));
    }
    int32_t end = splits;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t left = __shfl_up_sync(~0u, end, step);
      end += lane >= step ? left : 0;
    }
    const uint32_t reached = __ballot_sync(~0u, place < before + end);
    if (reached != 0) {
      const int owner = __ffs(static_cast<int>(reached)) - 1;
      const int32_t begin = before + __shfl_sync(~0u, end - splits, owner);
      return {first + owner, place - begin, __shfl_sync(~0u, splits, owner)};
    }
    before += __shfl_sync(~0u, end, 31);
  }
  return {};
}

}  // namespace sparse_attn::cuda::decode
