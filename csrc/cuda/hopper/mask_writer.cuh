// The mask writer: one warp that walks the key tiles beside the loaders and writes, for each tile
// whose mask does not slide, which of its keys every row sees. It runs ahead of the consumers, so
// that what a pattern costs in a tile is not on their path: they read two words a thread.
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
      if (work.written) write_masks(work);
      __syncwarp();
      if (lane_ == 0) ptx::mbarrier_arrive(ptx::smem_address(&smem_.work_empty[work_.index]));
      work_.advance();
    }
  }

 private:
  __device__ __forceinline__ void write_masks(const Work& work) {
    bool found = false;
    TileSource<C> source(args_, work);
    for (Step step = source.first(); step.valid; step = source.next()) {
      if (source.mask(step).kind != MaskKind::kWritten) continue;
      if (!found) find_seen(work);
      found = true;
      ptx::mbarrier_wait(ptx::smem_address(smem_.mask_empty), mask_.parity);
      if (step.lead) {
        write_lead(work, step.key);
      } else {
        write_main(work, step.key);
      }
      ptx::mbarrier_arrive(ptx::smem_address(smem_.mask_full));  // a lane vouches for its rows
      mask_.advance();
    }
  }

  /// What each of the lane's rows sees of both views. Divisions are done here, once a query tile.
  __device__ __forceinline__ void find_seen(const Work& work) {
    const AttentionParams& params = args_.params;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int32_t r = work.first_row + i * kWarp + lane_;
      main_[i] = lead_[i] = counted_[i] = {};
      if (r >= work.slice.rows.length) continue;
      Interval bounds =
          params.bounds.row(work.batch, work.head, work.slice.rows.at(r), params.seq_kv);
      Row row = make_row(params.pattern, work.slice, r, bounds);
      main_[i] = seen_main(params.pattern, row).second;
      if (params.pattern.lead.length == 0) continue;
      Seen lead = seen_lead(params.pattern, work.slice, row);
      lead_[i] = lead.first;
      counted_[i] = lead.counted;
    }
  }

  /// A tile of the main view, made of one box or, in a list, of several; lane i holds the key of
  /// box i. On an axis of both views rows see what they see of either.
  __device__ __forceinline__ void write_main(const Work& work, int32_t key) {
    const bool both = args_.params.pattern.lead.length > 0 && args_.params.pattern.shared_axis();
    const int32_t bits = args_.box_rows / 4;  // of a box in a word
    const uint32_t whole_box = columns_below(args_.box_rows);
#pragma unroll 1
    for (int w = 0; w < RowMask::kWords; ++w) {
      uint32_t word[kRows] = {};
#pragma unroll 1
      for (int32_t box = 0; box * args_.box_rows < C::BLOCK_KV; ++box) {
        const int32_t first = __shfl_sync(~0u, key, box);
        if (first == kUnlimited) break;
        const bool whole = !work.tiles.needs_mask({first, first + args_.box_rows});
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          uint32_t columns = whole ? ~0u : columns_in(main_[i], first + 2 * w);
          if (both) columns |= columns_in(lead_[i], first + 2 * w);
          word[i] |= (columns & whole_box) << (box * bits);
        }
      }
      store(word, w);
    }
  }

  __device__ __forceinline__ void write_lead(const Work& work, int32_t key) {
#pragma unroll 1
    for (int w = 0; w < RowMask::kWords; ++w) {
      uint32_t word[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) word[i] = columns_in(lead_[i], key + 2 * w);
      if (!args_.params.pattern.shared_axis()) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          word[i] =
              without_counted(args_.params.pattern, work.slice, word[i], counted_[i], key + 2 * w);
        }
      }
      store(word, w);
    }
  }

  __device__ __forceinline__ void store(const uint32_t (&word)[kRows], int w) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) smem_.mask[i * kWarp + lane_].word[w] = word[i];
  }

  const Arguments& args_;
  SharedStorage<C>& smem_;
  const int lane_;
  Interval main_[kRows], lead_[kRows], counted_[kRows];  // what rows see, see pattern.h's Seen
  Ring<1> mask_;
  Ring<SharedStorage<C>::kWorkSlots> work_;
};

}  // namespace sparse_attn::cuda::hopper
