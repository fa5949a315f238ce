// Elements of keys and values wherever they lie: in tensors, packed, in pages, as codes of 8 bits.
#pragma once

#include "../../float8.h"
#include "../../params.h"
#include "ptx/convert.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"
#include "swizzle.cuh"
#include "types.cuh"

namespace sparse_attn::cuda {

/// Two codes of float8, in the upper bytes of two halves, as numbers of T, which holds them
/// exactly: the exponent moves to its place, and a power of 2 makes up for the other bias.
template <typename T>
__device__ __forceinline__ uint32_t widen_pair(uint32_t codes) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  const uint32_t bits = (codes & 0x80008000u) | (codes & 0x7f007f00u) >> (kHalf ? 1 : 4);
  if constexpr (kHalf) {
    const uint32_t factor = 0x5c005c00u;  // 2^8
    const __half2 pair =
        __hmul2(reinterpret_cast<const __half2&>(bits), reinterpret_cast<const __half2&>(factor));
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const uint32_t factor = 0x7b807b80u;  // 2^120
    const __nv_bfloat162 pair = __hmul2(reinterpret_cast<const __nv_bfloat162&>(bits),
                                        reinterpret_cast<const __nv_bfloat162&>(factor));
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

/// Four codes of float8 as numbers of T.
template <typename T>
__device__ __forceinline__ uint2 widen(uint32_t codes) {
#if __CUDA_ARCH__ >= 890
  if constexpr (std::is_same_v<T, __half>) return ptx::half_of_float8(codes);
#endif
  uint2 numbers = {widen_pair<T>(__byte_perm(codes, 0, 0x1404)),
                   widen_pair<T>(__byte_perm(codes, 0, 0x3424))};
  const uint32_t nan = ((codes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
  if (nan != 0) {  // all bits of the size
    numbers.x |= (__byte_perm(nan, 0, 0x1404) >> 15) * 0x7fffu;
    numbers.y |= (__byte_perm(nan, 0, 0x3424) >> 15) * 0x7fffu;
  }
  return numbers;
}

/// Eight of them, 16 bytes.
template <typename T>
__device__ __forceinline__ uint4 widen(uint2 codes) {
  const uint2 low = widen<T>(codes.x);
  const uint2 high = widen<T>(codes.y);
  return {low.x, low.y, high.x, high.y};
}

/// Eight codes that are not aligned.
__device__ __forceinline__ uint2 bytes_at(const uint8_t* from) {
  uint2 bytes = {0, 0};
  for (int i = 0; i < 4; ++i) {
    bytes.x |= uint32_t{from[i]} << 8 * i;
    bytes.y |= uint32_t{from[4 + i]} << 8 * i;
  }
  return bytes;
}

/// Element d of key j of a sequence, of `tensor` (key or value).
template <typename T>
__device__ __forceinline__ float key_element(const KeySource& keys, const TensorView& tensor,
                                             const Sequence& sequence, int64_t batch,
                                             int64_t head_kv, int32_t j, int32_t d) {
  const int64_t at = keys.locate(tensor, sequence, batch, head_kv, j) + d;
  if (keys.dtype == Dtype::kFloat8) {
    return float_from_float8(static_cast<const uint8_t*>(tensor.data)[at]);
  }
  return to_float(static_cast<const T*>(tensor.data)[at]);
}

/// Copies 16 bytes of T to shared memory at `to`: elements from `at` of `tensor` on, converted
/// where keys have 8 bits, zeros where they do not exist. Aligned elements of T arrive
/// asynchronously.
template <typename T>
__device__ __forceinline__ void copy_key_chunk(uint32_t to, const KeySource& keys,
                                               const TensorView& tensor, int64_t at, bool exists,
                                               bool aligned) {
  if constexpr (sizeof(T) == 2) {
    if (keys.dtype == Dtype::kFloat8) {
      const uint8_t* from = static_cast<const uint8_t*>(tensor.data) + at;
      uint2 codes = {0, 0};
      if (exists) codes = aligned ? *reinterpret_cast<const uint2*>(from) : bytes_at(from);
      ptx::store_shared_16(to, widen<T>(codes));
      return;
    }
  }
  const T* from = static_cast<const T*>(tensor.data) + at;
  if (aligned) {
    ptx::cp_async_16(to, from, exists);
  } else {
    ptx::store_shared_16(to, exists ? load_unaligned(from) : uint4{});
  }
}

}  // namespace sparse_attn::cuda
