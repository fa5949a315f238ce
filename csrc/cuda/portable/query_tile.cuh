// A thread block's query tile: its rows' intervals, its walk over keys, and the loads of its tiles.
// Shared by the attention kernel and the threshold pass of top-k.
#pragma once

#include "config.cuh"
#include "work.cuh"

namespace sparse_attn::cuda::portable {

/// Keys of the main view that some row of a warp sees, and that every row sees.
struct WarpKeys {
  Interval any, all;
};

/// The part of shared memory that is not tiles.
template <typename Config>
struct TileState {
  Work work;
  const typename Config::T* key_head;  // [Skv, D] of the block's batch entry and head
  const typename Config::T* value_head;
  Interval row_keys[Config::BLOCK_Q];  // main view of each row; empty behind the last row
  WarpKeys warp_keys[Config::kThreads / 32];
  WalkPlan walk;
  Bounds bounds;  // of the rows
};

template <typename Config>
struct QueryTile {
  using T = typename Config::T;
  using State = TileState<Config>;
  using Step = typename Config::Step;
  static constexpr int32_t kGranule = Config::Walk::kGranule;

  const AttentionParams& params;
  State& state;
  const Work& work;  // in the state
  bool aligned;      // always in dense kernels

  __device__ __forceinline__ QueryTile(const AttentionParams& params, State& state, bool aligned)
      : params(params), state(state), work(state.work), aligned(aligned) {}

  __device__ __forceinline__ Interval row_bounds(int32_t r) const {
    return params.bounds.row(work.batch, work.head, work.slice.rows.at(r), params.seq_kv);
  }
  __device__ __forceinline__ Row row(int32_t r) const {
    return make_row(params.pattern, work.slice, r, row_bounds(r));
  }
  __device__ __forceinline__ typename Config::Walk walk() const {
    return {params.pattern, state.walk};
  }

  /// Finds the tile's rows; false where the thread block has none. All threads call it.
  __device__ bool find(const GridPlan& plan) {
    if (threadIdx.x == 0) {
      state.work = find_work<Config::BLOCK_Q>(params, plan, blockIdx.x);
      state.key_head = head_of(params.key);
      state.value_head = head_of(params.value);
    }
    __syncthreads();
    return !work.rows.empty();
  }

  /// Fills the rest of the state; all threads call it.
  __device__ void prepare() {
    for (int r = threadIdx.x; r < Config::BLOCK_Q; r += Config::kThreads) {
      state.row_keys[r] = r < work.rows.size() ? row(work.rows.begin + r).keys : Interval{};
    }
    Bounds bounds = unbounded(params.seq_kv);
    if (params.bounds.data != nullptr) bounds = reduce_bounds();
    if (threadIdx.x == 0) {
      state.walk = plan_walk<Config::BLOCK_KV, Config::kGeneral>(
          params.pattern, work.slice, work.rows, bounds, work.batch, work.head, work.list_row);
    }
    __syncthreads();
    find_warp_keys();
    __syncthreads();
  }

  __device__ __forceinline__ void load_queries(uint32_t to) const {
    const TensorView& query = params.query;
    int64_t stride = query.stride_s;
    const T* head = static_cast<const T*>(query.data) + work.batch * query.stride_b +
                    work.head * query.stride_h;
    RowSource<T> source = {head + work.slice.rows.offset * stride, work.slice.rows.step * stride,
                           work.rows};
    load<Config::BLOCK_Q>(to, source, [&](int row) { return work.rows.begin + row; });
  }

  __device__ __forceinline__ void load_keys(uint32_t to, const Step& step) const {
    load_rows(to, state.key_head, params.key.stride_s, step);
  }
  __device__ __forceinline__ void load_values(uint32_t to, const Step& step) const {
    load_rows(to, state.value_head, params.value.stride_s, step);
  }

  /// Element of the step's view in row or column `c` of its tile.
  __device__ __forceinline__ int32_t element(const Step& step, int c) const {
    if (!Config::kGeneral || !params.pattern.list.present()) return step.start + c;
    int32_t first = step.granules[0];  // a chain of sums keeps the array in registers
#pragma unroll
    for (int g = 1; g < Config::Walk::kGranules; ++g) {
      first += static_cast<int>(c / kGranule >= g) * (step.granules[g] - step.granules[g - 1]);
    }
    return first + c % kGranule;
  }

  /// Position of that element on the key axis.
  __device__ __forceinline__ int32_t key_position(const Step& step, int c) const {
    const View& view = step.lead ? params.pattern.lead : work.slice.keys;
    return view.at(element(step, c));
  }

 private:
  __device__ __forceinline__ const T* head_of(const TensorView& tensor) const {
    return static_cast<const T*>(tensor.data) + work.batch * tensor.stride_b +
           work.head / params.group() * tensor.stride_h;
  }

  /// The rows of a step's tile.
  __device__ __forceinline__ void load_rows(uint32_t to, const T* head, int64_t stride,
                                            const Step& step) const {
    const View& view = step.lead ? params.pattern.lead : work.slice.keys;
    RowSource<T> source = {head + view.offset * stride, view.step * stride,
                           step.lead && !params.pattern.shared_axis() ? state.walk.lead_loaded
                                                                      : state.walk.keys_loaded};
    load<Config::BLOCK_KV>(to, source, [&](int row) { return element(step, row); });
  }

  template <int ROWS, typename RowOf>
  __device__ __forceinline__ void load(uint32_t to, const RowSource<T>& source,
                                       const RowOf& row_of) const {
    if (!Config::kGeneral || aligned) {
      load_tile<T, Config::HEAD_DIM, ROWS, Config::kThreads, Config::kPitch>(
          to, source, params.head_dim, row_of);
    } else {
      load_tile_unaligned<T, ROWS, Config::kThreads, Config::kPitch>(to, source, params.head_dim,
                                                                     row_of);
    }
  }

  /// Each warp reduces its rows' intervals.
  __device__ void find_warp_keys() {
    int warp = threadIdx.x / 32;
    Interval keys = state.row_keys[warp * Config::kWarpRows + threadIdx.x % Config::kWarpRows];
    WarpKeys reduced = {keys.empty() ? Interval{kUnlimited, 0} : keys, keys};
    for (int step = 16; step > 0; step /= 2) {
      Interval any = reduced.any;
      Interval all = reduced.all;
      reduced.any.begin = imin(any.begin, __shfl_xor_sync(~0u, any.begin, step));
      reduced.any.end = imax(any.end, __shfl_xor_sync(~0u, any.end, step));
      reduced.all.begin = imax(all.begin, __shfl_xor_sync(~0u, all.begin, step));
      reduced.all.end = imin(all.end, __shfl_xor_sync(~0u, all.end, step));
    }
    if (threadIdx.x % 32 == 0) state.warp_keys[warp] = reduced;
  }

  __device__ Bounds reduce_bounds() {
    if (threadIdx.x == 0) state.bounds = no_rows(params.seq_kv);
    __syncthreads();
    Bounds bounds = no_rows(params.seq_kv);
    for (int r = threadIdx.x; r < work.rows.size(); r += Config::kThreads) {
      bounds.add(row_bounds(work.rows.begin + r));
    }
    atomicMin(&state.bounds.any.begin, bounds.any.begin);
    atomicMax(&state.bounds.any.end, bounds.any.end);
    atomicMax(&state.bounds.all.begin, bounds.all.begin);
    atomicMin(&state.bounds.all.end, bounds.all.end);
    __syncthreads();
    return state.bounds;
  }
};

}  // namespace sparse_attn::cuda::portable
