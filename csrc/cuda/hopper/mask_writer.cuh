// The mask writer: one warp that walks the key tiles beside the loaders and writes, for each tile
// whose mask does not slide, which of its keys every row sees. It runs ahead of the consumers, so
// that what a pattern costs in a tile is not on their path: they read two words a thread.
#pragma once

#include "../common/ptx/mbarrier.cuh"
#include "../common/ptx/shared.cuh"
#include "mask_copies.cuh"
#include "mask_words.h"
#include "tile_source.cuh"
#include "work_ring.cuh"

namespace sparse_attn::cuda::hopper {

template <class C>
class MaskWriter {
 public:
  __device__ __forceinline__ MaskWriter(const Arguments& args, const TensorMaps& maps,
                                        SharedStorage<C>& smem)
      : args_(args), smem_(smem), copies_(args, maps, smem), lane_(threadIdx.x % kWarp) {
    mask_.parity = 1;  // the buffers are empty at first
  }

  __device__ __forceinline__ void run() {
    for (;;) {
      const Work& work = wait_work<C>(smem_, work_);
      if (work.batch < 0) break;
      const bool copies = C::kCopiesMask && args_.copies_mask;
      if (work.written || copies) write_masks(work, copies);
      release_work<C>(smem_, work_, lane_);
    }
  }

 private:
  /// The bits of a list's box: words of the query tile's first row from `shift` on; null for none.
  struct BoxWords {
    const uint32_t* words = nullptr;
    int32_t shift = 0;
  };

  /// Those of this lane's box.
  __device__ __forceinline__ BoxWords bits_of(const Work& work, const Step& step) const {
    const BlockList& list = args_.params.pattern.list;
    const BlockBits bits = list.bits_at(step.bits);
    if (!bits.present()) return {};
    const int32_t key = step.key % list.block_kv;
    return {bits.row(work.first_row % list.block_q) + key / 32, key % 32};
  }

  /// Those of the key tiles that need one, and tiles of attn_mask if `copies`.
  __device__ __forceinline__ void write_masks(const Work& work, bool copies) {
    TileSource<C, true> source(args_, work);
    for (Step step = source.first(); step.valid; step = source.next()) {
      if constexpr (C::kCopiesMask) {
        if (copies && lane_ == 0) copies_.copy(work, step.key);
      }
      if (!source.needs_mask(step)) continue;
      const TileMask kind = source.mask(step).kind;
      if (kind < TileMask::kWritten) continue;
      const BoxWords bits = has_bits_in_words<C>(kind) ? bits_of(work, step) : BoxWords{};
#pragma unroll 1
      for (int consumer = 0; consumer < C::kConsumers; ++consumer) {
        const int32_t first = consumer * kConsumerRows;
        const uint32_t full = ptx::shared_address(&smem_.mask_full[mask_.index][consumer]);
        RowMask* mask = smem_.mask[mask_.index][consumer];
        ptx::mbarrier_wait(ptx::shared_address(&smem_.mask_empty[mask_.index][consumer]),
                           mask_.parity);
#pragma unroll 1
        for (int32_t row = lane_; row < kConsumerRows; row += kWarp) {
          mask[row] = mask_of(work, step, bits, first + row);
        }
        ptx::mbarrier_arrive(full);  // each lane for its own rows
      }
      mask_.advance();
    }
  }

  /// What a row of the query tile sees of the key tile. Short code that is run again beats long
  /// code that is fetched: nothing is kept from tile to tile.
  __device__ __forceinline__ RowMask mask_of(const Work& work, const Step& step,
                                             const BoxWords& bits, int32_t row_idx) const {
    const AttentionParams& params = args_.params;
    const int32_t r = work.first_row + (C::kPacks ? args_.packing.row(row_idx) : row_idx);
    const bool exists = r < work.slice.rows.length;
    const int32_t i = exists ? work.slice.rows.at(r) : 0;
    Interval bounds = params.scores.bounds.row(work.batch, work.head, i, params.problem.seq_kv);
    Row row = make_row(params.pattern, work.slice, r, bounds);
    if (!exists) row = {};
    return step.lead ? lead_mask(work, row, step.key) : main_mask(row, step, bits, row_idx);
  }

  __device__ __forceinline__ RowMask lead_mask(const Work& work, const Row& row,
                                               int32_t key) const {
    const Pattern& pattern = args_.params.pattern;
    const Seen seen = seen_lead(pattern, work.slice, row);
    RowMask mask = row_columns(seen.first, key);
    if (pattern.dilation == 1) {
      const RowMask counted = row_columns(seen.counted, key);
#pragma unroll
      for (int i = 0; i < RowMask::kWords; ++i) mask.word[i] &= ~counted.word[i];
      return mask;
    }
#pragma unroll 1
    for (int i = 0; i < RowMask::kWords; ++i) {  // the words go round: registers have no index
      const uint32_t word =
          without_class(pattern, work.slice, mask.word[0], seen.counted, key + 2 * i);
      mask = {mask.word[1], mask.word[2], mask.word[3], word};
    }
    return mask;
  }

  /// A tile of the main view, made of one box or, in a list, of several; lane i holds the key of
  /// box i.
  __device__ __forceinline__ RowMask main_mask(const Row& row, const Step& step,
                                               const BoxWords& bits, int32_t row_idx) const {
    const Seen seen = seen_main(args_.params.pattern, row);
    const int32_t in_word = args_.box_rows / 4;  // columns of a box
    const uint32_t whole_box = low_bits(in_word);
    RowMask mask = {};
#pragma unroll 1
    for (int32_t box = 0; box * args_.box_rows < C::BLOCK_KV; ++box) {
      const int32_t first = __shfl_sync(~0u, step.key, box);
      if (first == kUnlimited) break;
      RowMask columns = row_columns(seen.second, first);
      if constexpr (C::kLeads) {
        const RowMask lead = row_columns(seen.first, first);
#pragma unroll
        for (int i = 0; i < RowMask::kWords; ++i) columns.word[i] |= lead.word[i];
      }
      if (C::kListed && args_.params.pattern.list.has_bits()) {
        const auto words = reinterpret_cast<const uint32_t*>(
            __shfl_sync(~0u, reinterpret_cast<uint64_t>(bits.words), box));
        const int32_t shift = __shfl_sync(~0u, bits.shift, box);
        const int32_t row_words = ceil_div(args_.params.pattern.list.block_kv, 32);
        if (words != nullptr) {
          keep_bits(words + row_idx * row_words, shift, args_.box_rows, &columns);
        }
      }
#pragma unroll
      for (int i = 0; i < RowMask::kWords; ++i) {
        mask.word[i] |= (columns.word[i] & whole_box) << (box * in_word);
      }
    }
    return mask;
  }

  const Arguments& args_;
  SharedStorage<C>& smem_;
  MaskCopies<C> copies_;  // for kBiased
  const int lane_;
  Ring<C::kMasks> mask_;
  WorkRing<C> work_;
};

}  // namespace sparse_attn::cuda::hopper
