// A thread block's row tile: which query rows it packs, what they see, and the loads of its keys.
#pragma once

#include "../common/ptx/cp_async.cuh"
#include "config.cuh"
#include "groups.cuh"
#include "shares.cuh"
#include "walk.cuh"

namespace sparse_attn::cuda::decode {

/// The pattern of a call, with constants for what a kernel's kind leaves out: divisions, views.
template <Kind kKind>
__device__ __forceinline__ Pattern pattern_of(const AttentionParams& params) {
  Pattern pattern = params.pattern;
  pattern.global_bits = nullptr;
  pattern.lead_keys = nullptr;
  if constexpr (kKind != Kind::kStrided) {
    pattern.dilation = 1;
    pattern.lead = {0, 1, is_lean(kKind) ? 0 : pattern.lead.length};
  }
  if constexpr (is_lean(kKind)) {
    pattern.global_count = 0;
    if constexpr (kKind == Kind::kListed) {
      __builtin_assume(pattern.list.counts != nullptr);
      pattern.list.partial = nullptr;
      pattern.list.bits = nullptr;
    } else {
      pattern.list = {};
    }
  }
  return pattern;
}

/// Which packed rows a thread block computes, and which share of their chunks.
struct Work {
  int32_t batch = 0, key_head = 0;
  int32_t split = 0, splits = 0;  // of the thread blocks that share them; none: no work
  int32_t first_head = 0;         // query head of packed row 0
  int32_t first_row = 0;          // packed row of the tile's row 0
  int32_t rows = 0;               // of the tile; none where the class has no more
  int32_t chunk_steps = 1;
  int32_t list_row = 0;  // row of the block list
  Sequence sequence;
  Slice slice;
};

/// A row of the tile: where it stands, and what it sees.
struct TileRow {
  int32_t head = 0, query = 0;
  Seen main, lead;
};

/// What the warps of a thread block share.
template <typename Config>
struct TileState {
  Work work;
  const typename Config::Element* key_head;  // of the sequence or, in pages, of all: [keys, D]
  const typename Config::Element* value_head;
  int32_t page_shift;  // a page has 2^page_shift keys; -1 where that is no power of 2
  WalkPlan walk;
  Groups groups;  // of the split kernel
  TileRow rows[Config::TILE_ROWS];
  Step steps[Config::kWarps][Config::kHoldsSteps ? 1 : Config::kStages];  // in each warp's ring
  float2 sums[Config::kWarps][Config::TILE_ROWS];  // m and l of each warp's part of a chunk
  int32_t staging[Config::kWarps];                 // where its part of the output lies
};

/// The state in memory that the thread block shares. The compiler has to keep the address, which it
/// would ask for again wherever it reads.
template <typename State>
__device__ __forceinline__ State& state_in(char* memory) {
  asm volatile("" : "+l"(memory));
  __builtin_assume(__isShared(memory));
  return *reinterpret_cast<State*>(memory);
}

template <Kind kKind>
__device__ __forceinline__ Work find_work(const AttentionParams& params, const Pattern& pattern,
                                          const SplitGrid& grid) {
  const bool same_lengths = kKind == Kind::kPlain || params.sequences.same_lengths();
  const bool shared = !same_lengths && grid.shares > 0;
  Work work;
  uint32_t block = grid.first_block + blockIdx.x;
  if (!shared) {
    work.splits = grid.splits;
    work.split = block % grid.splits;
    block /= grid.splits;
  }
  uint32_t tile = block % grid.tiles;
  block /= grid.tiles;
  work.key_head = block % params.problem.heads_kv;
  work.batch = block / params.problem.heads_kv;
  if (shared) {
    const Share share = find_share(params, pattern, grid, work.batch);
    work.batch = share.sequence;
    work.split = share.split;
    work.splits = share.splits;
    if (share.splits == 0) return work;
  }
  work.first_row = tile % grid.row_tiles * grid.tile_rows;
  tile /= grid.row_tiles;
  uint32_t residue = 0;
  if (pattern.dilation > 1) {
    residue = tile % grid.classes;
    tile /= grid.classes;
  }
  if (pattern.list.present()) {
    work.list_row = tile % grid.classes;
    tile /= grid.classes;
  }
  work.first_head = work.key_head * params.problem.group() + tile;
  work.sequence = params.sequences.of(work.batch);
  work.slice = make_slice(pattern, residue, work.sequence);
  const int32_t head_dim = params.problem.widest_dim();
  const bool codes = params.keys.dtype == Dtype::kFloat8;
  if (pattern.list.present()) {
    const BlockList& list = pattern.list;
    const int32_t first = work.list_row * list.block_q;
    work.slice.rows = {first, 1, imax(0, imin(list.block_q, work.sequence.rows - first))};
    work.slice.shift += first;
    const ListedRuns blocks = list.runs(work.batch, work.first_head, work.list_row, list.block_kv);
    work.chunk_steps =
        chunk_steps(keys_of_blocks(list, blocks.count), work.sequence.rows, list, head_dim, codes);
  } else if (same_lengths) {
    work.chunk_steps = grid.chunk_steps;
  } else {
    work.chunk_steps =
        chunk_steps(pattern, params.features, work.sequence.keys, work.sequence.rows, head_dim);
  }
  work.rows = imin(grid.heads_packed * work.slice.rows.length - work.first_row, grid.tile_rows);
  return work;
}

template <typename Element>
__device__ __forceinline__ const Element* head_of(const KeySource& source, const TensorView& tensor,
                                                  const Work& work) {
  const Element* head = static_cast<const Element*>(tensor.data) + work.key_head * tensor.stride_h;
  if (source.paged()) return head;
  return head + work.batch * tensor.stride_b + work.sequence.first_key * tensor.stride_s;
}

/// Where a key lies: its page, and its row there or in the sequence.
struct KeyPlace {
  int64_t page, row;
};

template <Kind kKind, typename Config>
__device__ __forceinline__ KeyPlace place_of_key(const KeySource& source,
                                                 const TileState<Config>& state, int32_t j) {
  if (kKind == Kind::kPlain || !source.paged()) return {0, j};
  const int32_t size = source.page_size;
  const int32_t page = state.page_shift >= 0 ? j >> state.page_shift : j / size;
  return {source.existing_page(source.entry_of(state.work.batch, page)), j - page * size};
}

template <typename Element>
__device__ __forceinline__ const Element* row_at(const Element* head, const TensorView& tensor,
                                                 KeyPlace place) {
  return head + place.page * tensor.stride_b + place.row * tensor.stride_s;
}

/// Extremes of the bounds that a warp's lanes hold.
__device__ __forceinline__ Bounds reduce_bounds(Interval keys, int32_t seq_kv) {
  Bounds bounds = no_rows(seq_kv);
  bounds.add(keys);
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) {
    bounds.any.begin = imin(bounds.any.begin, __shfl_xor_sync(~0u, bounds.any.begin, lane));
    bounds.any.end = imax(bounds.any.end, __shfl_xor_sync(~0u, bounds.any.end, lane));
    bounds.all.begin = imax(bounds.all.begin, __shfl_xor_sync(~0u, bounds.all.begin, lane));
    bounds.all.end = imin(bounds.all.end, __shfl_xor_sync(~0u, bounds.all.end, lane));
  }
  return bounds;
}

/// Fills the state; one warp calls it.
template <typename Config, Kind kKind>
__device__ __forceinline__ void prepare_tile(const AttentionParams& params, const Pattern& pattern,
                                             const SplitGrid& grid, TileState<Config>& state) {
  Work work = find_work<kKind>(params, pattern, grid);
  int lane = threadIdx.x;
  if (lane == 0) state.work = work;
  if (work.rows <= 0) return;
  uint32_t packed = work.first_row + imin(lane, work.rows - 1);
  uint32_t class_rows = work.slice.rows.length;
  TileRow row;
  row.head = work.first_head + packed / class_rows;
  int32_t r = packed % class_rows;
  row.query = work.slice.rows.at(r);
  Bounds bounds = unbounded(params.problem.seq_kv);
  Interval keys = bounds.any;
  if (!is_lean(kKind) && params.scores.bounds.data != nullptr) {
    keys = params.scores.bounds.row(work.batch, row.head, row.query, params.problem.seq_kv);
    bounds = reduce_bounds(keys, params.problem.seq_kv);
  }
  bounds.cut(params.num_keys(work.sequence));
  if (lane < work.rows) {
    Row seen = make_row(pattern, work.slice, r, keys);
    row.main = seen_main(pattern, seen);
    row.lead = seen_lead(pattern, work.slice, seen);
  }
  if (lane < Config::TILE_ROWS) state.rows[lane] = row;
  if (lane == 0) {
    const KeySource& source = params.keys;
    state.key_head = head_of<typename Config::Element>(source, source.key, work);
    state.value_head = head_of<typename Config::Element>(source, source.value, work);
    const int32_t size = source.page_size;
    state.page_shift = __popc(size) == 1 ? __ffs(size) - 1 : -1;
    state.walk = plan_walk(pattern, work.slice, {0, work.slice.rows.length}, bounds, work.batch,
                           work.first_head, work.list_row, work.chunk_steps, grid.max_chunks);
  }
}

/// A warp's loads of 16 rows, the lanes of a row side by side with 16 bytes each. Rows are read
/// once: where they drove the chunks' results out of the L2 cache, those went to memory and back,
/// which cost 3 % of the bandwidth.
template <typename Config>
struct RowLoader {
  using T = typename Config::T;
  static constexpr int kElements = 16 / sizeof(T);
  static constexpr int kLanesPerRow = Config::HEAD_DIM / kElements;
  static constexpr int kRowsAtOnce = 32 / kLanesPerRow;
  static constexpr int kPasses = kStepKeys / kRowsAtOnce;
  static_assert(32 % kLanesPerRow == 0, "a pass is whole rows");

  int32_t columns;  // that exist; zeros up to HEAD_DIM
  bool aligned;

  /// Row r lies at from + r * stride; rows that are not in `valid` become zeros.
  __device__ __forceinline__ void load(uint32_t to, const T* from, int64_t stride,
                                       Interval valid) const {
    from += row(0) * stride + column();
    if (aligned && valid.holds({0, kStepKeys})) {
      const bool exists = column() < columns;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        ptx::cp_async_16_once(place(to, pass), from, exists);
        from += kRowsAtOnce * stride;
      }
      return;
    }
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      copy(to, pass, from, valid.contains(row(pass)));
      from += kRowsAtOnce * stride;
    }
  }

  /// Row r lies at row_of(r), aligned; rows that are not in `valid` become zeros and are not read.
  /// Unrolled: a copy in a rolled loop had its place and its cache policy from one uniform register
  /// (nvcc 13.0), which is an illegal instruction.
  template <typename RowOf>
  __device__ __forceinline__ void load_aligned(uint32_t to, Interval valid,
                                               const RowOf& row_of) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      ptx::cp_async_16_once(place(to, pass), row_of(row(pass)) + column(),
                            valid.contains(row(pass)) && column() < columns);
    }
  }

  /// Row r lies at row_of(r); rows that are not in `valid` become zeros.
  template <typename RowOf>
  __device__ __forceinline__ void load_each(uint32_t to, Interval valid,
                                            const RowOf& row_of) const {
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      if (valid.contains(row(pass))) {
        copy(to, pass, row_of(row(pass)) + column(), true);
      } else {
        ptx::store_shared_16(place(to, pass), {});
      }
    }
  }

 private:
  __device__ __forceinline__ void copy(uint32_t to, int pass, const T* from, bool exists) const {
    exists = exists && column() < columns;
    if (aligned) {
      ptx::cp_async_16_once(place(to, pass), from, exists);
    } else {
      ptx::store_shared_16(place(to, pass), exists ? load_unaligned(from) : uint4{});
    }
  }

  __device__ __forceinline__ static int row(int pass) {
    return threadIdx.x % 32 / kLanesPerRow + pass * kRowsAtOnce;
  }
  __device__ __forceinline__ static int column() { return threadIdx.x % kLanesPerRow * kElements; }
  __device__ __forceinline__ static uint32_t place(uint32_t to, int pass) {
    // The rows of a pass differ in the bits that pass 0 leaves, so their swizzle is one more xor.
    const uint32_t first = to + swizzled<Config::kPitch>(row(0), threadIdx.x % kLanesPerRow);
    const int rows = pass * kRowsAtOnce;
    return (first ^ (rows % 8 * kChunkBytes)) + rows * Config::kPitch;
  }
};

/// Where the queries of a fragment of rows lie, and how many there are.
template <typename Config>
struct QueryRows {
  using T = typename Config::T;
  const T* first;
  const TileRow* rows;
  int64_t stride_h, stride_s;
  int32_t count;

  __device__ __forceinline__ QueryRows(const AttentionParams& params,
                                       const TileState<Config>& state, int mt)
      : first(static_cast<const T*>(params.query.data) + state.work.batch * params.query.stride_b +
              state.work.sequence.first_row * params.query.stride_s),
        rows(&state.rows[mt * kFragmentRows]),
        stride_h(params.query.stride_h),
        stride_s(params.query.stride_s),
        count(imax(imin(state.work.rows - mt * kFragmentRows, kFragmentRows), 0)) {}
  __device__ __forceinline__ const T* operator()(int r) const {
    return first + rows[r].head * stride_h + rows[r].query * stride_s;
  }
};

}  // namespace sparse_attn::cuda::decode
