// How rows lie in tiles of shared memory for mma fragments: 16-byte chunks, chunk c of row r stored
// at c ^ (r % 8), so that eight rows of one chunk lie in different banks.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace sparse_attn::cuda {

constexpr int kChunkBytes = 16;

/// Byte offset of a chunk in a tile.
template <int kPitch>
__device__ __forceinline__ constexpr uint32_t swizzled(int row, int chunk) {
  return row * kPitch + ((chunk ^ (row & 7)) * kChunkBytes);
}

/// From the offset of a chunk that of the one `more` after it, where those numbers have no bit in
/// common. The compiler knows `more`; what depends on the thread is worked out once.
__device__ __forceinline__ constexpr uint32_t swizzled_after(uint32_t offset, int more) {
  constexpr int kPermuted = 8;  // chunks of a line
  return (offset ^ (more % kPermuted * kChunkBytes)) + more / kPermuted * kPermuted * kChunkBytes;
}

/// 16 bytes by single elements, for rows that are not aligned.
template <typename T>
__device__ __forceinline__ uint4 load_unaligned(const T* from) {
  union {
    T elements[kChunkBytes / sizeof(T)];
    uint4 bits;
  } chunk;
#pragma unroll
  for (int i = 0; i < static_cast<int>(kChunkBytes / sizeof(T)); ++i) chunk.elements[i] = from[i];
  return chunk.bits;
}

}  // namespace sparse_attn::cuda
