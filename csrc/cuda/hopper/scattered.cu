// Lists the global keys in one launch and gathers rows in another, a warp a row. Of a batch entry
// the global queries are those whose positions are listed: neighbours in the list.
#include <cstdint>

#include "../../arena.h"
#include "../../call_features.h"
#include "../common/launch.cuh"
#include "../select/global_tokens.h"
#include "config.h"
#include "scattered.h"

namespace sparse_attn::cuda::hopper {
namespace {

constexpr int kGatherThreads = 256;
constexpr int kChunk = 8;  // elements that a lane copies; a warp copies the largest head dim

/// A row of a [batch, heads, rows] tensor.
struct RowPlace {
  int32_t batch, head, row;
};

__device__ __forceinline__ RowPlace place_of(int64_t number, int32_t heads, int32_t rows) {
  const int64_t head = number / rows;
  return {static_cast<int32_t>(head / heads), static_cast<int32_t>(head % heads),
          static_cast<int32_t>(number - head * rows)};
}

/// Copies a row of `columns` elements, or writes zeros.
__device__ __forceinline__ void copy_row(const TensorView& from, int32_t row, const TensorView& to,
                                         RowPlace place, int32_t columns, bool exists) {
  const int32_t column = static_cast<int32_t>(threadIdx.x) % kWarp * kChunk;
  if (column >= columns) return;
  auto chunk = [&](const TensorView& tensor, int32_t r) {
    return reinterpret_cast<uint4*>(static_cast<uint16_t*>(tensor.data) +
                                    place.batch * tensor.stride_b + place.head * tensor.stride_h +
                                    r * tensor.stride_s + column);
  };
  *chunk(to, place.row) = exists ? *chunk(from, row) : uint4{};
}

/// Key and value of an entry of the list. Keys past its end, and those that do not exist, are
/// zeros.
__device__ __forceinline__ void gather_key(const AttentionParams& params,
                                           const AttentionParams& columns, RowPlace to) {
  const Pattern& pattern = columns.pattern;
  const int32_t key = to.row < *pattern.num_lead_keys ? pattern.lead_keys[to.row] : kUnlimited;
  const bool exists = key < params.num_keys(params.sequences.of(to.batch));
  copy_row(params.keys.key, key, columns.keys.lead_key, to, params.problem.head_dim, exists);
  copy_row(params.keys.value, key, columns.keys.lead_value, to, params.problem.value_dim, exists);
}

/// A global query, the keys that it sees, and its row in the output. Where fewer queries are global
/// than there is room for, the rest are copies of the last one, which go nowhere.
__device__ __forceinline__ void gather_query(const AttentionParams& params, const Pattern& globals,
                                             const AttentionParams& rows, RowPlace to) {
  const Sequence sequence = params.sequences.of(to.batch);
  const Lead list = make_lead(globals, 0, sequence.keys);
  const Interval own = list.inside(globals, {sequence.offset, sequence.offset + sequence.rows});
  const int32_t entry = imin(own.begin + to.row, own.end - 1);
  const int32_t p = own.empty() ? 0 : list.at(globals, entry);
  const int32_t i = own.empty() ? 0 : p - sequence.offset;
  copy_row(params.query, i, rows.query, to, params.problem.head_dim, !own.empty());
  if (threadIdx.x % kWarp != 0) return;
  const int32_t keys = params.problem.seq_kv;
  Interval seen = params.scores.bounds.row(to.batch, to.head, i, keys);
  seen.end = end_of_keys(params.pattern.causal, p, seen.end);
  if (own.empty()) seen = {};
  const BoundsView& bounds = rows.scores.bounds;
  auto* side = const_cast<int32_t*>(bounds.data) + to.batch * bounds.stride_b +
               to.head * bounds.stride_h + to.row * bounds.stride_q;
  side[0] = seen.begin;
  side[1] = seen.end;
  if (to.head > 0) return;
  const bool exists = own.begin + to.row < own.end;
  const_cast<int32_t*>(rows.outputs.rows)[to.batch * rows.problem.seq_q + to.row] = exists ? i : -1;
}

__global__ void __launch_bounds__(kGatherThreads)
    gather_kernel(const __grid_constant__ AttentionParams params,
                  const __grid_constant__ ScatteredCalls calls) {
  const Problem& p = params.problem;
  const int32_t listed = calls.columns.pattern.lead.length;
  const int64_t keys = int64_t{p.batch} * p.heads_kv * listed;
  const int64_t queries = int64_t{p.batch} * p.heads_q * calls.rows.problem.seq_q;
  const int64_t step = int64_t{gridDim.x} * (kGatherThreads / kWarp);
  for (int64_t at = blockIdx.x * int64_t{kGatherThreads / kWarp} + threadIdx.x / kWarp;
       at < keys + queries; at += step) {
    if (at < keys) {
      gather_key(params, calls.columns, place_of(at, p.heads_kv, listed));
    } else {
      gather_query(params, calls.globals, calls.rows,
                   place_of(at - keys, p.heads_q, calls.rows.problem.seq_q));
    }
  }
}

/// Where the gathered tensors lie, in bytes from the start of the workspace.
struct Layout {
  int64_t columns, key, value, query, bounds, rows, end;
  int32_t globals, listed, queries;  // global keys, those and sinks, global queries, at most

  explicit Layout(const AttentionParams& params) {
    const Problem& p = params.problem;
    globals = imin(params.num_global_tokens, p.seq_kv);
    listed = imin(globals + params.pattern.most_lead(p.seq_kv), p.seq_kv);
    queries = imin(globals, p.seq_q);
    const int64_t key_rows = int64_t{p.batch} * p.heads_kv * listed;
    const int64_t query_rows = int64_t{p.batch} * p.heads_q * queries;
    const int64_t element = size_of(p.dtype), number = sizeof(int32_t);
    const int64_t marks = global_token_bytes(params, 1);
    Arena arena(nullptr);
    auto place = [&](int64_t bytes) {
      const int64_t at = arena.used();
      arena.take<char>(bytes);
      return at;
    };
    const int64_t globals_alone = place(marks);
    columns = params.pattern.has_lead() ? place(marks) : globals_alone;
    key = place(key_rows * p.head_dim * element);
    value = place(key_rows * p.value_dim * element);
    query = place(query_rows * p.head_dim * element);
    bounds = place(query_rows * 2 * number);
    rows = place(int64_t{p.batch} * queries * number);
    end = arena.used();
  }
};

/// A contiguous [batch, heads, rows, columns] tensor.
TensorView contiguous(char* memory, int64_t heads, int64_t rows, int64_t columns) {
  return {memory, heads * rows * columns, rows * columns, columns};
}

}  // namespace

int64_t scattered_bytes(const AttentionParams& params) { return Layout(params).end; }

ScatteredCalls scattered_calls(const AttentionParams& params) {
  const Layout layout(params);
  const Problem& problem = params.problem;
  AttentionParams plain = params;
  plain.global_tokens = nullptr;
  plain.num_global_tokens = 0;
  auto at = [&](int64_t bytes) {
    return reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(params.workspace) + bytes);
  };
  plain.workspace = at(layout.end);

  ScatteredCalls calls = {plain, plain, {}};
  AttentionParams& columns = calls.columns;
  auto list_keys = [&](int64_t bytes, int32_t most, Pattern* pattern) {
    Pattern marked;
    attach_global_tokens(params, at(bytes), &marked);
    pattern->lead = {0, 1, most};
    pattern->lead_keys = marked.global_tiles;
    pattern->num_lead_keys = marked.num_global_tiles;
  };
  list_keys(0, layout.globals, &calls.globals);
  list_keys(layout.columns, layout.listed, &columns.pattern);
  columns.keys.lead_key =
      contiguous(at(layout.key), problem.heads_kv, layout.listed, problem.head_dim);
  columns.keys.lead_value =
      contiguous(at(layout.value), problem.heads_kv, layout.listed, problem.value_dim);
  columns.features = features_of(columns).with(Features::of(Feature::kGlobalIndices));

  AttentionParams& rows = calls.rows;
  rows.problem.seq_q = layout.queries;
  rows.sequences = {};
  rows.sequences.rows = layout.queries;
  rows.sequences.keys = params.sequences.keys;
  rows.query = contiguous(at(layout.query), problem.heads_q, layout.queries, problem.head_dim);
  rows.scores.bounds = {reinterpret_cast<int32_t*>(at(layout.bounds)),
                        int64_t{2} * problem.heads_q * layout.queries, int64_t{2} * layout.queries,
                        2, 1};
  rows.outputs.rows = reinterpret_cast<int32_t*>(at(layout.rows));
  rows.pattern = {};
  rows.features = features_of(rows);
  return calls;
}

Status gather_globals(const AttentionParams& params, const ScatteredCalls& calls) {
  AttentionParams marked = params;
  char* memory = static_cast<char*>(params.workspace);
  const int64_t columns = Layout(params).columns;
  Status status = mark_global_tokens(&marked, 1, memory);
  if (status.ok() && columns > 0) {
    status = mark_global_tokens(&marked, 1, memory + columns, params.pattern.lead.length);
  }
  if (!status.ok()) return status;
  const Problem& p = params.problem;
  const int64_t rows = int64_t{p.batch} * (int64_t{p.heads_kv} * calls.columns.pattern.lead.length +
                                           int64_t{p.heads_q} * calls.rows.problem.seq_q);
  gather_kernel<<<grid_for(rows * kWarp, kGatherThreads), kGatherThreads, 0,
                  to_stream(params.stream)>>>(params, calls);
  return launched();
}

}  // namespace sparse_attn::cuda::hopper
