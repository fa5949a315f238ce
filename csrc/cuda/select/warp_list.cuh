// The entries of a row that hold, as an ascending list, by one warp: the lanes vote, and the votes
// before a lane are its place in the list. Read by the kernels that build lists.
#pragma once

#include <cstdint>

namespace sparse_attn::cuda {

/// Writes the entries 0 .. num for which listed(entry) holds, and returns how many they are. All
/// lanes of a warp call it.
template <typename Listed>
__device__ __forceinline__ int32_t write_list(int32_t num, const Listed& listed, int32_t* indices) {
  const int lane = threadIdx.x % 32;
  int32_t count = 0;
  for (int32_t begin = 0; begin < num; begin += 32) {
    int32_t entry = begin + lane;
    uint32_t found = __ballot_sync(~0u, entry < num && listed(entry));
    if (found >> lane & 1) indices[count + __popc(found & ((1u << lane) - 1))] = entry;
    count += __popc(found);
  }
  return count;
}

/// The same for a row of a block list: its count, and zeros after the last entry.
template <typename Listed>
__device__ __forceinline__ void write_list_row(int32_t num, const Listed& listed, int32_t* indices,
                                               int32_t* count) {
  const int32_t written = write_list(num, listed, indices);
  const int lane = threadIdx.x % 32;
  for (int32_t entry = written + lane; entry < num; entry += 32) indices[entry] = 0;
  if (lane == 0) *count = written;
}

}  // namespace sparse_attn::cuda
