// The copies of gather.h: a thread has 16 bytes of a row, zeros where the row does not exist.
#include "../common/key_rows.cuh"
#include "../common/launch.cuh"
#include "gather.h"
#include "tools.h"

namespace sparse_attn::cuda {
namespace {

constexpr int kGatherThreads = 256;
constexpr int32_t kGatheredRows = 16;  // lengths are multiples of it: strides of squares divide it
constexpr int32_t kCodesOfChunk = kChunkBytes / 2;  // that become 16 bytes

/// The numbers of a gathered selection, which its parameters read.
struct LengthTables {
  int32_t *rows, *keys, *offsets;
};

__global__ void __launch_bounds__(kGatherThreads)
    find_lengths(const Sequences sequences, int32_t first, int32_t count, LengthTables tables) {
  const int32_t b = static_cast<int32_t>(blockIdx.x * kGatherThreads + threadIdx.x);
  if (b >= count) return;
  const Sequence sequence = sequences.of(first + b);
  tables.rows[b] = sequence.rows;
  tables.keys[b] = sequence.keys;
  tables.offsets[b] = sequence.offset;
}

/// Eight numbers times a scale, rounded.
template <typename T>
__device__ __forceinline__ uint4 scaled(uint4 numbers, float scale) {
  auto pair = [scale](uint32_t both) {
    const float2 two = unpack<T>(both);
    return pack<T>(two.x * scale, two.y * scale);
  };
  return {pair(numbers.x), pair(numbers.y), pair(numbers.z), pair(numbers.w)};
}

/// Eight codes as numbers of a type of 16 bits, scaled.
__device__ __forceinline__ uint4 dequantized(uint2 codes, Dtype dtype, float scale) {
  if (dtype == Dtype::kFloat16) return scaled<__half>(widen<__half>(codes), scale);
  return scaled<__nv_bfloat16>(widen<__nv_bfloat16>(codes), scale);
}

/// Copies queries or keys to `to`, [count, heads, length, D].
template <bool kKeys>
__global__ void __launch_bounds__(kGatherThreads)
    gather_rows(const SelectParams params, int32_t first, const SelectParams entries,
                int32_t length, bool aligned, uint4* to) {
  const int32_t element = size_of(params.problem.dtype);
  const int32_t chunks = params.problem.head_dim * element / kChunkBytes;
  const int32_t heads = kKeys ? params.problem.heads_kv : params.problem.heads_q;
  const int64_t all = int64_t{entries.problem.batch} * heads * length * chunks;
  for (int64_t at = blockIdx.x * int64_t{kGatherThreads} + threadIdx.x; at < all;
       at += int64_t{gridDim.x} * kGatherThreads) {
    const int32_t chunk = static_cast<int32_t>(at % chunks);
    const int32_t i = static_cast<int32_t>(at / chunks % length);
    const int64_t b = at / chunks / length / heads, head = at / chunks / length % heads;
    uint4 bits = {0, 0, 0, 0};
    if (i < (kKeys ? entries.num_keys(b) : entries.rows(b))) {
      const Sequence sequence = params.sequences.of(first + b);
      const TensorView& view = kKeys ? params.keys.key : params.query;
      const int64_t place = kKeys ? params.keys.locate(view, sequence, first + b, head, i)
                                  : (first + b) * view.stride_b + head * view.stride_h +
                                        (int64_t{sequence.first_row} + i) * view.stride_s;
      const auto* data = static_cast<const char*>(view.data);
      if (kKeys && params.keys.dtype == Dtype::kFloat8) {
        const auto* from = reinterpret_cast<const uint8_t*>(data + place + chunk * kCodesOfChunk);
        const uint2 codes = aligned ? *reinterpret_cast<const uint2*>(from) : bytes_at(from);
        bits = dequantized(codes, params.problem.dtype, params.keys.key_scale.at(first + b, head));
      } else {
        const auto* from =
            reinterpret_cast<const uint16_t*>(data + place * element + chunk * kChunkBytes);
        bits = aligned ? *reinterpret_cast<const uint4*>(from) : load_unaligned(from);
      }
    }
    to[at] = bits;
  }
}

template <bool kKeys>
void launch_rows(const SelectParams& params, int32_t first, const SelectParams& entries) {
  const TensorView& to = kKeys ? entries.keys.key : entries.query;
  const TensorView& from = kKeys ? params.keys.key : params.query;
  const int32_t element = size_of(params.problem.dtype);
  const int64_t chunks = entries.problem.batch * to.stride_b * element / kChunkBytes;
  const bool codes = kKeys && params.keys.dtype == Dtype::kFloat8;
  const bool aligned =
      codes ? begins_at(kCodesOfChunk, from, 1) : begins_at(kChunkBytes, from, element);
  gather_rows<kKeys>
      <<<grid_for(chunks, kGatherThreads), kGatherThreads, 0, to_stream(params.stream)>>>(
          params, first, entries, static_cast<int32_t>(to.stride_h / to.stride_s), aligned,
          static_cast<uint4*>(to.data));
}

/// Whether the walks need lengths and offsets of each entry, and rows that begin with it.
bool needs_tables(const SelectParams& params) {
  if (!params.rows_grow()) return false;
  if (params.selector == Selector::kSketch) return params.sequences.first_rows != nullptr;
  if (!params.sequences.same_lengths() || params.keys.paged()) return true;
  // Where the last squares end only the device knows, or no square is whole.
  return params.selector == Selector::kAntidiagonal &&
         (params.sequences.query_offsets != nullptr || params.problem.seq_q < params.stride ||
          params.num_keys(0) < params.stride);
}

}  // namespace

bool is_gathered(const SelectParams& params) {
  return needs_tables(params) || params.reads_codes();
}

SelectParams gathered_entries(const SelectParams& params, int32_t first, int32_t count,
                              Arena* arena) {
  SelectParams entries = params;
  auto take = [&](TensorView* view, int32_t heads, int32_t length) {
    const int64_t head =
        int64_t{ceil_div(length, kGatheredRows) * kGatheredRows} * params.problem.head_dim;
    *view = {arena->take<char>(count * heads * head * size_of(params.problem.dtype)), heads * head,
             head, params.problem.head_dim};
  };
  const bool tables = needs_tables(params);
  if (tables && params.selector != Selector::kScores) {
    take(&entries.query, params.problem.heads_q, params.problem.seq_q);
  }
  if (params.reads_keys()) {
    take(&entries.keys.key, params.problem.heads_kv, params.problem.seq_kv);
    entries.keys.dtype = params.problem.dtype;
    entries.keys.table = nullptr;
  } else if (params.keys.paged()) {
    entries.keys.table += first * params.keys.table_stride;
  }
  entries.problem.batch = count;
  Sequences& own = entries.sequences;
  own = {params.problem.seq_q, params.problem.seq_kv};
  auto from_first = [first](const int32_t* numbers) {
    return numbers == nullptr ? nullptr : numbers + first;
  };
  if (tables) {
    entries.used_rows = arena->take<int32_t>(count);
    own.used_keys = arena->take<int32_t>(count);
    own.query_offsets = arena->take<int32_t>(count);
  } else {
    const int64_t skipped = first * params.query.stride_b * size_of(params.problem.dtype);
    entries.query.data = static_cast<char*>(params.query.data) + skipped;
    own.used_keys = from_first(params.sequences.used_keys);
    own.query_offset = params.sequences.query_offset;
    own.query_offsets = from_first(params.sequences.query_offsets);
  }
  own.key_origins = from_first(params.sequences.key_origins);
  if (params.scores.bounds.data != nullptr) {
    entries.scores.bounds.data += first * params.scores.bounds.stride_b;
  }
  if (params.given.data != nullptr) entries.given.data += first * params.given.stride_b;
  const int64_t lists = int64_t{first} * params.lists() * params.num_q;
  entries.counts += lists;
  entries.indices += lists * params.num_kv;
  return entries;
}

Status gather_entries(const SelectParams& params, int32_t first, const SelectParams& entries) {
  if (needs_tables(params)) {
    const LengthTables tables = {const_cast<int32_t*>(entries.used_rows),
                                 const_cast<int32_t*>(entries.sequences.used_keys),
                                 const_cast<int32_t*>(entries.sequences.query_offsets)};
    find_lengths<<<ceil_div(entries.problem.batch, kGatherThreads), kGatherThreads, 0,
                   to_stream(params.stream)>>>(params.sequences, first, entries.problem.batch,
                                               tables);
    if (params.selector != Selector::kScores) launch_rows<false>(params, first, entries);
  }
  if (params.reads_keys()) launch_rows<true>(params, first, entries);
  return launched();
}

}  // namespace sparse_attn::cuda
