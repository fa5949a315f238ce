// A warp's ring of groups of the sketch, which cp.async fills ahead.
#pragma once

#include "../common/ptx/cp_async.cuh"
#include "config.cuh"

namespace sparse_attn::cuda {

/// Copies up to `most` bytes, a multiple of 16; the lanes of a warp share them.
template <int kMost>
__device__ __forceinline__ void copy_bytes(uint32_t to, const void* from, int32_t bytes) {
#pragma unroll
  for (int begin = 0; begin < kMost; begin += 32 * 16) {
    const int at = begin + static_cast<int>(threadIdx.x) % 32 * 16;
    if (at < bytes) ptx::cp_async_16(to + at, static_cast<const char*>(from) + at, true);
  }
}

/// The groups of a key head, on their way to a ring of kSlots slots of kGroups of them.
template <typename Config>
struct GroupRing {
  const SelectParams& params;
  const SketchView& sketch;
  int32_t batch, head_kv;
  int32_t groups;      // of the head
  Interval seen;       // keys that some row sees
  const char* memory;  // of the warp

  __device__ __forceinline__ const char* slot(int slot) const {
    return memory + slot * Config::kSlotBytes;
  }
  __device__ __forceinline__ bool is_visible(int32_t group) const {
    return group < groups && group * sketch.group < seen.end &&
           (group + 1) * sketch.group > seen.begin;
  }
  /// Loads what is seen of the groups from `first` on, and closes the group of its copies.
  __device__ __forceinline__ void load(int32_t first, int to_slot) const {
    const uint32_t to = ptx::shared_address(slot(to_slot));
#pragma unroll
    for (int i = 0; i < Config::kGroups; ++i) {
      if (is_visible(first + i)) load_group(first + i, to + i * Config::kGroupBytes);
    }
    ptx::cp_async_commit();
  }

 private:
  __device__ __forceinline__ void load_group(int32_t group, uint32_t to) const {
    const int32_t entry_groups = sketch.rows / sketch.group;
    int32_t entry = batch;
    if (sketch.paged) {
      entry = params.keys.page_of(batch, group * sketch.group);
      group %= entry_groups;
    }
    const int64_t at = (int64_t{entry} * sketch.heads + head_kv) * entry_groups + group;
    const int32_t code_bytes = sketch.group * Config::kRowBytes;
    const int32_t range_bytes =
        2 * params.problem.head_dim * static_cast<int32_t>(sizeof(typename Config::T));
    copy_bytes<Config::kCodeBytes>(
        to, reinterpret_cast<const char*>(sketch.codes) + at * code_bytes, code_bytes);
    copy_bytes<Config::kRangeBytes>(to + Config::kCodeBytes,
                                    static_cast<const char*>(sketch.ranges) + at * range_bytes,
                                    range_bytes);
  }
};

}  // namespace sparse_attn::cuda
