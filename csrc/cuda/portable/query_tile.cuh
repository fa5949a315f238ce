// A thread block's query tile: its rows' intervals, its walk over keys, and the loads of its tiles.
// Shared by the attention kernel and the threshold pass of top-k.
#pragma once

#include "../common/key_rows.cuh"
#include "config.cuh"
#include "load.cuh"
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
  RowSource<typename Config::T> sources[2][2];  // [main, lead][key, value], of the block's head
  WarpKeys warp_keys[Config::kThreads / 32];
  WalkPlan walk;
  Bounds bounds;      // of the rows
  float score_scale;  // the factor of the head's products q.k
};

/// The address of dynamic shared memory, held in a register: the compiler would recompute it from
/// special registers at each use in the main loop, and wait for them.
__device__ __forceinline__ char* held_address(char* smem) {
  uint32_t address = __shfl_sync(~0u, ptx::shared_address(smem), 0);
  return static_cast<char*>(__cvta_shared_to_generic(address));
}

/// Loads the keys or values of a step's tile that lie in pages or have 8 bits, each by itself. A
/// call, not inlined: copies of it in the main loop cost other patterns up to 13 %.
template <typename Config>
__device__ __noinline__ void load_located(uint32_t to, bool value, const AttentionParams& params,
                                          const TileState<Config>& state, bool aligned,
                                          typename Config::Step step) {
  using T = typename Config::T;
  using Own = ThreadChunks<T, Config::HEAD_DIM, Config::kThreads>;
  const KeySource& keys = params.keys;
  const TensorView& tensor = value ? keys.value : keys.key;
  const int32_t columns = value ? params.problem.value_dim : params.problem.head_dim;
  const Interval valid = state.sources[step.lead()][value].valid;
  const Work& work = state.work;
  const View& view = step.lead() ? work.slice.lead.view : work.slice.keys;
  const bool rows_aligned = !Config::kGeneral || aligned;
  const Own own;
#pragma unroll 1
  for (int row = own.row; row < Config::BLOCK_KV; row += Own::kRowsAtOnce) {
    const int32_t e =
        step.template element<Config::kShape.granule>(params.pattern.list.present(), row);
    const bool exists = valid.contains(e);
    int64_t at = 0;
    if (exists) at = keys.locate(tensor, work.sequence, work.batch, work.kv_head, view.at(e));
#pragma unroll 1
    for (int c = own.chunk; c < Own::kChunks; c += Own::kThreadsPerRow) {
      const int d = c * Own::kElements;
      copy_key_chunk<T>(to + swizzled<Config::kPitch>(row, c), keys, tensor, at + d,
                        exists && d < columns, rows_aligned);
    }
  }
}

template <typename Config>
struct QueryTile {
  using T = typename Config::T;
  using State = TileState<Config>;
  using Step = typename Config::Step;
  static constexpr int32_t kGranule = Config::kShape.granule;
  static constexpr int32_t kGranules = Config::Walk::kGranules;

  const AttentionParams& params;
  State& state;
  const Work& work;  // in the state
  bool aligned;      // always in dense kernels

  /// `smem` is held_address of the block's shared memory.
  __device__ __forceinline__ QueryTile(const AttentionParams& params, char* smem, bool aligned)
      : params(params),
        state(*reinterpret_cast<State*>(smem + Config::kShape.tile_bytes())),
        work(state.work),
        aligned(aligned) {
    static_assert(sizeof(State) <= Config::kShape.state_bytes(),
                  "the state has its room after the tiles");
  }

  __device__ __forceinline__ Interval row_bounds(int32_t r) const {
    return params.scores.bounds.row(work.batch, work.head, work.slice.rows.at(r),
                                    params.problem.seq_kv);
  }
  __device__ __forceinline__ Row row(int32_t r) const {
    return make_row(params.pattern, work.slice, r, row_bounds(r));
  }
  __device__ __forceinline__ float score_scale() const { return state.score_scale; }
  __device__ __forceinline__ typename Config::Walk walk() const {
    return {params.pattern, state.walk};
  }

  /// Finds the tile's rows; false where the thread block has none. All threads call it.
  __device__ bool find(const GridPlan& plan) { return find(plan, {blockIdx.x, blockIdx.y}); }
  __device__ bool find(const GridPlan& plan, uint2 block) {
    if (threadIdx.x < 4) {  // a source each; they take long, one after the other
      const Work found = find_work<Config::BLOCK_Q>(params, plan, block);
      const bool lead = threadIdx.x / 2;
      const bool value = threadIdx.x % 2;
      const TensorView& tensor = value ? params.keys.value : params.keys.key;
      const View& view = lead ? found.slice.lead.view : found.slice.keys;
      const T* head = static_cast<const T*>(tensor.data) + found.batch * tensor.stride_b +
                      found.kv_head * tensor.stride_h;
      const int64_t first = int64_t{found.sequence.first_key} + view.offset;
      state.sources[lead][value] = {
          head + first * tensor.stride_s, view.step * tensor.stride_s, {}};
      if (threadIdx.x == 0) {
        state.work = found;
        state.score_scale = params.score_scale(found.batch, found.head);
      }
    }
    __syncthreads();
    return !work.rows.empty();
  }

  /// Fills the rest of the state; all threads call it.
  __device__ void prepare() {
    find_warp_keys();
    Bounds bounds = unbounded(params.problem.seq_kv);
    if (params.scores.bounds.data != nullptr) bounds = reduce_bounds();
    bounds.cut(params.num_keys(work.sequence));
    if (threadIdx.x == 0) {
      state.walk = plan_walk<Config::BLOCK_KV, kGranule>(
          params.pattern, work.slice, work.rows, bounds, work.batch, work.head, work.list_row,
          runs_load() && !is_located());
      Interval lead_loaded = work.slice.lead.inside(params.pattern, bounds.any);
      if (params.pattern.shared_axis()) lead_loaded = state.walk.keys_loaded;  // main tiles' keys
      for (int value = 0; value < 2; ++value) {
        state.sources[false][value].valid = state.walk.keys_loaded;
        state.sources[true][value].valid = lead_loaded;
      }
    }
    __syncthreads();
  }

  /// What the row of the warp that is this lane's sees of the main view; lanes past the last row
  /// repeat the first ones.
  __device__ __forceinline__ Interval lane_keys() const {
    int r = threadIdx.x / 32 * Config::kWarpRows + threadIdx.x % Config::kWarpRows;
    return r < work.rows.size() ? row(work.rows.begin + r).keys : Interval{};
  }

  __device__ __forceinline__ void load_queries(uint32_t to) const {
    const TensorView& query = params.query;
    int64_t stride = query.stride_s;
    const T* head = static_cast<const T*>(query.data) + work.batch * query.stride_b +
                    work.head * query.stride_h;
    const int64_t first = int64_t{work.sequence.first_row} + work.slice.rows.offset;
    RowSource<T> source = {head + first * stride, work.slice.rows.step * stride, work.rows};
    if (runs_load() && work.rows.size() == Config::BLOCK_Q) {
      load_run<T, Config::HEAD_DIM, Config::BLOCK_Q, Config::kThreads, Config::kPitch>(
          to, source, work.rows.begin);
    } else {
      load<Config::BLOCK_Q>(to, source, params.problem.head_dim,
                            [&](int row) { return work.rows.begin + row; });
    }
  }

  __device__ __forceinline__ void load_keys(uint32_t to, const Step& step) const {
    load_rows(to, false, step);
  }
  __device__ __forceinline__ void load_values(uint32_t to, const Step& step) const {
    load_rows(to, true, step);
  }

  /// Whether tiles are runs of elements, and not granules of a list.
  __device__ __forceinline__ bool is_run() const {
    return kGranules == 1 || !params.pattern.list.present();
  }
  /// First element of a granule of the step's tile.
  __device__ __forceinline__ int32_t granule(const Step& step, int g) const {
    if (is_run()) return step.start() + g * kGranule;
    return step.granules[g];
  }

  /// Element of the step's view in row or column `c` of its tile.
  __device__ __forceinline__ int32_t element(const Step& step, int c) const {
    return step.template element<kGranule>(params.pattern.list.present(), c);
  }

  /// Position of that element on the key axis, and the key that may be read in its place where it
  /// may not exist.
  __device__ __forceinline__ int32_t key_position(const Step& step, int c) const {
    return view_of(step).at(element(step, c));
  }
  __device__ __forceinline__ int32_t readable_key(const Step& step, int c) const {
    return view_of(step).at_most(element(step, c), params.problem.seq_kv - 1);
  }

  /// Steps of the walk, and of a range the keys of one.
  __device__ __forceinline__ int32_t num_steps() const { return state.walk.steps; }
  __device__ __forceinline__ Interval keys_of_step(int32_t at) const {
    const int32_t begin = (at + state.walk.tile_offset) * Config::BLOCK_KV;
    return {begin, begin + Config::BLOCK_KV};
  }

  /// Where row r of the tile has its place in [B, Hq, Sq].
  __device__ __forceinline__ int64_t row_index(int32_t r) const {
    const int64_t head = int64_t{work.batch} * params.problem.heads_q + work.head;
    return head * params.problem.seq_q + work.slice.rows.at(work.rows.begin + r);
  }

 private:
  __device__ __forceinline__ const View& view_of(const Step& step) const {
    return step.lead() ? work.slice.lead.view : work.slice.keys;
  }

  /// Whether rows that exist can be loaded without a look at each.
  __device__ __forceinline__ bool runs_load() const {
    return (!Config::kGeneral || aligned) && params.problem.head_dim == Config::HEAD_DIM &&
           params.problem.value_dim == Config::HEAD_DIM;
  }

  /// Whether each key has to be located: it lies in a page, or is converted.
  __device__ __forceinline__ bool is_located() const {
    return params.keys.paged() || params.keys.dtype == Dtype::kFloat8;
  }

  /// The keys or values of a step's tile.
  __device__ __forceinline__ void load_rows(uint32_t to, bool value, const Step& step) const {
    const RowSource<T>& source = state.sources[step.lead()][value];
    if (step.whole()) {
#pragma unroll
      for (int g = 0; g < kGranules; ++g) {
        load_run<T, Config::HEAD_DIM, kGranule, Config::kThreads, Config::kPitch>(
            to + g * kGranule * Config::kPitch, source, granule(step, g));
      }
    } else if (is_located()) {
      load_located<Config>(to, value, params, state, aligned, step);
    } else {
      const int32_t columns = value ? params.problem.value_dim : params.problem.head_dim;
      load<Config::BLOCK_KV>(to, source, columns, [&](int row) { return element(step, row); });
    }
  }

  template <int ROWS, typename RowOf>
  __device__ __forceinline__ void load(uint32_t to, const RowSource<T>& source, int32_t columns,
                                       const RowOf& row_of) const {
    if (!Config::kGeneral || aligned) {
      load_tile<T, Config::HEAD_DIM, ROWS, Config::kThreads, Config::kPitch>(to, source, columns,
                                                                             row_of);
    } else {
      load_tile_unaligned<T, ROWS, Config::kThreads, Config::kPitch>(to, source, columns, row_of);
    }
  }

  /// Each warp reduces its rows' intervals.
  __device__ void find_warp_keys() {
    Interval keys = lane_keys();
    WarpKeys reduced = {keys.empty() ? Interval{kUnlimited, 0} : keys, keys};
    for (int step = 16; step > 0; step /= 2) {
      Interval any = reduced.any;
      Interval all = reduced.all;
      reduced.any.begin = imin(any.begin, __shfl_xor_sync(~0u, any.begin, step));
      reduced.any.end = imax(any.end, __shfl_xor_sync(~0u, any.end, step));
      reduced.all.begin = imax(all.begin, __shfl_xor_sync(~0u, all.begin, step));
      reduced.all.end = imin(all.end, __shfl_xor_sync(~0u, all.end, step));
    }
    if (threadIdx.x % 32 == 0) state.warp_keys[threadIdx.x / 32] = reduced;
  }

  __device__ Bounds reduce_bounds() {
    if (threadIdx.x == 0) state.bounds = no_rows(params.problem.seq_kv);
    __syncthreads();
    Bounds bounds = no_rows(params.problem.seq_kv);
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
