// What joins the scores of a key tile after softcap: attn_mask, from the tiles that mask_copies.cuh
// brings or straight from memory, into the accumulator's layout, and ALiBi. A thread holds columns
// 2 t, 2 t + 1, 8 + 2 t, ... of two rows.
#pragma once

#include <type_traits>

#include "../common/ptx/mbarrier.cuh"
#include "../common/types.cuh"
#include "arguments.h"
#include "config.h"
#include "padding.h"

namespace sparse_attn::cuda::hopper {

/// Positions of a key tile's columns.
template <class C>
class TileKeys {
 public:
  __device__ __forceinline__ TileKeys(const Arguments& args, const StepInfo& info,
                                      const SharedStorage<C>& smem, int32_t info_slot)
      : box_rows_(args.box_rows),
        last_box_(args.boxes - 1),
        key_(info.key),
        step_(C::kListed ? 1 : info.key_step) {
    if constexpr (C::kListed) box_keys_ = smem.box_keys[info_slot];
  }

  __device__ __forceinline__ int32_t step() const { return step_; }
  /// That of column 8 * eight. A box that is missing in a list has keys past those that exist.
  __device__ __forceinline__ int32_t at(int eight) const {
    if constexpr (!C::kListed) return key_ + 8 * eight * step_;
    const int32_t box = 8 * eight >> (31 - __clz(box_rows_));  // a power of 2
    return box_keys_[box] + (8 * eight & (box_rows_ - 1));
  }
  /// That of a column from there on, cut to `last`: int32 may not hold keys that do not exist.
  __device__ __forceinline__ int32_t at_most(int eight, int32_t column, int32_t last) const {
    if constexpr (C::kListed) return imin(at(eight) + column, last);
    const int64_t key = key_ + int64_t{8 * eight + column} * step_;
    return key < last ? static_cast<int32_t>(key) : last;
  }
  /// Whether the tile ends within so many keys that follow each other, or each box of a list does.
  __device__ __forceinline__ bool end_within(int32_t keys) const {
    return (C::kListed ? box_keys_[last_box_] + box_rows_ : key_ + C::BLOCK_KV) <= keys;
  }

 private:
  const int32_t* box_keys_ = nullptr;  // of a list, ascending
  const int32_t box_rows_, last_box_;
  const int32_t key_, step_;  // of a range
};

template <class C>
class ScoreBias {
  using Element = std::conditional_t<C::kDtype == Dtype::kFloat16, __half, __nv_bfloat16>;

 public:
  __device__ __forceinline__ ScoreBias(const Arguments& args, SharedStorage<C>& smem)
      : args_(args), smem_(smem) {}

  /// Finds what the tiles of a query tile need.
  __device__ __forceinline__ void begin(const Work& work) {
    adds_ = args_.biased || !mask_is_bounds(work);
  }
  /// Whether scores need add().
  __device__ __forceinline__ bool adds() const { return C::kBiased && adds_; }

  /// Multiplies the scores by `rate` and adds: for rows `tile_row` and `tile_row` + 8 of the query
  /// tile and the key tile's columns from `column` on. What a mask holds past the keys or rows that
  /// exist counts for none: those are masked after.
  __device__ __forceinline__ void add(float (&s)[C::BLOCK_KV / 2], float rate, const Work& work,
                                      const TileKeys<C>& keys, int32_t tile_row, int32_t column) {
    const int32_t row = work.first_row + tile_row;
    switch (args_.params.scores.mask.kind) {
      case MaskKind::kNone:
#pragma unroll
        for (int i = 0; i < C::BLOCK_KV / 2; ++i) s[i] *= rate;
        break;
      case MaskKind::kBool:
        add_mask<uint8_t>(s, rate, work, keys, row, column);
        break;
      case MaskKind::kFloat32:
        add_mask<float>(s, rate, work, keys, row, column);
        break;
      default:  // of the query's dtype
        if constexpr (C::kCopiesMask) {
          if (args_.copies_mask) {
            add_copied(s, rate, tile_row, column);
            break;
          }
        }
        add_mask<Element>(s, rate, work, keys, row, column);
    }
    if (args_.params.scores.alibi.slopes != nullptr) add_alibi(s, work, keys, row, column);
  }

 private:
  /// Whether the bounds of the keys say all that the mask does.
  __device__ __forceinline__ bool mask_is_bounds(const Work& work) const {
    if (!args_.mask_has_bounds) return false;
    const BoundsView& bounds = args_.params.scores.bounds;
    return bounds.data[work.batch * bounds.stride_b + work.head * bounds.stride_h + kPaddingWhole];
  }

  __device__ __forceinline__ static float bias_of(uint8_t allowed) {
    return allowed != 0 ? 0.0f : -INFINITY;
  }
  template <typename T>
  __device__ __forceinline__ static float bias_of(T bias) {
    return to_float(bias);
  }

  /// The tile that was copied for this step, in slabs of swizzled rows: 16 bytes hold the columns
  /// of four threads, and rows r and r + 8 are swizzled alike.
  __device__ __forceinline__ void add_copied(float (&s)[C::BLOCK_KV / 2], float rate, int32_t row,
                                             int32_t column) {
    constexpr int32_t kRowBytes = kMaskColumns * 2, kChunks = kRowBytes / 16;
    const uint8_t* own = smem_.mask_tile[ring_.index] + row * kRowBytes + column * sizeof(Element);
    const int32_t swizzle = row / 2 % kChunks;
    ptx::mbarrier_wait(ptx::shared_address(&smem_.mask_tile_full[ring_.index]), ring_.parity);
#pragma unroll
    for (int c = 0; c < C::BLOCK_KV / 8; ++c) {
      const uint8_t* at = own + c / kChunks * C::kMaskSlabBytes + (c % kChunks ^ swizzle) * 16;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        add_pair(s, 4 * c + 2 * r, rate, reinterpret_cast<const Element*>(at + r * 8 * kRowBytes));
      }
    }
    __syncwarp();
    if (threadIdx.x % kWarp == 0) {
      ptx::mbarrier_arrive(ptx::shared_address(&smem_.mask_tile_empty[ring_.index]));
    }
    ring_.advance();
  }

  template <typename T>
  __device__ __forceinline__ void add_mask(float (&s)[C::BLOCK_KV / 2], float rate,
                                           const Work& work, const TileKeys<C>& keys, int32_t row,
                                           int32_t column) const {
    const MaskView& mask = args_.params.scores.mask;
    const T* of_head =
        static_cast<const T*>(mask.data) + work.batch * mask.stride_b + work.head * mask.stride_h;
    const int32_t num_keys = args_.params.problem.seq_kv;
    const bool pairs = args_.mask_in_pairs && keys.end_within(num_keys);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t i = work.slice.rows.at(imin(row + 8 * r, work.slice.rows.length - 1));
      const T* of_row = of_head + i * mask.stride_q;
      if (pairs) {
#pragma unroll
        for (int c = 0; c < C::BLOCK_KV / 8; ++c) {
          add_pair(s, 4 * c + 2 * r, rate, of_row + keys.at(c) + column);
        }
        continue;
      }
#pragma unroll
      for (int c = 0; c < C::BLOCK_KV / 4; ++c) {
        const int32_t key = keys.at_most(c / 2, column + c % 2, num_keys - 1);
        float& score = s[c / 2 * 4 + 2 * r + c % 2];
        score = fmaf(score, rate, bias_of(load(of_row + key * mask.stride_k)));
      }
    }
  }

  /// To scores `at` and `at` + 1, of two keys that lie in one aligned word.
  template <typename T>
  __device__ __forceinline__ static void add_pair(float (&s)[C::BLOCK_KV / 2], int at, float rate,
                                                  const T* first) {
    struct alignas(2 * sizeof(T)) Pair {
      T even, odd;
    };
    const Pair pair = *reinterpret_cast<const Pair*>(first);
    s[at] = fmaf(s[at], rate, bias_of(pair.even));
    s[at + 1] = fmaf(s[at + 1], rate, bias_of(pair.odd));
  }

  /// A load that stays where it is, so that its address takes registers for a moment only.
  __device__ __forceinline__ static float load(const float* at) {
    float x;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(at));
    return x;
  }
  __device__ __forceinline__ static uint8_t load(const uint8_t* at) {
    uint32_t x;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(x) : "l"(at));
    return static_cast<uint8_t>(x);
  }
  __device__ __forceinline__ static Element load(const Element* at) {
    uint16_t x;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(x) : "l"(at));
    return reinterpret_cast<const Element&>(x);
  }

  /// Distances in float32, exact up to 2^24.
  __device__ __forceinline__ void add_alibi(float (&s)[C::BLOCK_KV / 2], const Work& work,
                                            const TileKeys<C>& keys, int32_t row,
                                            int32_t column) const {
    const float slope = args_.params.scores.alibi.bias(work.batch, work.head, 0, 1);
    const float step = static_cast<float>(keys.step());
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t position = work.slice.position(row + 8 * r) - column * keys.step();
      const float first = static_cast<float>(position - keys.at(0));
#pragma unroll
      for (int c = 0; c < C::BLOCK_KV / 4; ++c) {
        const float eight = C::kListed ? static_cast<float>(position - keys.at(c / 2))
                                       : fmaf(step, -static_cast<float>(8 * (c / 2)), first);
        const float distance = fabsf(c % 2 == 0 ? eight : eight - step);
        float& score = s[c / 2 * 4 + 2 * r + c % 2];
        score = fmaf(slope, distance, score);
      }
    }
  }

  const Arguments& args_;
  SharedStorage<C>& smem_;
  bool adds_ = false;
  Ring<C::kMaskStages> ring_;  // of copied tiles
};

}  // namespace sparse_attn::cuda::hopper
