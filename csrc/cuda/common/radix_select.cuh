// The k-th highest of n keys by one thread block: four passes over histograms of 8 bits, exact,
// ties to the lower index. Called by token top-k (naive, decode) and by block selection.
#pragma once

#include <cstdint>

namespace sparse_attn::cuda {

/// Keys that compare as unsigned integers in the order of the floats; 0 is kept for "not eligible".
__device__ __forceinline__ uint32_t ordered_key(float x) {
  uint32_t bits = __float_as_uint(x + 0.0f);  // + 0 makes -0 equal 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/// The float of such a key.
__device__ __forceinline__ float score_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

/// Kept are the keys above `key` and those equal to it up to index `last`.
struct Threshold {
  uint32_t key = 0;
  int32_t last = -1;
  __device__ bool keeps(uint32_t other, int32_t index) const {
    return other > key || (other == key && index <= last);
  }
};

/// Inclusive prefix sum over the lanes of a warp.
template <typename Count>
__device__ __forceinline__ Count warp_prefix_sum(Count value) {
  for (int step = 1; step < 32; step *= 2) {
    Count other = __shfl_up_sync(~0u, value, step);
    if (static_cast<int>(threadIdx.x % 32) >= step) value += other;
  }
  return value;
}

/// The digit of the `wanted`-th highest key of a histogram, that key's place among the keys of the
/// digit, and how many they are; `found` is false where the histogram holds fewer keys. Keys may
/// count more than once: a histogram of weights gives the key at which their sum reaches `wanted`.
template <typename Count>
struct Digit {
  bool found = false;
  uint32_t value = 0;
  Count wanted = 0, count = 0;
};

/// Searches histogram[0 .. bins), bins a multiple of 32; a whole warp calls it and gets the result.
template <typename Count>
__device__ inline Digit<Count> find_digit(const Count* histogram, int bins, Count wanted) {
  int per_lane = bins / 32;
  int top = bins - 1 - static_cast<int>(threadIdx.x % 32) * per_lane;  // lane 0 has the highest
  Count sum = 0;
  for (int i = 0; i < per_lane; ++i) sum += histogram[top - i];
  Count above = warp_prefix_sum(sum) - sum;
  Digit<Count> digit;
  for (int i = 0; i < per_lane; ++i) {
    Count count = histogram[top - i];
    if (above < wanted && wanted <= above + count) {
      digit = {true, static_cast<uint32_t>(top - i), wanted - above, count};
    }
    above += count;
  }
  uint32_t finder = __ballot_sync(~0u, digit.found);
  if (finder == 0) return digit;
  int lane = __ffs(finder) - 1;
  return {true, __shfl_sync(~0u, digit.value, lane), __shfl_sync(~0u, digit.wanted, lane),
          __shfl_sync(~0u, digit.count, lane)};
}

/// Shared memory of find_threshold.
struct SelectStorage {
  static constexpr int kBins = 256;
  uint32_t histogram[kBins];
  uint32_t key;  // of the threshold
  int32_t last;
};

/// The threshold that keeps the k highest of key(0) .. key(n - 1); all threads get it. Fewer than k
/// keys above 0 are all kept, keys of 0 never. Where `low_bits` are left out, a multiple of 8, its
/// key has none of them and is at most the k-th.
template <typename Key>
__device__ Threshold find_threshold(const Key& key, int32_t n, int32_t k, SelectStorage& storage,
                                    int low_bits = 0) {
  uint32_t prefix = 0;
  uint32_t wanted = k;
  uint32_t equal_keys = 0;
  bool found = true;
  for (int shift = 24; shift >= low_bits && found; shift -= 8) {
    for (int bin = threadIdx.x; bin < SelectStorage::kBins; bin += blockDim.x) {
      storage.histogram[bin] = 0;
    }
    __syncthreads();
    uint32_t high = shift == 24 ? 0 : ~0u << (shift + 8);
    for (int32_t j = threadIdx.x; j < n; j += blockDim.x) {
      uint32_t x = key(j);
      if (x != 0 && (x & high) == prefix) atomicAdd(&storage.histogram[x >> shift & 255], 1u);
    }
    __syncthreads();
    Digit digit = find_digit(storage.histogram, SelectStorage::kBins, wanted);
    __syncthreads();
    prefix |= digit.value << shift;
    wanted = digit.wanted;
    equal_keys = digit.count;
    found = digit.found;
  }
  if (!found) return {};  // fewer than k keys: everything above 0 is kept
  if (wanted == equal_keys || low_bits > 0) return {prefix, n};

  // The `wanted`-th of the keys equal to the threshold, in index order.
  if (threadIdx.x < 32) {
    Threshold threshold = {prefix, -1};
    uint32_t seen = 0;
    for (int32_t begin = 0; begin < n && seen < wanted; begin += 32) {
      int32_t j = begin + threadIdx.x;
      uint32_t equal = __ballot_sync(~0u, j < n && key(j) == prefix);
      if (seen + __popc(equal) >= wanted) {
        threshold.last = begin + static_cast<int32_t>(__fns(equal, 0, wanted - seen));
      }
      seen += __popc(equal);
    }
    if (threadIdx.x == 0) {
      storage.key = threshold.key;
      storage.last = threshold.last;
    }
  }
  __syncthreads();
  return {storage.key, storage.last};
}

}  // namespace sparse_attn::cuda
