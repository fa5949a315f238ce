// float32, float16 and bfloat16 in kernels: conversion, packed pairs, and the choice at run time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../../params.h"

namespace sparse_attn::cuda {

template <typename T>
struct TypeTag {
  using Type = T;
};

/// Calls `function(TypeTag<T>{})` with the T of `dtype`.
template <typename Function>
auto with_type(Dtype dtype, Function&& function) {
  switch (dtype) {
    case Dtype::kFloat16:
      return function(TypeTag<__half>{});
    case Dtype::kBFloat16:
      return function(TypeTag<__nv_bfloat16>{});
    default:
      return function(TypeTag<float>{});
  }
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else {
    return __float2bfloat16_rn(x);
  }
}

/// An element of 16 bits whose type the call's dtype tells at run time, in kernels that meet it
/// rarely.
struct HalfOfEitherKind {
  uint16_t bits;
};

/// Two values rounded to T in one register, `low` in the lower half.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t bits;
  if constexpr (std::is_same_v<T, __half>) {
    __half2 pair = __floats2half2_rn(low, high);
    bits = reinterpret_cast<const uint32_t&>(pair);
  } else {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    bits = reinterpret_cast<const uint32_t&>(pair);
  }
  return bits;
}

/// The two of a pair.
template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(reinterpret_cast<const __half2&>(pair));
  } else {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
  }
}

}  // namespace sparse_attn::cuda
