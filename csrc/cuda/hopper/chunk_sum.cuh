// The sum of chunks that a thread block takes in turn (key_split.h), with the merge's operations in
// the merge's order. A group's lies in shared memory, that of the groups before it in the
// workspace: float32 has no room for both. Of wide tiles, whose chunks are one group, it has none
// for either.
#pragma once

#include "../common/ptx/cp_async.cuh"
#include "../common/ptx/global.cuh"
#include "../common/ptx/grid.cuh"
#include "../common/ptx/tma.cuh"
#include "arguments.h"
#include "config.h"

namespace sparse_attn::cuda::hopper {

/// m and l of the two rows of a thread, which the four threads of a row know; there are no keys
/// yet.
struct RowState {
  float m[2] = {-INFINITY, -INFINITY};
  float l[2] = {};
};

template <class C>
class ChunkSum {
  using Work = typename SharedStorage<C>::Work;
  using Out = float[C::HEAD_DIM / 2];

 public:
  __device__ __forceinline__ ChunkSum(const Arguments& args, int row, int lane)
      : args_(args), row_(row), lane_(lane) {}

  /// Joins a chunk with the sum of those of its group before it, and a group that ends with the sum
  /// of those before it; `o` and `state` become those of what is summed. `group` is memory for the
  /// warp's rows, where they are not wide.
  __device__ __forceinline__ void add(Out& o, RowState& state, float4* group, const Work& work,
                                      bool last) {
    const bool begun = fold_ & kBegun, summed = fold_ & kSummed;
    if (!begun) {
      if (!summed) fold_ = work.first_group;
      if (lane_ == 0) ptx::tma_store_wait_read();  // of the tile before
      __syncwarp();
    }
    --fold_;
    group += lane_;
    const bool ends = __any_sync(~0u, last || (fold_ & kLeft) == 0);  // uniform to the compiler
    RowState before = begun ? held() : RowState();
    bool any = begun;
#pragma unroll 1
    for (bool of_groups = false;; of_groups = true) {
      join(o, state, any, before, group);
      if (of_groups || !ends) break;
      any = summed;
      before = summed ? fetch_groups(group) : RowState();
    }
    if (ends) {
      fold_ = last ? 0 : kSummed | work.group;
      if (last) return;
      __syncwarp();  // the states have been read
      store(o, state, args_.sums, place_of_groups());
      __syncwarp();
      return;
    }
    fold_ |= kBegun;
    hold(state);
#pragma unroll
    for (int i = 0; i < C::HEAD_DIM / 8; ++i) {
      group[i * kWarp] = {o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]};
    }
  }

  /// The same in a wide tile, of which warps without rows keep no sum.
  __device__ __forceinline__ void add_wide(Out& o, RowState& state, bool has_rows, bool last) {
    const bool begun = fold_ & kBegun;
    const float4* sum = args_.sums.out_at(place_of_groups(), 0, lane_);
    join(o, state, begun && has_rows, begun ? held() : RowState(), sum);
    fold_ = last ? 0 : kBegun;
    if (last) return;
    hold(state);
    if (has_rows) store_out(o, args_.sums, place_of_groups());
  }

  /// Stores a sum where a strip's lies.
  __device__ __forceinline__ void store(const Out& o, const RowState& state,
                                        const Partials& partials, int64_t at) const {
    if (lane_ % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        partials.state[at * kStripRows + lane_ / 4 + 8 * r] = {state.m[r], state.l[r]};
      }
    }
    store_out(o, partials, at);
  }
  __device__ __forceinline__ void store_out(const Out& o, const Partials& partials,
                                            int64_t at) const {
    float4* out = partials.out_at(at, 0, lane_);
#pragma unroll
    for (int i = 0; i < C::HEAD_DIM / 8; ++i) {
      out[i * kWarp] = {o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]};
    }
  }

 private:
  /// Where the sum stands, in one register: chunks that the group still has, and whether there is a
  /// sum of the group, and one of the groups before it.
  enum FoldBits : int32_t { kLeft = 31, kBegun = 32, kSummed = 64 };
  static_assert(kMostChunks <= kLeft);

  /// Where the warp's sum in the workspace lies, in strips.
  __device__ __forceinline__ int64_t place_of_groups() const {
    return int64_t{ptx::block_number()} * (C::BLOCK_Q / kStripRows) + row_ / kStripRows;
  }
  /// Copies its output to `to`, as there are no registers for it, and returns its state.
  __device__ __forceinline__ RowState fetch_groups(float4* to) const {
    const int64_t at = place_of_groups();
    const float4* out = args_.sums.out_at(at, 0, lane_);
    const uint32_t first = ptx::shared_address(to);
#pragma unroll
    for (int i = 0; i < C::HEAD_DIM / 8; ++i) {
      ptx::cp_async_16(first + i * kWarp * sizeof(float4), out + i * kWarp, true);
    }
    ptx::cp_async_commit();
    RowState state;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 stored = args_.sums.state[at * kStripRows + lane_ / 4 + 8 * r];
      state.m[r] = stored.x;
      state.l[r] = stored.y;
    }
    ptx::cp_async_wait<0>();
    return state;
  }

  /// Joins `o` with the output of what was summed before, if there is `any`.
  __device__ __forceinline__ static void join(Out& o, RowState& state, bool any,
                                              const RowState& before, const float4* out) {
    Join join[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      join[r] = Join::of(before.m[r], state.m[r], state.l[r]);
      state.m[r] = join[r].m;
      state.l[r] = join[r].sum(before.l[r], state.l[r]);
    }
#pragma unroll
    for (int i = 0; i < C::HEAD_DIM / 8; ++i) {
      float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
      if constexpr (C::kWide) {
        __syncwarp();  // else the compiler asks for more than registers hold
        sum = ptx::load_float4_if(any, out + i * kWarp);
      } else {
        if (any) sum = out[i * kWarp];
      }
      o[4 * i] = join[0].sum(sum.x, o[4 * i]);
      o[4 * i + 1] = join[0].sum(sum.y, o[4 * i + 1]);
      o[4 * i + 2] = join[1].sum(sum.z, o[4 * i + 2]);
      o[4 * i + 3] = join[1].sum(sum.w, o[4 * i + 3]);
    }
  }

  /// Keeps a group's state until the next chunk, a number in each of the rows' four threads.
  __device__ __forceinline__ void hold(const RowState& state) {
    const int t = lane_ % 4;
    const float upper = t == 0 ? state.m[0] : state.l[0], lower = t == 2 ? state.m[1] : state.l[1];
    held_ = t < 2 ? upper : lower;
  }
  __device__ __forceinline__ RowState held() const {
    const int quad = lane_ - lane_ % 4;
    RowState state;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      state.m[r] = __shfl_sync(~0u, held_, quad + 2 * r);
      state.l[r] = __shfl_sync(~0u, held_, quad + 2 * r + 1);
    }
    return state;
  }

  const Arguments& args_;
  const int row_, lane_;
  float held_ = 0.0f;
  int32_t fold_ = 0;  // FoldBits
};

}  // namespace sparse_attn::cuda::hopper
