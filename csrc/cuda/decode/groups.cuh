// How a thread block's chunks become the partial results that it stores: groups of which it has all
// chunks are one each.
#pragma once

#include "../common/partial_rows.cuh"
#include "plan.h"

namespace sparse_attn::cuda::decode {

/// A chunk that ends, as a part of what the thread block sums up before it stores it: of itself
/// alone, or of several chunks, whose sum takes the place of the first.
struct EndedChunk {
  int32_t place;  // of that sum, among the partial results of a row
  int32_t added;  // chunks of the sum before this one
  bool last;      // of the sum
  bool placed;    // the chunk has a place of its own too, which stays empty
};

/// The chunks of a thread block, and what it sums up of them before it stores it: groups of which
/// it has all.
struct Groups {
  int32_t begin, end;      // chunks of the thread block
  int32_t chunks;          // of the rows
  int32_t before = 0;      // chunks of the first group that are not visited
  int32_t size = kInARow;  // of a group
  bool kept;               // the tile's rows have room
  bool shared = false;     // thread blocks have whole groups, which have one place each

  /// By which a place becomes that of its small group, of two or four.
  __device__ __forceinline__ int32_t shift() const { return size / 2; }
  /// Where the merge finds the results.
  __device__ __forceinline__ RowChunks places() const {
    if (shared) return {(before + chunks + size - 1) >> shift(), kInARow};
    return {before + chunks, size};
  }
  __device__ __forceinline__ EndedChunk of(int32_t chunk) const {
    const int32_t group = ((chunk + before) & -size) - before;
    const int32_t first = imax(group, 0), next = imin(group + size, chunks);
    if (!kept || first < begin || next > end) return {before + chunk, 0, true, false};
    const int32_t place = shared ? (before + chunk) >> shift() : before + first;
    return {place, chunk - first, chunk + 1 == next, !shared && chunk > first};
  }
};

/// Part `split` of `splits` of the chunks that rows visit of a text: `visited` from number `first`
/// of its `text_chunks` on. Sums are `kept` where the tile's rows have room. Small groups stay
/// whole where the grid says so, and wherever each part has one.
__device__ inline Groups share_groups(const SplitGrid& grid, int32_t split, int32_t splits,
                                      int32_t text_chunks, int32_t first, int32_t visited,
                                      bool kept) {
  const auto part = static_cast<uint32_t>(split), parts = static_cast<uint32_t>(imax(splits, 1));
  Groups groups;
  groups.chunks = visited;
  groups.kept = kept;
  groups.begin = part * visited / parts;
  groups.end = (part + 1) * visited / parts;
  if (grid.group != kInARow) groups.size = group_size(text_chunks);
  if (groups.size == kInARow) return groups;
  groups.before = first & (groups.size - 1);
  const auto count =
      static_cast<uint32_t>(groups.before + visited + groups.size - 1) >> groups.shift();
  if (groups.size > kSmallGroup || !kept || (parts > count && !grid.whole_groups)) return groups;
  groups.shared = true;
  const int32_t from = part * count / parts, to = (part + 1) * count / parts;
  groups.begin = imax(from * groups.size - groups.before, 0);
  groups.end = imin(to * groups.size - groups.before, visited);
  return groups;
}

}  // namespace sparse_attn::cuda::decode
