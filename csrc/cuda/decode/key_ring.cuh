// The way of keys into a warp's ring: cp.async fills its slots with the keys and values of the
// steps that the warp walks, and what each step is stands beside them until the step is multiplied.
#pragma once

#include "../common/ptx/cp_async.cuh"
#include "codes.cuh"
#include "row_tile.cuh"

namespace sparse_attn::cuda::decode {

/// Where the warp's ring begins. Hidden from the compiler, so that it keeps it instead of
/// recomputing it in every step: by a shuffle or, in kernels that are not lean, as no uniform
/// number, since copies to one had a form that is no instruction (nvcc 13.0).
template <typename Config, Kind kKind>
__device__ __forceinline__ uint32_t ring_of_warp(const char* smem) {
  uint32_t ring = ptx::shared_address(smem) + threadIdx.x / 32 * Config::kRingBytes;
  if constexpr (is_lean(kKind)) {
    ring = __shfl_sync(~0u, ring, 0);
  } else {
    asm volatile("" : "+r"(ring));
  }
  return ring;
}

/// The steps in a warp's ring, the oldest first.
template <typename Config>
class RingSteps {
 public:
  __device__ __forceinline__ explicit RingSteps(Step* shared) : shared_(shared) {}

  __device__ __forceinline__ void push(const Step& step, int slot) {
    if constexpr (Config::kHoldsSteps) {
#pragma unroll
      for (int i = 1; i < Config::kStages; ++i) held_[i - 1] = held_[i];
      held_[Config::kStages - 1] = step;
    } else if (threadIdx.x % 32 == 0) {
      shared_[slot] = step;
    }
  }
  /// Step i, which lies in `slot`, once the ring is full.
  __device__ __forceinline__ Step at(int i, int slot) const {
    if constexpr (Config::kHoldsSteps) return held_[i];
    return shared_[slot];
  }
  /// The chunk of the step in `slot`, which comes after those that were multiplied last: one or,
  /// where it was `both`, as many as may be at once.
  __device__ __forceinline__ int32_t next_chunk(bool both, int slot) const {
    if constexpr (Config::kHoldsSteps) return both ? held_[Config::kAtOnce].chunk : held_[1].chunk;
    return shared_[slot].chunk;
  }

 private:
  Step held_[Config::kHoldsSteps ? Config::kStages : 1] = {};
  Step* shared_;
};

/// A warp's walk over its share of the keys, and their way into its ring.
template <typename Config, Kind kKind>
struct KeyLoader {
  using Element = typename Config::Element;
  using SlotLoader = std::conditional_t<Config::kFloat8, CodeLoader<Config>, RowLoader<Config>>;

  const AttentionParams& params;
  const Pattern& pattern;
  const TileState<Config>& state;
  uint32_t ring;
  SlotLoader key_rows, value_rows;
  Walk walk;
  // In registers: what lies in shared memory is read again after every copy.
  const Element* key_head;
  const Element* value_head;
  Interval keys_loaded;
  RingSteps<Config> steps;

  __device__ __forceinline__ static SlotLoader slot_loader(int32_t columns, bool aligned) {
    if constexpr (Config::kFloat8) {
      return {columns};
    } else {
      return {columns, aligned};
    }
  }
  __device__ __forceinline__ static int after(int slot) {
    return slot + 1 == Config::kStages ? 0 : slot + 1;
  }
  __device__ __forceinline__ static uint32_t keys(uint32_t ring, int slot) {
    return ring + slot * Config::kSlotBytes;
  }
  __device__ __forceinline__ static uint32_t values(uint32_t ring, int slot) {
    return keys(ring, slot) + Config::kTileBytes;
  }

  /// Loads the next step, if there is one, and closes the group of its copies.
  __device__ __forceinline__ void load_next(int slot) {
    const Step step = walk.next();
    steps.push(step, slot);
    if (step.chunk < walk.end_chunk) load(step, keys(ring, slot), values(ring, slot));
    ptx::cp_async_commit();
  }

 private:
  __device__ __forceinline__ void load(const Step& step, uint32_t key_to, uint32_t value_to) const {
    const View view = step.lead ? state.work.slice.lead.view : state.work.slice.keys;
    Interval valid = step.lead && !pattern.shared_axis() ? state.walk.lead_loaded : keys_loaded;
    valid = {valid.begin - step.start, valid.end - step.start};
    const TensorView& key = params.keys.key;
    const TensorView& value = params.keys.value;
    if constexpr (kKind == Kind::kStrided) {
      if (params.keys.paged()) {
        key_rows.load_each(key_to, valid, [&](int r) {
          return row_at(key_head, key, place(view.at(step.start + r)));
        });
        value_rows.load_each(value_to, valid, [&](int r) {
          return row_at(value_head, value, place(view.at(step.start + r)));
        });
        return;
      }
    }
    // Consecutive keys of a step lie in one page: pages are whole numbers of steps.
    const bool strided = kKind == Kind::kStrided;
    const KeyPlace first = place(strided ? view.at(step.start) : step.start);
    const int64_t stride = strided ? view.step : 1;
    key_rows.load(key_to, row_at(key_head, key, first), stride * key.stride_s, valid);
    value_rows.load(value_to, row_at(value_head, value, first), stride * value.stride_s, valid);
  }

  __device__ __forceinline__ KeyPlace place(int32_t j) const {
    return place_of_key<kKind>(params.keys, state, j);
  }
};

}  // namespace sparse_attn::cuda::decode
