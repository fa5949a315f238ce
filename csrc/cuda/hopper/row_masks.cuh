// What a thread's two rows see of a key tile that needs a mask, as a bit a column: the mask slides,
// or the mask writer has written it, or its bits were copied; in half tiles, where no warp writes
// masks, consumers find it themselves.
#pragma once

#include "../common/ptx/mbarrier.cuh"
#include "arguments.h"
#include "config.h"
#include "mask_words.h"

namespace sparse_attn::cuda::hopper {

template <class C>
class RowMasks {
  using Work = hopper::Work;

 public:
  __device__ __forceinline__ RowMasks(const Arguments& args, SharedStorage<C>& smem, int consumer)
      : args_(args),
        smem_(smem),
        consumer_(consumer),
        warp_(threadIdx.x / kWarp % 4),
        lane_(threadIdx.x % kWarp) {}

  /// `row` is the thread's first one in the query tile, `slot` that of the step's info.
  __device__ __forceinline__ void take(const StepInfo& info, int32_t row, const Work& work,
                                       int32_t slot, uint32_t (&visible)[2]) {
    if (C::kPlain || info.mask == TileMask::kSliding) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        visible[r] = columns_in(info.columns.row(row + 8 * r), 2 * (lane_ % 4));
      }
      return;
    }
    if (C::kHalf) {
      find(info, row, work, smem_.boxes[slot], visible);
      if (info.mask == TileMask::kPartial) keep_partial(row, work, smem_.boxes[slot], visible);
      return;
    }
    const int32_t own_row = kWarpRows * warp_ + lane_ / 4;
    const RowMask* mask = smem_.mask[mask_.index][consumer_];
    ptx::mbarrier_wait(ptx::smem_address(&smem_.mask_full[mask_.index][consumer_]), mask_.parity);
    if (C::kListed && info.mask == TileMask::kCopied) {
      take_bits(reinterpret_cast<const uint32_t*>(mask), own_row, visible);
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) visible[r] = mask[own_row + 8 * r].word[lane_ % 4];
    }
    __syncwarp();
    if (lane_ == 0)
      ptx::mbarrier_arrive(ptx::smem_address(&smem_.mask_empty[mask_.index][consumer_]));
    mask_.advance();
  }

 private:
  /// Brings the thread's columns of 32 keys behind those that were seen before.
  __device__ __forceinline__ uint32_t join(uint32_t seen, uint32_t keys) const {
    return __byte_perm(seen, top_of_thread(keys, lane_ % 4), 0x7321);
  }

  /// Copied bits: those of a box after those of the box before, row by row.
  __device__ __forceinline__ void take_bits(const uint32_t* boxes, int32_t row,
                                            uint32_t (&visible)[2]) const {
    if (C::BLOCK_KV == 32 * RowMask::kWords && args_.boxes == 1) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const RowMask keys = reinterpret_cast<const RowMask*>(boxes)[row + 8 * r];
        uint32_t seen = 0;
#pragma unroll
        for (int32_t w = 0; w < RowMask::kWords; ++w) {
          seen = join(seen, keys.word[w]);
        }
        visible[r] = seen;
      }
      return;
    }
    const int32_t in_row = args_.box_rows / 32;  // words of a box: 1, 2 or 4
    const int32_t shift = in_row / 2;
    boxes += row * in_row;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t seen = 0;
#pragma unroll
      for (int32_t w = 0; w < RowMask::kWords; ++w) {
        const int32_t at = (w >> shift) * kConsumerRows * in_row + (w & (in_row - 1));
        seen = join(seen, boxes[at + 8 * r * in_row]);
      }
      visible[r] = seen;
    }
  }

  /// In half tiles: of the listed boxes, one after the other.
  __device__ __forceinline__ void find(const StepInfo& info, int32_t first_row, const Work& work,
                                       const int32_t* boxes, uint32_t (&visible)[2]) const {
    const AttentionParams& params = args_.params;
#pragma unroll 1
    for (int r = 0; r < 2; ++r) {
      const int32_t row = work.first_row + first_row + 8 * r;
      uint32_t word = 0;
      if (row < work.slice.rows.length) {
        const Interval bounds = params.scores.bounds.row(
            work.batch, work.head, work.slice.rows.at(row), params.problem.seq_kv);
        const Interval keys = make_row(params.pattern, work.slice, row, bounds).keys;
#pragma unroll 1
        for (int32_t box = 0; box < args_.boxes; ++box) {
          int32_t first = boxes[box];
          if (info.mask == TileMask::kPartial) {
            if (first < 0) break;
            first = work.runs.keys(first).begin;
          }
          const Interval own = intersect(keys, {first, first + args_.box_rows});
          word |= columns_in(own, first - box * args_.box_rows + 2 * (lane_ % 4));
        }
      }
      (r == 0 ? visible[0] : visible[1]) = word;
    }
  }

  /// Takes from the words what the bits of partial blocks leave out.
  __device__ __forceinline__ void keep_partial(int32_t first_row, const Work& work,
                                               const int32_t* boxes, uint32_t (&visible)[2]) const {
    const BlockList& list = args_.params.pattern.list;
    const int32_t row = (work.first_row + first_row) % list.block_q;
    const int32_t in_word = args_.box_rows / 4;  // columns of a box
#pragma unroll 1
    for (int32_t box = 0; box < args_.boxes && boxes[box] >= 0; ++box) {
      const BlockBits bits = list.bits_at(list.bits_row(work.runs, boxes[box]));
      if (!bits.present()) continue;
      const int32_t key = work.runs.keys(boxes[box]).begin % list.block_kv;
      const uint32_t hidden = low_bits(in_word) << (box * in_word);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t* words = bits.row(row + 8 * r) + key / 32;
        const uint32_t seen = thread_bits(words, key % 32, args_.box_rows, lane_ % 4);
        visible[r] &= ~hidden | seen << (box * in_word);
      }
    }
  }

  const Arguments& args_;
  SharedStorage<C>& smem_;
  const int consumer_, warp_, lane_;
  Ring<C::kMasks> mask_;
};

}  // namespace sparse_attn::cuda::hopper
