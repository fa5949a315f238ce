// The queries of a tile of the sketch's scores: which rows they are, what those see, and a lane's
// channels of its own row, scaled for the products with codes.
#pragma once

#include "config.cuh"

namespace sparse_attn::cuda {

/// Eight elements as floats; `from` lies on a multiple of 16 bytes.
template <typename T>
__device__ __forceinline__ void load_eight(const T* from, float (&to)[8]) {
  struct alignas(16) Elements {
    T element[8];
  };
  const Elements elements = *reinterpret_cast<const Elements*>(from);
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = to_float(elements.element[i]);
}

/// What a row of a tile of queries is, and which keys it sees.
struct QueryRow {
  int32_t head, query;  // a head of -1 is none; it sees what the last row sees
  Interval keys;

  __device__ __forceinline__ QueryRow of_lane(int lane) const {
    return {__shfl_sync(~0u, head, lane),
            __shfl_sync(~0u, query, lane),
            {__shfl_sync(~0u, keys.begin, lane), __shfl_sync(~0u, keys.end, lane)}};
  }
};

__device__ __forceinline__ QueryRow row_at(const SelectParams& params, int32_t batch,
                                           int32_t head_kv, int32_t row) {
  const int32_t last = params.problem.group() * params.problem.seq_q - 1;
  const auto own = static_cast<uint32_t>(imin(row, last));
  const auto queries = static_cast<uint32_t>(params.problem.seq_q);
  const auto head = head_kv * params.problem.group() + static_cast<int32_t>(own / queries);
  const auto query = static_cast<int32_t>(own % queries);
  return {row > last ? -1 : head, query, params.keys_of_row(batch, head, query)};
}

/// The queries of a lane's row, in its channels.
template <typename Config>
struct LaneQuery {
  uint32_t scaled[Config::kPairs];  // q 2^(kLift - shift) / unit / levels, below 2^kLift
  float plain[Config::kChannels];
  float unit;  // the power of two above the row's largest element

  /// Reads the row; `aligned` tells whether it begins at 16 bytes.
  __device__ __forceinline__ void load(const SelectParams& params, int32_t batch,
                                       const QueryRow& row, bool aligned) {
    using T = typename Config::T;
    const int first = threadIdx.x % 4 * Config::kChannels;
    const T* query = static_cast<const T*>(params.query.data) + batch * params.query.stride_b +
                     row.head * params.query.stride_h + row.query * params.query.stride_s;
#pragma unroll
    for (int i = 0; i < Config::kChannels; i += 8) {
      float elements[8] = {};
      if (row.head >= 0 && first + i < params.problem.head_dim) {
        if (aligned) {
          load_eight(query + first + i, elements);
        } else {
#pragma unroll
          for (int d = 0; d < 8; ++d) elements[d] = to_float(query[first + i + d]);
        }
      }
#pragma unroll
      for (int d = 0; d < 8; ++d) plain[i + d] = elements[d];
    }
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < Config::kChannels; ++i) largest = fmaxf(largest, fabsf(plain[i]));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    // Powers of two by their exponents, within what a float has on both sides.
    constexpr int kLeast = 27, kMost = 253, kBias = 127;
    const int exponent = imax(kLeast, imin(__float_as_int(largest) >> 23, kMost));
    unit = __int_as_float((exponent + 1) << 23);
    const float lift = __int_as_float((2 * kBias - 1 + kLift - exponent) << 23);
#pragma unroll
    for (int i = 0; i < Config::kPairs; ++i) {
      const float factor =
          lift * (1.0f / (Config::kLevels << Config::shift(i % Config::kPairsOfWord)));
      scaled[i] = pack<__half>(plain[2 * i] * factor, plain[2 * i + 1] * factor);
    }
  }
};

__device__ __forceinline__ float sum_of_quad(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

/// The lane's queries times a group's steps; returns its part of q.least.
template <typename Config>
__device__ __forceinline__ float scale_query(const LaneQuery<Config>& query,
                                             const typename Config::T* ranges, int32_t head_dim,
                                             uint32_t (&stepped)[Config::kPairs]) {
  const int first = threadIdx.x % 4 * Config::kChannels;
  float base = 0.0f;
#pragma unroll
  for (int i = 0; i < Config::kChannels; i += 8) {
    // Queries are 0 in channels that do not exist.
    const int channel = first + i < head_dim ? first + i : 0;
    float least[8], greatest[8];
    load_eight(ranges + channel, least);
    load_eight(ranges + head_dim + channel, greatest);
#pragma unroll
    for (int d = 0; d < 8; d += 2) {
      base = fmaf(query.plain[i + d], least[d], base);
      base = fmaf(query.plain[i + d + 1], least[d + 1], base);
      const __half2 step =
          __floats2half2_rn(greatest[d] - least[d], greatest[d + 1] - least[d + 1]);
      const uint32_t pair = query.scaled[(i + d) / 2];
      const __half2 product = __hmul2(reinterpret_cast<const __half2&>(pair), step);
      stepped[(i + d) / 2] = reinterpret_cast<const uint32_t&>(product);
    }
  }
  return base;
}

}  // namespace sparse_attn::cuda
