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
      const int64_t at = place(first).of_head(*this);
      copy_all<Config::kGroups * Config::kCodeBytes>(to, codes + at * code_bytes);
      copy_all<Config::kGroups * Config::kRangeBytes>(to + kRanges, ranges + at * range_bytes);
    } else {
#pragma unroll 1
      for (int i = 0; i < Config::kGroups; ++i) {
        if (!is_visible(first + i)) continue;
        const int64_t at = place(first + i).of_head(*this);
        copy_bytes<Config::kCodeBytes>(to + i * Config::kCodeBytes, codes + at * code_bytes,
                                       code_bytes);
        copy_bytes<Config::kRangeBytes>(to + kRanges + i * Config::kRangeBytes,
                                        ranges + at * range_bytes, range_bytes);
      }
    }
    ptx::cp_async_commit();
  }
  /// Calls f(group, where the keys end that the sketch holds of it) for the groups of pages of
  /// which it lacks some of the keys below `keys` that are seen, among those of slots that begin
  /// with `first`, first + step, ...; the lanes share them.
  template <typename F>
  __device__ __forceinline__ void each_lacking(int32_t first, int32_t step, int32_t keys,
                                               const F& f) const {
    if (!sketch.paged) return;
#pragma unroll 1
    for (int32_t at = static_cast<int32_t>(threadIdx.x) % 32;; at += 32) {
      const int32_t group = first + at / Config::kGroups * step + at % Config::kGroups;
      if (group >= end) break;
      if (!is_visible(group)) continue;
      const Place own = place(group);
      const int32_t held = __ldg(sketch.lengths + own.page * entry_groups + own.group);
      const int32_t held_end = group * sketch.group + imax(0, imin(held, sketch.group));
      if (held_end < imin((group + 1) * sketch.group, keys)) f(group, held_end);
    }
  }
  /// Whether there are such groups.
  __device__ __forceinline__ bool lacks_some(int32_t first, int32_t step, int32_t keys) const {
    bool lacks = false;
    each_lacking(first, step, keys, [&](int32_t, int32_t) { lacks = true; });
    return __any_sync(~0u, lacks);
  }
  /// Where the ranges of a slot's groups begin.
  static constexpr int kRanges = Config::kGroups * Config::kCodeBytes;

 private:
  /// A page and a group there; or entry 0 and a group.
  struct Place {
    int64_t page;
    int32_t group;

    /// Groups from the key head's first one.
    __device__ __forceinline__ int64_t of_head(const GroupRing& ring) const {
      return page * ring.sketch.heads * ring.entry_groups + group;
    }
  };
  __device__ __forceinline__ Place place(int32_t group) const {
    if (!sketch.paged) return {0, group};
    const int32_t entry = entry_shift >= 0 ? group >> entry_shift : group / entry_groups;
    return {params.keys.existing_page(params.keys.entry_of(batch, entry)),
            group - entry * entry_groups};
  }
};

}  // namespace sparse_attn::cuda
