// Thread blocks share the keys of a key head; a thread has a column of eight elements, and several
// rows of it in flight. Rows that no query's window reaches are left out.
#include "../common/key_rows.cuh"
#include "../common/launch.cuh"
#include "lay_out.h"

namespace sparse_attn::cuda::hopper {
namespace {

constexpr int64_t kBlocks = 2048;  // fill a device
constexpr int kLayOutThreads = 256;
constexpr int32_t kTurn = 128;      // rows that a thread block takes at a time
constexpr int32_t kMostTile = 128;  // keys of the attention kernel's tiles, which it reads whole

/// A column of eight elements as it is stored, and as numbers of T.
template <typename T, bool kFloat8>
struct Column {
  using Stored = uint2;
  __device__ __forceinline__ static uint4 numbers(uint2 codes) { return widen<T>(codes); }
};
template <typename T>
struct Column<T, false> {
  using Stored = uint4;
  __device__ __forceinline__ static uint4 numbers(uint4 stored) { return stored; }
};
constexpr int kColumn = 8;

/// The rows of a key head that are laid out: leading ones, and those of windows.
struct NeededRows {
  Interval lead, main;
};

/// Those of a sequence that some query may see, and what lies in one tile with them.
__device__ __forceinline__ NeededRows needed_rows(const AttentionParams& params,
                                                  const Sequence& sequence) {
  const Pattern& pattern = params.pattern;
  const Interval all = {0, params.num_keys(sequence)};
  constexpr Features kWindowsAndSinks =
      kWindowsAlone.without(Features::of(Feature::kDilation)).with(Features::of(Feature::kLead));
  if (!params.features.within(kWindowsAndSinks)) return {{}, all};
  const int32_t lead = pattern.has_lead() ? pattern.lead.offset + pattern.lead.length : 0;
  NeededRows needed;
  if (lead > 0) needed.lead = intersect(all, {0, lead + kMostTile});
  needed.main =
      reached_keys(pattern, {sequence.offset, sequence.offset + sequence.rows}, all.end, kMostTile);
  needed.main.begin = imax(needed.main.begin, needed.lead.end);
  return needed;
}

/// Lays out rows of one key head, of keys or of values.
template <typename T, bool kFloat8>
__device__ __forceinline__ void lay_out_rows(const KeySource& keys, const TensorView& from,
                                             const Sequence& sequence, int32_t batch, int32_t head,
                                             Interval rows, int32_t columns, const TensorView& to) {
  using Of = Column<T, kFloat8>;
  using Stored = typename Of::Stored;
  constexpr int kAhead = 4;  // rows in flight
  const int32_t thread = static_cast<int32_t>(threadIdx.x), in_row = columns / kColumn;
  const int32_t step = kLayOutThreads / in_row, column = thread % in_row;
  if (thread >= step * in_row) return;
  const auto* stored = static_cast<const Stored*>(from.data) + column;
  T* numbers = static_cast<T*>(to.data) + batch * to.stride_b + head * to.stride_h;
  for (int32_t j = rows.begin + thread / in_row; j < rows.end; j += kAhead * step) {
    Stored ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int32_t row = imin(j + i * step, rows.end - 1);
      ahead[i] = __ldcs(stored + keys.locate(from, sequence, batch, head, row) / kColumn);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int32_t row = j + i * step;
      if (row >= rows.end) break;
      *reinterpret_cast<uint4*>(numbers + row * to.stride_s + column * kColumn) =
          Of::numbers(ahead[i]);
    }
  }
}

/// `of_head` thread blocks take turns at the rows of a key head of a batch entry.
template <typename T, bool kFloat8>
__global__ void __launch_bounds__(kLayOutThreads)
    lay_out_kernel(const __grid_constant__ AttentionParams params, const TensorView key,
                   const TensorView value, int32_t of_head) {
  const auto number = static_cast<int32_t>(blockIdx.x) / of_head;
  const int32_t turn = static_cast<int32_t>(blockIdx.x) - number * of_head;
  const int32_t batch = number / params.problem.heads_kv;
  const int32_t head = number - batch * params.problem.heads_kv;
  NeededRows needed;
  Sequence sequence;
  if (params.sequences.first_keys != nullptr) {  // all sequences are one
    needed.main = {0, params.sequences.packed_keys};
  } else {
    sequence = params.sequences.of(batch);
    needed = needed_rows(params, sequence);
  }
  for (const Interval& run : {needed.lead, needed.main}) {
    for (int32_t first = run.begin + turn * kTurn; first < run.end; first += of_head * kTurn) {
      const Interval rows = {first, imin(first + kTurn, run.end)};
      lay_out_rows<T, kFloat8>(params.keys, params.keys.key, sequence, batch, head, rows,
                               params.problem.head_dim, key);
      lay_out_rows<T, kFloat8>(params.keys, params.keys.value, sequence, batch, head, rows,
                               params.problem.value_dim, value);
    }
  }
}

}  // namespace

Status lay_out_keys(const AttentionParams& part, const AttentionParams& to) {
  const Problem& p = part.problem;
  const bool packed = part.sequences.first_keys != nullptr;
  const int32_t rows = packed ? part.sequences.packed_keys : p.seq_kv;
  const int64_t heads = int64_t{p.heads_kv} * (packed ? 1 : p.batch);
  const int64_t turns = ceil_div(rows, kTurn), share = ceil_div64(kBlocks, heads);
  const auto of_head = static_cast<int32_t>(turns < share ? turns : share);
  const bool half = p.dtype == Dtype::kFloat16, float8 = part.keys.dtype == Dtype::kFloat8;
  auto* kernel = half ? lay_out_kernel<__half, true> : lay_out_kernel<__nv_bfloat16, true>;
  if (!float8) kernel = half ? lay_out_kernel<__half, false> : lay_out_kernel<__nv_bfloat16, false>;
  kernel<<<static_cast<uint32_t>(heads * of_head), kLayOutThreads, 0, to_stream(part.stream)>>>(
      part, to.keys.key, to.keys.value, of_head);
  return launched();
}

}  // namespace sparse_attn::cuda::hopper
