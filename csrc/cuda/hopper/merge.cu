// The merge of chunks: a thread block takes 32 columns of a strip, and a thread the four results
// that a thread of the kernel left in each chunk. Launched as a dependent of that kernel, which
// hides its launch under that one's end.
#include <algorithm>

#include "../common/launch.cuh"
#include "../common/ptx/cp_async.cuh"
#include "../common/ptx/grid.cuh"
#include "../common/types.cuh"
#include "key_split.h"
#include "partials.cuh"
#include "softmax.cuh"

namespace sparse_attn::cuda::hopper {
namespace {

constexpr int kLanes = 32;
constexpr int kMergeThreads = 128;
constexpr int kColumns = kMergeThreads / kLanes * 8;  // of a thread block

/// What the merge needs of a call: a launch's parameters are fetched on demand.
struct Call {
  Outputs outputs;
  Sequences sequences;
  const float* sink_logits;
  ScaleView value_scale;
  int32_t heads_q, group, value_dim, dilation, classes;
};

/// The row of the tensors of a strip's row; -1 for none.
__device__ __forceinline__ int32_t tensor_row(const Call& call, const Sequence& sequence,
                                              int32_t batch, int32_t query) {
  if (query >= sequence.rows) return -1;
  if (call.outputs.rows != nullptr) query = call.outputs.rows[batch * sequence.rows + query];
  return query < 0 ? -1 : sequence.first_row + query;
}

/// How a chunk joins the sum before it, and its l, for a row.
struct alignas(16) Factor {
  Join join;
  float l;
};

/// What is summed of a row: l and two columns of its output.
struct ColumnPair {
  float l, even, odd;

  __device__ __forceinline__ void add(const Join& join, const ColumnPair& chunk) {
    l = join.sum(l, chunk.l);
    even = join.sum(even, chunk.even);
    odd = join.sum(odd, chunk.odd);
  }
};

/// A strip of the results of a query head.
struct Strip {
  int32_t batch, head;
  int32_t first, class_idx;  // row 0 of its class
};

/// What a thread reads of a strip's chunks: its own results, from a chunk to the next so many
/// further on, and the rows' states.
struct Parts {
  const float4* out;
  const float2* states;
  int32_t out_step, state_step;
};

/// A thread block's memory, for the most chunks that there may be: blocks that took less would
/// crowd the multiprocessors that are free first.
struct Memory {
  float4 parts[kMostChunks][kMergeThreads];
  Factor factors[kMostChunks][kStripRows];
  float maxima[kMostChunks / kLeastGroup][kStripRows];  // of groups
};

/// Copies this thread's results of `chunks` chunks to shared memory.
__device__ __forceinline__ void fetch_parts(Memory& memory, const Parts& parts, int32_t chunks) {
  const float4* from = parts.out;
  uint32_t to = ptx::shared_address(&memory.parts[0][threadIdx.x]);
#pragma unroll 1
  for (int32_t c = 0; c < chunks; ++c) {
    ptx::cp_async_16(to, from, true);
    to += sizeof(memory.parts[0]);
    from += parts.out_step;
  }
  ptx::cp_async_commit();
}

/// Joins the chunks of a strip, in groups of so many, and stores its rows; `i` are 8 columns, of
/// which this thread has two in two rows. Short loops: each byte of code is fetched for the first
/// time.
template <typename T>
__device__ __forceinline__ void join_parts(const Call& call, Memory& memory, const Parts& parts,
                                           int32_t chunks, int32_t group, const Sequence& sequence,
                                           const Strip& strip, int32_t i) {
  const int32_t lane = threadIdx.x % kLanes;
  const bool exists = i * 8 < call.value_dim;
  // Half a warp finds the factors of two rows, a lane those of a chunk: the last one comes first.
  constexpr int kRows = 2, kNext = kMergeThreads / kMostChunks;
  static_assert(kRows * kNext == kStripRows);
  const auto row = static_cast<int32_t>(threadIdx.x) / kMostChunks;
  const int32_t own = threadIdx.x % kMostChunks, in_group = own & (group - 1);
  float2 states[kRows];  // read side by side
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    states[r] = {-INFINITY, 0.0f};
    if (own < chunks) states[r] = __ldcg(parts.states + own * parts.state_step + row + r * kNext);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float l = states[r].y, m = l == 0.0f ? -INFINITY : states[r].x;
    float top = m;  // of the chunks of the group from this one on
#pragma unroll
    for (int step = 1; step < kMostChunks; step *= 2) {
      const float later = __shfl_down_sync(~0u, top, step, kMostChunks);
      if (in_group + step < group) top = fmaxf(top, later);
    }
    const float before = __shfl_down_sync(~0u, top, 1, kMostChunks);
    memory.factors[own][row + r * kNext] = {
        Join::of(in_group == group - 1 ? -INFINITY : before, m, l), l};
    if (in_group == 0) memory.maxima[own / kLeastGroup][row + r * kNext] = top;
  }
  ptx::cp_async_wait<0>();
  __syncthreads();

  float m[2] = {-INFINITY, -INFINITY};
  ColumnPair all[2] = {};
#pragma unroll 1
  for (int32_t first = (chunks - 1) & -group; first >= 0; first -= group) {
    ColumnPair own[2] = {};
#pragma unroll 2
    for (int32_t c = imin(first + group, chunks) - 1; c >= first; --c) {
      const float4 part = memory.parts[c][threadIdx.x];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Factor factor = memory.factors[c][lane / 4 + 8 * r];
        own[r].add(factor.join, {factor.l, r == 0 ? part.x : part.z, r == 0 ? part.y : part.w});
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Join join =
          Join::of(m[r], memory.maxima[first / kLeastGroup][lane / 4 + 8 * r], own[r].l);
      m[r] = join.m;
      all[r].add(join, own[r]);
    }
  }

  const Outputs& out = call.outputs;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int32_t in_strip = lane / 4 + 8 * r;
    const int32_t row = tensor_row(call, sequence, strip.batch,
                                   strip.class_idx + (strip.first + in_strip) * call.dilation);
    if (row < 0) continue;
    if (out.lse != nullptr && i == 0 && lane % 4 == 0) {
      out.lse[strip.batch * out.lse_stride_b + strip.head * out.lse_stride_h +
              row * out.lse_stride_s] = log_sum(m[r], all[r].l);
    }
    if (!exists) continue;
    float inverse = inverse_of(m[r], all[r].l, call.sink_logits, strip.head);
    if (call.value_scale.data != nullptr) {
      inverse *= call.value_scale.at(strip.batch, strip.head / call.group);
    }
    T* to = static_cast<T*>(out.out.data) + strip.batch * out.out.stride_b +
            strip.head * out.out.stride_h + row * out.out.stride_s + i * 8 + lane % 4 * 2;
    *reinterpret_cast<uint32_t*>(to) = pack<T>(all[r].even * inverse, all[r].odd * inverse);
  }
}

template <typename T>
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const __grid_constant__ Call call, const __grid_constant__ Partials partials) {
  __shared__ Memory memory;
  const int32_t column_blocks = ceil_div(call.value_dim, kColumns);
  const int32_t number = static_cast<int32_t>(blockIdx.x) / column_blocks;
  const int32_t column_block = static_cast<int32_t>(blockIdx.x) - number * column_blocks;
  const int32_t i = column_block * (kColumns / 8) + threadIdx.x / kLanes;
  const int32_t problem = number / partials.strips;
  Strip strip;
  strip.class_idx = problem % call.classes;
  const int32_t head_index = partials.first_head + problem / call.classes;
  strip.batch = head_index / call.heads_q;
  strip.head = head_index - strip.batch * call.heads_q;
  const Parts parts = {
      partials.out_at(partials.at(number, 0), i * 8 < call.value_dim ? i : 0, threadIdx.x % kLanes),
      partials.state + partials.at(number, 0) * kStripRows, partials.columns / 8 * kLanes,
      kStripRows};
  ptx::wait_for_primary();
  ptx::launch_dependents();
  const Sequence sequence = call.sequences.of(strip.batch);
  strip.first = partials.first_query(sequence.origin, sequence.offset) +
                (number - problem * partials.strips) * kStripRows;
  if (strip.class_idx + strip.first * call.dilation >= sequence.rows) return;  // of no query
  fetch_parts(memory, parts, partials.max_chunks);
  const auto count = Partials::StoredChunks::of(__ldcg(partials.counts + number));
  join_parts<T>(call, memory, parts, count.number, count.group(), sequence, strip, i);
}

/// The same of the pieces of a deal, as many as the device knows of.
template <typename T>
__global__ void __launch_bounds__(kMergeThreads)
    merge_pieces_kernel(const __grid_constant__ Call call,
                        const __grid_constant__ Partials partials,
                        const __grid_constant__ Deal deal,
                        const __grid_constant__ HeadPacking packing) {
  __shared__ Memory memory;
  const int32_t column_blocks = ceil_div(call.value_dim, kColumns);
  const int32_t packs = ceil_div(call.group, packing.heads);
  const int32_t of_tile = deal.strips * column_blocks;
  const int32_t of_piece = of_tile * deal.by_width.divisor;
  ptx::wait_for_primary();
  ptx::launch_dependents();
  const int32_t items = __ldcg(deal.counts + 1) * of_piece;
  for (auto item = static_cast<int32_t>(blockIdx.x); item < items; item += gridDim.x) {
    const int32_t at = item / of_piece, in_piece = (item - at * of_piece) / of_tile;
    const int32_t in_tile = item % of_tile;
    const int32_t strip_idx = in_tile / column_blocks;
    const int32_t i = in_tile % column_blocks * (kColumns / 8) + threadIdx.x / kLanes;
    const auto* from = reinterpret_cast<const int4*>(deal.merged + at);
    const int4 whole = __ldcg(from), part = __ldcg(from + 1);  // a Piece
    const int32_t pieces = part.w;
    const int32_t group = in_piece / packs, pack = in_piece - group * packs;
    const int32_t row = strip_idx * kStripRows;
    const int32_t in_group = pack * packing.heads + packing.head(row);
    const int32_t problem = whole.x + group * call.group + in_group;
    Strip strip = {problem / call.heads_q, 0, 0, 0};
    strip.head = problem - strip.batch * call.heads_q;
    strip.first = whole.y * deal.strips * kStripRows + packing.row(row);
    if (in_group >= call.group) continue;  // of no head
    const int64_t first = (int64_t{part.z} + in_piece * pieces) * deal.strips + strip_idx;
    const Parts parts = {
        partials.out_at(first, i * 8 < call.value_dim ? i : 0, threadIdx.x % kLanes),
        partials.state + first * kStripRows, deal.strips * partials.columns / 8 * kLanes,
        deal.strips * kStripRows};
    fetch_parts(memory, parts, pieces);
    const Sequence sequence = call.sequences.of(strip.batch);
    if (strip.first < sequence.rows) {
      join_parts<T>(call, memory, parts, pieces, group_of(whole.w, partials.columns), sequence,
                    strip, i);
    }
    ptx::cp_async_wait<0>();
    __syncthreads();  // before the memory is written again
  }
}

Call call_of(const AttentionParams& params) {
  const Problem& problem = params.problem;
  return {params.outputs,          params.sequences,        params.scores.sink_logits,
          params.keys.value_scale, problem.heads_q,         problem.group(),
          problem.value_dim,       params.pattern.dilation, params.pattern.classes(problem.seq_q)};
}

}  // namespace

Status merge_chunks(const AttentionParams& params, const Partials& partials) {
  const Problem& problem = params.problem;
  const Call call = call_of(params);
  const int64_t strips = int64_t{partials.heads} * call.classes * partials.strips;
  const LaunchShape shape = {static_cast<uint32_t>(strips * ceil_div(problem.value_dim, kColumns)),
                             kMergeThreads, 0, to_stream(params.stream)};
  const bool half = problem.dtype == Dtype::kFloat16;
  return launch_dependent(half ? merge_kernel<__half> : merge_kernel<__nv_bfloat16>, shape, call,
                          partials);
}

Status merge_pieces(const AttentionParams& params, const Partials& partials, const Deal& deal,
                    const HeadPacking& packing, int32_t multiprocessors) {
  constexpr int32_t kResident = 6;  // thread blocks of a multiprocessor
  const Problem& problem = params.problem;
  const int64_t items = int64_t{deal.most_merged} * deal.by_width.divisor * deal.strips *
                        ceil_div(problem.value_dim, kColumns);
  const int64_t blocks = std::min<int64_t>(items, int64_t{kResident} * multiprocessors);
  const LaunchShape shape = {static_cast<uint32_t>(blocks), kMergeThreads, 0,
                             to_stream(params.stream)};
  const bool half = problem.dtype == Dtype::kFloat16;
  return launch_dependent(half ? merge_pieces_kernel<__half> : merge_pieces_kernel<__nv_bfloat16>,
                          shape, call_of(params), partials, deal, packing);
}

}  // namespace sparse_attn::cuda::hopper
