// Groups of tokens as ranges and codes, a thread block each: (k - least) / (greatest - least) in
// steps, by channel. For keys of a call, tokens that are appended, and slots of a paged cache.
#include <type_traits>

#include "../../float8.h"
#include "../common/launch.cuh"
#include "../common/types.cuh"
#include "../select/hull.cuh"
#include "sketch.h"

namespace sparse_attn::cuda {
namespace {

constexpr int kEncodeThreads = 128;
constexpr int kGrowThreads = 128;
constexpr int kMostChannels = 256;

/// A group's ranges, in shared memory.
struct GroupRanges {
  float least[kMostChannels], greatest[kMostChannels];
};

/// A row of codes of 8 bits, as elements of T.
template <typename T>
struct DequantizedRow {
  const uint8_t* codes;
  float scale;

  __device__ __forceinline__ T operator[](int32_t d) const {
    return from_float<T>(float_from_float8(codes[d]) * scale);
  }
};

/// Sketches the tokens [first, end), all of one group; row_of(j) is token j's row.
template <typename T, typename RowOf>
__device__ void encode_group(const SketchView& sketch, int64_t entry, int64_t head, int32_t first,
                             int32_t end, const RowOf& row_of, GroupRanges& ranges) {
  T* target = static_cast<T*>(sketch.ranges) + sketch.ranges_at(entry, head, first);
  for (int32_t d = threadIdx.x; d < sketch.head_dim; d += kEncodeThreads) {
    float least = NAN, greatest = NAN;
    for (int32_t j = first; j < end; ++j) {
      const float x = to_float(row_of(j)[d]);
      least = fminf(least, x);  // of numbers
      greatest = fmaxf(greatest, x);
    }
    ranges.least[d] = least;
    ranges.greatest[d] = greatest;
    target[d] = from_float<T>(least);
    target[sketch.head_dim + d] = from_float<T>(greatest);
  }
  __syncthreads();
  const int32_t words = sketch.row_words(), per_word = sketch.codes_of_word();
  for (int32_t item = threadIdx.x; item < (end - first) * words; item += kEncodeThreads) {
    const int32_t j = first + item / words, begin = item % words * per_word;
    const auto row = row_of(j);
    uint32_t word = 0;
    for (int32_t d = begin; d < imin(begin + per_word, sketch.head_dim); ++d) {
      word |= sketch.code(to_float(row[d]), ranges.least[d], ranges.greatest[d])
              << sketch.bit_of(d - begin);
    }
    sketch.codes[sketch.codes_at(entry, head, j) + item % words] = word;
  }
}

template <typename T>
__global__ void __launch_bounds__(kEncodeThreads)
    encode_call(const SelectParams params, const SketchView sketch) {
  __shared__ GroupRanges ranges;
  __shared__ HullStorage storage;
  const int32_t groups = sketch.rows / sketch.group;
  const int64_t item = blockIdx.x / groups;
  const int64_t batch = item / params.problem.heads_kv, head = item % params.problem.heads_kv;
  const int32_t heads = params.scores.bounds.stride_h == 0 ? 1 : params.problem.heads_q;
  const Interval keys = hull_of_rows(params, batch, 0, heads, {0, params.rows(batch)}, storage);
  const int32_t begin = static_cast<int32_t>(blockIdx.x % groups) * sketch.group;
  const Interval own = intersect(keys, {begin, begin + sketch.group});
  if (own.empty()) return;
  const T* first = static_cast<const T*>(params.keys.key.data);
  auto row_of = [&](int32_t j) { return first + params.key_at(batch, head, j); };
  encode_group<T>(sketch, batch, head, own.begin, own.end, row_of, ranges);
  // Rows without a key are read with their group, and are worth nothing.
  uint32_t* codes = sketch.codes + sketch.codes_at(batch, head, begin);
  const int32_t words = sketch.row_words();
  for (int32_t at = threadIdx.x; at < sketch.group * words; at += kEncodeThreads) {
    if (!own.contains(begin + at / words)) codes[at] = 0;
  }
}

template <typename T>
__global__ void __launch_bounds__(kEncodeThreads)
    encode_appended(const SketchAppendParams params, int32_t groups) {
  __shared__ GroupRanges ranges;
  const SketchView& sketch = params.sketch;
  const int64_t item = blockIdx.x / groups;
  const int64_t batch = item / sketch.heads, head = item % sketch.heads;
  const Interval added = params.added(batch);
  const int32_t group = static_cast<int32_t>(blockIdx.x % groups);
  const int32_t first = (added.begin / kSketchGroup + group) * kSketchGroup;
  if (first >= added.end || added.empty()) return;

  T* open = static_cast<T*>(params.open_keys) + item * kSketchGroup * sketch.head_dim;
  const T* key = static_cast<const T*>(params.key.data) + batch * params.key.stride_b +
                 head * params.key.stride_h;
  auto row_of = [&](int32_t j) -> const T* {
    if (j < added.begin) return open + j % kSketchGroup * sketch.head_dim;
    return key + (j - added.begin) * params.key.stride_s;
  };
  encode_group<T>(sketch, batch, head, first, imin(first + kSketchGroup, added.end), row_of,
                  ranges);
  if (group > 0 || added.end % kSketchGroup == 0) return;
  // This thread block alone reads the open group, so it writes it too, once it has been read.
  __syncthreads();
  const int32_t kept = imax(added.end / kSketchGroup * kSketchGroup, added.begin);
  for (int32_t at = threadIdx.x; at < (added.end - kept) * sketch.head_dim; at += kEncodeThreads) {
    const int32_t j = kept + at / sketch.head_dim, d = at % sketch.head_dim;
    open[j % kSketchGroup * sketch.head_dim + d] = row_of(j)[d];
  }
}

__global__ void __launch_bounds__(kGrowThreads) grow_lengths(const SketchAppendParams params) {
  for (int32_t batch = threadIdx.x; batch < params.batch; batch += kGrowThreads) {
    params.lengths[batch] = params.added(batch).end;
  }
}

template <typename T, bool kFloat8>
__global__ void __launch_bounds__(kEncodeThreads) encode_pages(const SketchPagesParams params) {
  __shared__ GroupRanges ranges;
  const SketchView& sketch = params.sketch;
  const int64_t at = blockIdx.x / sketch.heads, head = blockIdx.x % sketch.heads;
  const int64_t slot = params.slots[at];
  if (!params.exists(slot)) return;
  // Mostly the next slot is of the same group, which spares looking at all of them.
  if (at + 1 < params.num_slots && !params.ends_group_beside(at, at + 1)) return;
  bool beaten = false;
  for (int64_t other = threadIdx.x; other < params.num_slots; other += kEncodeThreads) {
    beaten |= !params.ends_group_beside(at, other);
  }
  if (__syncthreads_or(beaten)) return;

  const int64_t page = slot / sketch.rows;
  const int32_t row = static_cast<int32_t>(slot % sketch.rows);
  const TensorView& cache = params.cache;
  using Element = std::conditional_t<kFloat8, uint8_t, T>;
  const Element* first =
      static_cast<const Element*>(cache.data) + page * cache.stride_b + head * cache.stride_h;
  const float scale = params.scale.at(0, head);
  auto row_of = [&](int32_t j) {
    const Element* own = first + j * cache.stride_s;
    if constexpr (kFloat8) {
      return DequantizedRow<T>{own, scale};
    } else {
      return own;
    }
  };
  encode_group<T>(sketch, page, head, row / sketch.group * sketch.group, row + 1, row_of, ranges);
  if (head == 0 && threadIdx.x == 0) {
    params.lengths[sketch.length_at(page, row)] = row % sketch.group + 1;
  }
}

}  // namespace

Status launch_call_sketch(const SelectParams& params, const SketchView& sketch) {
  const int64_t groups =
      int64_t{params.problem.batch} * params.problem.heads_kv * (sketch.rows / sketch.group);
  with_type(params.problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    encode_call<T><<<static_cast<uint32_t>(groups), kEncodeThreads, 0, to_stream(params.stream)>>>(
        params, sketch);
  });
  return launched();
}

Status append_to_sketch(const SketchAppendParams& params) {
  const int32_t groups = ceil_div(imin(params.tokens, params.sketch.rows), kSketchGroup) + 1;
  const int64_t blocks = int64_t{params.batch} * params.sketch.heads * groups;
  const cudaStream_t stream = to_stream(params.stream);
  with_type(params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    encode_appended<T>
        <<<static_cast<uint32_t>(blocks), kEncodeThreads, 0, stream>>>(params, groups);
  });
  grow_lengths<<<1, kGrowThreads, 0, stream>>>(params);
  return launched();
}

Status sketch_pages(const SketchPagesParams& params) {
  const int64_t blocks = params.num_slots * params.sketch.heads;
  with_type(params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    auto kernel = encode_pages<T, false>;
    if constexpr (sizeof(T) == 2) {
      if (params.float8) kernel = encode_pages<T, true>;
    }
    kernel<<<static_cast<uint32_t>(blocks), kEncodeThreads, 0, to_stream(params.stream)>>>(params);
  });
  return launched();
}

}  // namespace sparse_attn::cuda
