// A warp's ring of groups of the sketch, which cp.async fills ahead.
#pragma once

#include "../common/ptx/cp_async.cuh"
#include "config.cuh"

namespace sparse_attn::cuda {

/// Copies up to kMost bytes, the lane's 16 of each 512; of `bytes`, a multiple of 16.
template <int kMost>
__device__ __forceinline__ void copy_bytes(uint32_t to, const char* from, int32_t bytes) {
  const int own = static_cast<int>(threadIdx.x) % 32 * 16;
#pragma unroll
  for (int begin = 0; begin < kMost; begin += 32 * 16) {
    if (begin + own < bytes) ptx::cp_async_16_once(to + begin + own, from + begin + own, true);
  }
}
/// The same of all of them.
template <int kBytes>
__device__ __forceinline__ void copy_all(uint32_t to, const char* from) {
  if constexpr (kBytes % (32 * 16) != 0) {
    copy_bytes<kBytes>(to, from, kBytes);
  } else {
    const int own = static_cast<int>(threadIdx.x) % 32 * 16;
#pragma unroll
    for (int begin = 0; begin < kBytes; begin += 32 * 16) {
      ptx::cp_async_16_once(to + own + begin, from + own + begin, true);
    }
  }
}

/// The groups of a key head, on their way to a ring of kSlots slots of kGroups of them.
template <typename Config>
struct GroupRing {
  const SelectParams& params;
  const SketchView& sketch;
  int32_t batch;
  Interval seen;  // keys that some row sees
  char* memory;   // of the warp
  // Of the key head in entry 0, or in the batch entry where entries are those.
  const char *codes, *ranges;
  int32_t code_bytes, range_bytes;  // of a group
  int32_t entry_groups;             // and, where it is a power of 2, its exponent; else -1
  int32_t entry_shift;
  bool joined;  // a slot's groups lie side by side and are whole
  int32_t end;  // of the groups that the head has, as far as some row sees them

  __device__ __forceinline__ GroupRing(const SelectParams& params, const SketchView& sketch,
                                       int32_t batch, int32_t head_kv, int32_t groups,
                                       Interval seen, char* memory)
      : params(params), sketch(sketch), batch(batch), seen(seen), memory(memory) {
    entry_groups = sketch.rows / sketch.group;
    entry_shift = __popc(entry_groups) == 1 ? __ffs(entry_groups) - 1 : -1;
    code_bytes = sketch.group * Config::kRowBytes;
    range_bytes = 2 * params.problem.head_dim * static_cast<int32_t>(sizeof(typename Config::T));
    const int64_t first =
        (int64_t{sketch.paged ? 0 : batch} * sketch.heads + head_kv) * entry_groups;
    codes = reinterpret_cast<const char*>(sketch.codes) + first * code_bytes;
    ranges = static_cast<const char*>(sketch.ranges) + first * range_bytes;
    joined = entry_groups % Config::kGroups == 0 && code_bytes == Config::kCodeBytes &&
             range_bytes == Config::kRangeBytes;
    end = imin(groups, ceil_div(seen.end, sketch.group));
  }

  __device__ __forceinline__ char* slot(int slot) const {
    return memory + slot * Config::kSlotBytes;
  }
  __device__ __forceinline__ bool is_visible(int32_t group) const {
    return group < end && (group + 1) * sketch.group > seen.begin;
  }
  /// Loads what is seen of the groups from `first` on, a multiple of their number, and closes the
  /// group of its copies.
  __device__ __forceinline__ void load(int32_t first, int to_slot) const {
    const uint32_t to = ptx::shared_address(slot(to_slot));
    if (joined && is_visible(first) && first + Config::kGroups <= end) {
      const int64_t at = place(first);
      copy_all<Config::kGroups * Config::kCodeBytes>(to, codes + at * code_bytes);
      copy_all<Config::kGroups * Config::kRangeBytes>(to + kRanges, ranges + at * range_bytes);
    } else {
#pragma unroll 1
      for (int i = 0; i < Config::kGroups; ++i) {
        if (!is_visible(first + i)) continue;
        const int64_t at = place(first + i);
        copy_bytes<Config::kCodeBytes>(to + i * Config::kCodeBytes, codes + at * code_bytes,
                                       code_bytes);
        copy_bytes<Config::kRangeBytes>(to + kRanges + i * Config::kRangeBytes,
                                        ranges + at * range_bytes, range_bytes);
      }
    }
    ptx::cp_async_commit();
  }
  /// Where the ranges of a slot's groups begin.
  static constexpr int kRanges = Config::kGroups * Config::kCodeBytes;

 private:
  /// Groups from the key head's first one to where `group` lies.
  __device__ __forceinline__ int64_t place(int32_t group) const {
    if (!sketch.paged) return group;
    const int32_t entry = entry_shift >= 0 ? group >> entry_shift : group / entry_groups;
    const int64_t page = params.keys.existing_page(params.keys.entry_of(batch, entry));
    return page * sketch.heads * entry_groups + (group - entry * entry_groups);
  }
};

}  // namespace sparse_attn::cuda
