// What a thread's two rows see of a key tile that needs a mask, as a bit a column: the mask slides,
// or the mask writer has written it, or it is the bits of partial blocks; in half tiles, where no
// warp writes masks, consumers find it themselves.
#pragma once

#include "../common/ptx/global.cuh"
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
        lane_(threadIdx.x % kWarp) {
    if constexpr (C::kListed) {
      const int32_t in_row = args.box_rows / 32, word = lane_ % 4;  // words of a box: 1, 2 or 4
      const int32_t row = consumer * kConsumerRows + kWarpRows * warp_ + lane_ / 4;
      box_ = word >> in_row / 2;
      words_ = args.params.pattern.list.bits + int64_t{row} * in_row + (word & (in_row - 1));
    }
  }

  /// Loads the bits of the step's tile, which are its mask; `take_bits` brings them to the thread's
  /// columns. `slot` is that of the step's info.
  __device__ __forceinline__ void ask_bits(int32_t slot) {
    const bool exists = 32 * (lane_ % 4) < C::BLOCK_KV;
    const int32_t first = exists ? smem_.info[slot].bits[box_] : kNotSeen;
    const int32_t in_row = args_.box_rows / 32;
    const uint32_t* words = words_ + int64_t{first} * in_row;
    const uint32_t otherwise = first == kSeenWhole ? ~0u : 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      visible_[r] = ptx::load_global_if(first >= 0, words + 8 * r * in_row, otherwise);
    }
  }

  /// Words of the thread's two rows, one for each 32 keys of the tile, of which each thread of a
  /// quad has read one: the bits of its own columns, in the order of by_thread. A quad's pairs of
  /// bits are transposed as matrices of 4 x 4, by two exchanges.
  __device__ __forceinline__ void take_bits() {
    const bool odd = lane_ & 1, high = lane_ & 2;
    const uint32_t own_pairs = odd ? 0xccccccccu : 0x33333333u, pair_shift = odd ? 30 : 2;
    const uint32_t own_halves = high ? 0xf0f0f0f0u : 0x0f0f0f0fu, half_shift = high ? 28 : 4;
    auto join = [](uint32_t own, int other, uint32_t kept, uint32_t shift) {
      const uint32_t theirs = __shfl_xor_sync(~0u, own, other);
      return (own & kept) | (__funnelshift_l(theirs, theirs, shift) & ~kept);
    };
#pragma unroll
    for (uint32_t& words : visible_) {
      words = join(join(words, 1, own_pairs, pair_shift), 2, own_halves, half_shift);
    }
  }

  /// The mask of another kind. `row` is the thread's first one in the query tile.
  __device__ __forceinline__ void take(const StepInfo& info, int32_t row, const Work& work,
                                       int32_t slot) {
    find_words(info, row, work, slot, visible_);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (C::kListed) visible_[r] = by_thread(visible_[r]);
    }
  }

  /// What was taken: keys that the thread's rows see.
  __device__ __forceinline__ const uint32_t (&visible() const)[2] { return visible_; }

 private:
  /// Masks of the other kinds, those that are not bits of partial blocks.
  __device__ __forceinline__ void find_words(const StepInfo& info, int32_t row, const Work& work,
                                             int32_t slot, uint32_t (&visible)[2]) {
    if (C::kPlain || info.mask == TileMask::kSliding) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        visible[r] = columns_in(info.columns.row(row + 8 * r), 2 * (lane_ % 4));
      }
      return;
    }
    if constexpr (C::kHalf) {
      find(info, row, work, smem_.boxes[slot], visible);
      if (has_bits_in_words<C>(info.mask)) keep_partial(row, work, smem_.boxes[slot], visible);
      return;
    }
    const int32_t own_row = kWarpRows * warp_ + lane_ / 4;
    const RowMask* mask = smem_.mask[mask_.index][consumer_];
    ptx::mbarrier_wait(ptx::shared_address(&smem_.mask_full[mask_.index][consumer_]), mask_.parity);
#pragma unroll
    for (int r = 0; r < 2; ++r) visible[r] = mask[own_row + 8 * r].word[lane_ % 4];
    __syncwarp();
    if (lane_ == 0)
      ptx::mbarrier_arrive(ptx::shared_address(&smem_.mask_empty[mask_.index][consumer_]));
    mask_.advance();
  }

  /// In half tiles: of the listed boxes, one after the other. No branch on the row, and no division
  /// by steps, which are 1 in lists: for those the compiler would keep what products read in
  /// registers of each lane, also where none is taken.
  __device__ __forceinline__ void find(const StepInfo& info, int32_t first_row, const Work& work,
                                       const int32_t* boxes, uint32_t (&visible)[2]) const {
    const AttentionParams& params = args_.params;
    Slice slice = work.slice;
    slice.rows.step = slice.keys.step = 1;
#pragma unroll 1
    for (int r = 0; r < 2; ++r) {
      const int32_t row = work.first_row + first_row + 8 * r;
      const int32_t own_row = imin(row, slice.rows.length - 1);
      const Interval bounds = params.scores.bounds.row(
          work.batch, work.head, slice.rows.at(own_row), params.problem.seq_kv);
      Interval keys = make_row(params.pattern, slice, own_row, bounds).keys;
      if (row != own_row) keys = {};
      uint32_t word = 0;
#pragma unroll 1
      for (int32_t box = 0; box < args_.boxes; ++box) {
        int32_t first = boxes[box];
        if (has_bits_in_words<C>(info.mask)) {
          if (first < 0) break;
          first = work.runs.keys(first).begin;
        }
        const Interval own = intersect(keys, {first, first + args_.box_rows});
        word |= columns_in(own, first - box * args_.box_rows + 2 * (lane_ % 4));
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
  int32_t box_;            // of the word that this thread reads of the bits of each row ...
  const uint32_t* words_;  // ... and where it lies in those of row 0; in lists
  uint32_t visible_[2];
};

}  // namespace sparse_attn::cuda::hopper
