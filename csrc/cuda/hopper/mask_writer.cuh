// The mask writer: one warp that walks the key tiles beside the loaders and writes, for each tile
// that needs a mask, which of its keys every row sees. It runs ahead of the consumers, so that what
// a pattern costs in a tile is not on their path: they read two words a thread.
#pragma once

#include "../common/ptx/mbarrier.cuh"
#include "mask_words.h"
#include "tile_source.cuh"

namespace sparse_attn::cuda::hopper {

template <class C>
class MaskWriter {
  static constexpr int kRows = C::BLOCK_Q / kWarp;  // of a lane: lane, lane + 32, ...

 public:
  __device__ __forceinline__ MaskWriter(const Arguments& args, SharedStorage<C>& smem)
      : args_(args), smem_(smem), lane_(threadIdx.x % kWarp) {
    mask_.parity = 1;  // the buffer is empty at first
  }

  __device__ __forceinline__ void run() {
    for (;;) {
      ptx::mbarrier_wait(ptx::smem_address(&smem_.work_full[work_.index]), work_.parity);
      const Work& work = smem_.work[work_.index];
      if (work.batch < 0) break;
      if (work.masked) write_masks(work);
      __syncwarp();
      if (lane_ == 0) ptx::mbarrier_arrive(ptx::smem_address(&smem_.work_empty[work_.index]));
      work_.advance();
    }
  }

 private:
  __device__ __forceinline__ void write_masks(const Work& work) {
    const bool diagonal = is_diagonal();
    if (!diagonal) find_limits(work);
    TileSource<C> source(args_, work);
    for (Step step = source.first(); step.valid; step = source.next()) {
      if (step.kind == TileKind::kWhole) continue;
      ptx::mbarrier_wait(ptx::smem_address(smem_.mask_empty), mask_.parity);
      if (diagonal) {
        write_diagonal(work, step.key);
      } else {
        write_any(work, step);
      }
      ptx::mbarrier_arrive(ptx::smem_address(smem_.mask_full));  // a lane vouches for its rows
      mask_.advance();
    }
  }

  /// Whether every row's window lies one key behind that of the row above, and nothing else counts.
  __device__ __forceinline__ bool is_diagonal() const {
    const Pattern& pattern = args_.params.pattern;
    return !pattern.list.present() && args_.params.bounds.data == nullptr &&
           pattern.global_count == 0 && pattern.lead.length == 0;
  }

  /// Such a mask is known by where the tile lies to the first row's window and to the keys' ends,
  /// and most often it is the one that was written before.
  __device__ __forceinline__ void write_diagonal(const Work& work, int32_t key) {
    const Pattern& pattern = args_.params.pattern;
    const int32_t v = imax(work.first_row + work.slice.shift - key, -kUnlimited);
    const int32_t right = pattern.causal ? imin(pattern.right, 0) : pattern.right;
    auto clamp = [](int32_t x) { return imax(-C::BLOCK_Q, imin(x, C::BLOCK_KV)); };
    const Interval window = {clamp(v - pattern.left), clamp(v + right + 1)};
    const Interval keys = {clamp(-key), clamp(work.slice.keys.length - key)};
    if (window.begin == window_.begin && window.end == window_.end && keys.begin == keys_.begin &&
        keys.end == keys_.end) {
      return;
    }
    window_ = window;
    keys_ = keys;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int32_t row = i * kWarp + lane_;
      const Interval seen = intersect(keys, {window.begin + row, window.end + row});
      smem_.mask[row] = {columns_in(seen, 0), columns_in(seen, 2), columns_in(seen, 4),
                         columns_in(seen, 6)};
    }
  }

  /// What each of the lane's rows sees.
  __device__ __forceinline__ void find_limits(const Work& work) {
    const AttentionParams& params = args_.params;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int32_t r = work.first_row + i * kWarp + lane_;
      limits_[i] = {};
      if (r >= work.slice.rows.length) continue;
      Interval bounds =
          params.bounds.row(work.batch, work.head, work.slice.rows.at(r), params.seq_kv);
      Row row = make_row(params.pattern, work.slice, r, bounds);
      limits_[i] = {row.keys, row.lead};
    }
  }

  __device__ __forceinline__ void write_any(const Work& work, const Step& step) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      RowMask& mask = smem_.mask[i * kWarp + lane_];
      if (step.kind == TileKind::kLead) {
        write_lead(work, step.key, limits_[i], mask);
      } else {
        write_main(step.key, limits_[i], mask);
      }
    }
  }

  /// A tile of the main view, made of one box or, in a list, of several; lane i holds the key of
  /// box i.
  __device__ __forceinline__ void write_main(int32_t key, const RowLimits& row, RowMask& mask) {
    const int32_t bits = args_.box_rows / 4;  // of a box in a word
    const uint32_t whole_box = args_.box_rows == 128 ? ~0u : (1u << bits) - 1;
    RowMask seen = {};
#pragma unroll 1
    for (int32_t box = 0; box * args_.box_rows < C::BLOCK_KV; ++box) {
      const int32_t first = __shfl_sync(~0u, key, box);
#pragma unroll
      for (int i = 0; i < RowMask::kWords; ++i) {
        uint32_t columns = main_columns(args_.params.pattern, row, first + 2 * i);
        seen.word[i] |= (columns & whole_box) << (box * bits);
      }
    }
    mask = seen;
  }

  __device__ __forceinline__ void write_lead(const Work& work, int32_t key, const RowLimits& row,
                                             RowMask& mask) {
#pragma unroll 1
    for (int i = 0; i < RowMask::kWords; ++i) {
      mask.word[i] = lead_columns(args_.params.pattern, work.slice, row, key + 2 * i);
    }
  }

  const Arguments& args_;
  SharedStorage<C>& smem_;
  const int lane_;
  RowLimits limits_[kRows];
  Interval window_ = {0, 0}, keys_ = {0, -1};  // of the diagonal mask that stands written, none yet
  Ring<1> mask_;
  Ring<SharedStorage<C>::kWorkSlots> work_;
};

}  // namespace sparse_attn::cuda::hopper
