// The queries of a tile of the sketch's scores: which rows they are, what those see, and a lane's
// channels of its own row, scaled for the products with codes.
#pragma once

#include "../common/ptx/mma.cuh"
#include "../common/quad.cuh"
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

/// A tile of queries, as a lane of its warp sees it.
template <typename Config>
struct QueryTile {
  int column_group, group_of_sums;  // of the lane's column, and of its accumulators' two columns
  QueryRow own, rows[2];            // of the same columns
  int32_t held;                     // keys that the sketch holds
  Interval any, all;                // keys that some row sees, and those that all of them see

  __device__ __forceinline__ QueryTile(const SelectParams& params, int32_t batch, int32_t head_kv,
                                       int first_row, int32_t held)
      : column_group(threadIdx.x % 32 / 4 / Config::kRows),
        group_of_sums(2 * (threadIdx.x % 4) / Config::kRows),
        own(row_at(params, batch, head_kv, first_row + threadIdx.x % 32 / 4 % Config::kRows)),
        rows{own.of_lane(threadIdx.x % 4 * 8), own.of_lane(threadIdx.x % 4 * 8 + 4)},
        held(held),
        any{own.keys.empty() ? params.problem.seq_kv : own.keys.begin, imin(own.keys.end, held)},
        all(intersect(own.keys, {0, held})) {
    for (int step = 4; step < 32; step *= 2) {
      any.begin = imin(any.begin, __shfl_xor_sync(~0u, any.begin, step));
      any.end = imax(any.end, __shfl_xor_sync(~0u, any.end, step));
      all.begin = imax(all.begin, __shfl_xor_sync(~0u, all.begin, step));
      all.end = imin(all.end, __shfl_xor_sync(~0u, all.end, step));
    }
  }
};

/// The queries of a lane's row, in its channels.
template <typename Config>
struct LaneQuery {
  uint32_t scaled[Config::kPairs];      // q 2^(kLift - shift) / unit / levels, below 2^kLift
  uint32_t plain[Config::kPlainWords];  // as they are
  float unit;                           // the power of two above the row's largest element

  /// Reads the row; `aligned` tells whether it begins at 16 bytes.
  __device__ __forceinline__ void load(const SelectParams& params, int32_t batch,
                                       const QueryRow& row, bool aligned) {
    using T = typename Config::T;
    const int first = threadIdx.x % 4 * Config::kChannels;
    const T* query = static_cast<const T*>(params.query.data) + batch * params.query.stride_b +
                     row.head * params.query.stride_h + row.query * params.query.stride_s;
    float elements[Config::kChannels];
#pragma unroll
    for (int i = 0; i < Config::kChannels; i += 8) {
      float some[8] = {};
      if (row.head >= 0 && first + i < params.problem.head_dim) {
        if (aligned) {
          load_eight(query + first + i, some);
        } else {
#pragma unroll
          for (int d = 0; d < 8; ++d) some[d] = to_float(query[first + i + d]);
        }
      }
#pragma unroll
      for (int d = 0; d < 8; ++d) elements[i + d] = some[d];
    }
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < Config::kChannels; ++i) largest = fmaxf(largest, fabsf(elements[i]));
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
      scaled[i] = pack<__half>(elements[2 * i] * factor, elements[2 * i + 1] * factor);
    }
#pragma unroll
    for (int i = 0; i < Config::kPlainWords; ++i) {
      if constexpr (Config::kPlainPairs) {
        plain[i] = pack<T>(elements[2 * i], elements[2 * i + 1]);
      } else {
        plain[i] = __float_as_uint(elements[i]);
      }
    }
  }

  /// What the products of the two columns of the lane's accumulators are multiplied by.
  __device__ __forceinline__ void find_factors(float scale, float (&factors)[2]) const {
    constexpr float kUnit = 1 << (kCodeUnit - kLift);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factors[r] = scale * kUnit * __shfl_sync(~0u, unit, (2 * (threadIdx.x % 4) + r) * 4);
    }
  }
};

/// Puts the steps of kGroups groups in the place of their greatest elements, as 16-bit floats. The
/// lanes of a warp share the channels.
template <typename Config>
__device__ __forceinline__ void make_steps(char* ranges, int32_t head_dim) {
  using T = typename Config::T;
  constexpr int kLanes = 32 / Config::kGroups;  // of a group
  const int lane = threadIdx.x % 32;
  T* least = reinterpret_cast<T*>(ranges + lane / kLanes * Config::kRangeBytes);
  T* greatest = least + head_dim;
  constexpr int kTurns = (4 * Config::kChannels / 8 + kLanes - 1) / kLanes;
  uint4 steps[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int channel = (turn * kLanes + lane % kLanes) * 8;
    if (channel >= head_dim) continue;
    float from[8], to[8];
    load_eight(least + channel, from);
    load_eight(greatest + channel, to);
#pragma unroll
    for (int d = 0; d < 8; ++d) to[d] -= from[d];
    steps[turn] = {pack<__half>(to[0], to[1]), pack<__half>(to[2], to[3]),
                   pack<__half>(to[4], to[5]), pack<__half>(to[6], to[7])};
  }
  __syncwarp();  // 16-bit steps of float32 elements take the place of other lanes' elements
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int channel = (turn * kLanes + lane % kLanes) * 8;
    if (channel >= head_dim) continue;
    reinterpret_cast<uint4*>(greatest)[channel / 8] = steps[turn];
  }
  __syncwarp();
}

/// The lane's queries times a group's steps.
template <typename Config>
__device__ __forceinline__ void scale_query(const LaneQuery<Config>& query, const char* ranges,
                                            int32_t head_dim, uint32_t (&stepped)[Config::kPairs]) {
  const int first = threadIdx.x % 4 * Config::kChannels;
  const char* steps = ranges + head_dim * static_cast<int>(sizeof(typename Config::T));
#pragma unroll
  for (int i = 0; i < Config::kChannels; i += 8) {
    // Queries are 0 in channels that do not exist.
    const int channel = first + i < head_dim ? first + i : 0;
    uint32_t words[4];
    load_words(steps + channel * static_cast<int>(sizeof(__half)), words);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const __half2 product = __hmul2(reinterpret_cast<const __half2&>(query.scaled[i / 2 + pair]),
                                      reinterpret_cast<const __half2&>(words[pair]));
      stepped[i / 2 + pair] = reinterpret_cast<const uint32_t&>(product);
    }
  }
}

/// q.least for the two columns of the lane's accumulators, of groups `group_of_sums`; `ranges` are
/// those of the group of the lane's own column.
template <typename Config>
__device__ __forceinline__ void least_products(const LaneQuery<Config>& query, const char* ranges,
                                               int32_t head_dim, int group_of_sums,
                                               float (&bases)[2]) {
  using T = typename Config::T;
  const int lane = threadIdx.x % 32, quad = lane % 4, first = quad * Config::kChannels;
  if constexpr (Config::kPlainPairs) {
    // Rows lane / 4 and lane / 4 + 8 of the left matrix are the least elements of the group of
    // column lane / 4: the one in half of the channels, the other in the other half.
    float low[4] = {}, high[4] = {};
#pragma unroll
    for (int i = 0; i < Config::kChannels; i += 8) {
      const int channel = first + i < head_dim ? first + i : 0;
      uint32_t least[4];
      load_words(ranges + channel * static_cast<int>(sizeof(T)), least);
      ptx::mma_16x8x16<T>(low, least, query.plain[i / 2], query.plain[i / 2 + 2]);
      ptx::mma_16x8x16<T>(high, least, query.plain[i / 2 + 1], query.plain[i / 2 + 3]);
    }
    const int holder = group_of_sums * 4 * Config::kRows + quad;
    bases[0] = __shfl_sync(~0u, low[0] + high[2], holder);
    bases[1] = __shfl_sync(~0u, low[1] + high[3], holder);
  } else {
    float base = 0.0f;
#pragma unroll
    for (int i = 0; i < Config::kChannels; i += 8) {
      const int channel = first + i < head_dim ? first + i : 0;
      float least[8];
      load_eight(reinterpret_cast<const T*>(ranges) + channel, least);
#pragma unroll
      for (int d = 0; d < 8; ++d) base = fmaf(__uint_as_float(query.plain[i + d]), least[d], base);
    }
    base = quad_sum(base);
    bases[0] = __shfl_sync(~0u, base, 2 * quad * 4);
    bases[1] = __shfl_sync(~0u, base, (2 * quad + 1) * 4);
  }
}

}  // namespace sparse_attn::cuda
