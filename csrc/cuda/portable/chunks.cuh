// The chunks of a float32 query tile. Either this thread block computes one of them and leaves its
// partial result for the merge, or it takes them all: the sum so far then lies in the output's
// place, which is of the same type, and each thread finds there what it wrote.
#pragma once

#include "../common/partial_rows.cuh"
#include "chunk_join.cuh"
#include "key_split.h"
#include "store.cuh"

namespace sparse_attn::cuda::portable {

template <typename Config>
class TileChunks {
 public:
  using Tile = QueryTile<Config>;
  using Softmax = SoftmaxState<Config::MT, Config::kFloat>;

  __device__ __forceinline__ TileChunks(const Tile& tile, const PartialRows& partials)
      : tile_(tile), partials_(partials) {}

  /// Finds the chunks once the tile's walk is planned; false where this thread block has none of
  /// them. `position` is the first step of its walk. All threads call it.
  __device__ __forceinline__ bool find(int32_t& position) {
    WalkPlan& walk = tile_.state.walk;
    const int32_t steps = walk.steps;
    const int32_t range = tile_.params.pattern.list.present() ? steps : walk.range_steps;
    chunks_ = cut_steps(tile_.work.sequence.rows, range, steps, Config::BLOCK_KV);
    if (!shared_out()) return true;
    const auto chunk = static_cast<int32_t>(blockIdx.z);
    chunks_.count = imin(chunks_.count, partials_.max_chunks);  // no more have room
    if (chunk >= chunks_.count) {
      ptx::cp_async_wait<0>();
      return false;
    }
    const Interval own = chunks_.steps(chunk, steps);
    position = own.begin;
    __syncthreads();  // all have read the steps
    if (threadIdx.x == 0) walk.steps = own.end;
    __syncthreads();
    return true;
  }

  /// Begins with the chunk of a step, which `position` is past, where there is one.
  __device__ __forceinline__ void enter(int32_t position) {
    if (shared_out() || chunks_.count == 1) return;
    const int32_t chunk = chunks_.of_step(position - 1);
    end_ = chunk + 1 == chunks_.count ? kNoStep : (chunk + 1) * chunks_.length;
  }

  /// Whether the walk has left a chunk that this thread block has to join: `position` is past the
  /// next step, where there is one.
  __device__ __forceinline__ bool left(bool more, int32_t position) const {
    return position > end_ || (!more && end_ < kUnlimited);
  }

  /// Takes in the chunk that was left, and begins the one of the next step.
  __device__ __forceinline__ void turn(Output<Config>& rO, Softmax& state, Exponent exponent,
                                       int32_t position) {
    join(rO, state, exponent);
    enter(position);
    state.init();
#pragma unroll
    for (int dt = 0; dt < Config::DT; ++dt) {
#pragma unroll
      for (int e = 0; e < 4; ++e) rO[0][dt][e] = 0.0f;
    }
  }

  /// The end of the walk: the partial result, or the result.
  __device__ __forceinline__ void store(Output<Config>& rO, Softmax& state, Exponent exponent,
                                        char* smem) {
    if (shared_out()) store_count();
    if (chunks_.count == 1) {
      state.finish(exponent);
    } else if (shared_out()) {
      store_chunk(rO, state);
      return;
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        state.m[0][h] = sums_[h].log2_maximum(exponent);
        state.l[0][h] = sums_[h].l;
        for_each_column(h, [&](int dt, int e, const volatile float* at) {
          rO[0][dt][e] = state.l[0][h] == 0.0f ? 0.0f : *at;
        });
      }
    }
    store_tile<Config>(rO, state, tile_, smem);
  }

 private:
  static constexpr int32_t kNoStep = kUnlimited - 1;  // past all steps

  const Tile& tile_;
  const PartialRows& partials_;
  KeyChunks chunks_;
  int32_t end_ = kUnlimited;  // of the chunk that is walked, where this thread block joins chunks
  RowSum sums_[2];

  __device__ __forceinline__ bool shared_out() const { return partials_.max_chunks > 1; }

  /// The sums l of a row's threads as one; m stays in its unit.
  __device__ __forceinline__ static void sum_threads(Softmax& state) {
    state.finish({1.0f, false});
  }

  /// Calls function(dt, e, at) for the lane's elements of row h that exist, with their places in
  /// the output. They are volatile, so that few of them are on their way at once: registers are
  /// the main loop's.
  template <typename Function>
  __device__ __forceinline__ void for_each_column(int h, const Function& function) const {
    const int r = lane_row<Config>(0, h);
    if (r >= tile_.work.rows.size()) return;
    volatile float* out = output_row(tile_, r);
#pragma unroll
    for (int dt = 0; dt < Config::DT; ++dt) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int d = Config::Products::column(dt, e);
        if (d < tile_.params.problem.value_dim) function(dt, 2 * h + e, out + d);
      }
    }
  }

  /// Joins the chunk with the sum of those before it.
  __device__ __forceinline__ void join(const Output<Config>& rO, Softmax& state,
                                       Exponent exponent) {
    sum_threads(state);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool stored = sums_[h].l != 0.0f;  // while there was no key, the sum is 0
      const auto join = sums_[h].add({state.m[0][h], state.l[0][h]}, exponent);
      if (sums_[h].l == 0.0f) continue;
      for_each_column(h, [&](int dt, int e, volatile float* at) {
        *at = join.sum(stored ? *at : 0.0f, rO[0][dt][e]);
      });
    }
  }

  /// How many chunks the rows have, for the merge.
  __device__ __forceinline__ void store_count() const {
    const auto r = static_cast<int32_t>(threadIdx.x);
    static_assert(Config::kThreads >= Config::BLOCK_Q, "a thread for each row");
    if (blockIdx.z == 0 && r < tile_.work.rows.size()) {
      partials_.chunks[tile_.row_index(r)] = {chunks_.count, kInARow};
    }
  }

  __device__ __forceinline__ void store_chunk(const Output<Config>& rO, Softmax& state) const {
    sum_threads(state);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = lane_row<Config>(0, h);
      if (r >= tile_.work.rows.size()) continue;
      const int64_t at = partials_.at(tile_.row_index(r), blockIdx.z);
      if (threadIdx.x % 4 == 0) partials_.state[at] = {state.m[0][h], state.l[0][h]};
      float* out = partials_.out + at * partials_.columns;
#pragma unroll
      for (int dt = 0; dt < Config::DT; dt += 2) {  // a lane's four columns lie together
        const int d = Config::Products::column(dt, 0);
        if (d >= partials_.columns) continue;
        *reinterpret_cast<float4*>(out + d) = {rO[0][dt][2 * h], rO[0][dt][2 * h + 1],
                                               rO[0][dt + 1][2 * h], rO[0][dt + 1][2 * h + 1]};
      }
    }
  }
};

/// The same of kernels that cut no keys.
template <typename Config>
class WholeTile {
 public:
  using Softmax = SoftmaxState<Config::MT, Config::kFloat>;

  __device__ __forceinline__ WholeTile(const QueryTile<Config>& tile, NoPartials) : tile_(tile) {}
  __device__ __forceinline__ bool find(int32_t&) { return true; }
  __device__ __forceinline__ void enter(int32_t) {}
  __device__ __forceinline__ bool left(bool, int32_t) const { return false; }
  __device__ __forceinline__ void turn(Output<Config>&, Softmax&, Exponent, int32_t) {}
  __device__ __forceinline__ void store(Output<Config>& rO, Softmax& state, Exponent exponent,
                                        char* smem) {
    state.finish(exponent);
    store_tile<Config>(rO, state, tile_, smem);
  }

 private:
  const QueryTile<Config>& tile_;
};

template <typename Config>
using KernelChunks = std::conditional_t<Config::kChunks, TileChunks<Config>, WholeTile<Config>>;

}  // namespace sparse_attn::cuda::portable
