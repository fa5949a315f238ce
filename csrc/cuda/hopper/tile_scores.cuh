// What becomes of the scores of a key tile before they are exponentiated: their scale, softcap and
// biases, what rows do not see, thresholds of token top-k, and the rows' new maxima.
#pragma once

#include "arguments.h"
#include "config.h"
#include "row_masks.cuh"
#include "score_bias.cuh"
#include "small_cap.cuh"
#include "softmax.cuh"
#include "topk_keep.cuh"

namespace sparse_attn::cuda::hopper {

/// Whether scores may be so large that maxima come off them.
template <class C, bool kTransforms>
__device__ __forceinline__ bool are_large(const Arguments& args) {
  return kTransforms && args.transform && (!args.capped || (C::kBiased && args.biased));
}

/// Those of a consumer's thread. `work` is the plan of the query tile, `info` and `slot` are those
/// of the step.
template <class C>
class TileScores {
  using ScoreFragment = float[C::BLOCK_KV / 2];
  using Work = hopper::Work;

 public:
  __device__ __forceinline__ TileScores(const Arguments& args, SharedStorage<C>& smem, int consumer)
      : args_(args),
        smem_(smem),
        bias_(args, smem),
        masks_(args, smem, consumer),
        consumer_(consumer),
        warp_(threadIdx.x / kWarp % 4),
        lane_(threadIdx.x % kWarp) {}

  /// Whether scores are more than scaled.
  __device__ __forceinline__ bool transform() const { return args_.transform || bias_.adds(); }

  /// What makes exponents of 2 of the tile's scores.
  __device__ __forceinline__ float scale_log2() const {
    return C::kScaled ? scale_log2_ : args_.scale_log2;
  }

  /// Takes what is to be known of the rows of a query tile that begins.
  __device__ __forceinline__ void begin(const Work& work) {
    if (C::kScaled) scale_log2_ = args_.scale_log2 * (args_.transform ? 1.0f : key_scale(work));
    if constexpr (C::kBiased) bias_.begin(work);
    if constexpr (C::kTop) {
      const int64_t head = int64_t{work.batch} * args_.params.problem.heads_q + work.head;
      kept_.load(args_, head, work.first_row + tile_row());
    }
  }

  /// Loads the tile's mask, if it lies in memory, and finds while QK runs what this thread's rows
  /// see, if some rows do not see all. kBits: the tile's mask is of bits; `take_mask` and
  /// `prepare` ask even then, since across a branch the compiler does not wait for bits before it
  /// issues PV, and makes seven of them predicates at once.
  template <bool kBits>
  __device__ __forceinline__ void ask(const StepInfo& info, int32_t slot) {
    if (kBits || (C::kPartial && info.mask == TileMask::kBits)) masks_.ask_bits(slot);
  }
  template <bool kBits>
  __device__ __forceinline__ void take_mask(const StepInfo& info, const Work& work, int32_t slot) {
    if (C::kPartial && info.mask == TileMask::kBits) {
      masks_.take_bits();
    } else if (!kBits && info.mask != TileMask::kNone) {
      masks_.take(info, tile_row(), work, slot);
    }
  }

  /// Transforms the scores and hides those that rows do not see.
  template <bool kTransforms>
  __device__ __forceinline__ void prepare(ScoreFragment& s, const StepInfo& info, const Work& work,
                                          int32_t slot) {
    const bool adds = kTransforms && bias_.adds();
    if constexpr (kTransforms) {
      if (args_.transform && (!adds || args_.capped)) scale_and_cap(s, info, work);
    }
    if constexpr (C::kBiased && kTransforms) {
      if (adds) {
        const float rate = args_.transform && !args_.capped ? score_rate(work) : 1.0f;
        const TileKeys<C> keys(args_, info, smem_, slot);
        bias_.add(s, rate, work, keys, tile_row(), 2 * (lane_ % 4));
      }
    }
    if (info.mask != TileMask::kNone) hide_unseen(s);
  }

  template <int kCount>
  __device__ __forceinline__ void hide_unseen(float (&s)[kCount]) const {
    mask_scores<C::kListed, C::kPartial>(s, masks_.visible());
  }

  /// Updates the rows' maxima.
  template <bool kFirst, bool kMasked, bool kTransforms>
  __device__ __forceinline__ void find_maxima(ScoreFragment& s, SoftmaxState& state) const {
    if (are_large<C, kTransforms>(args_)) {
      return take_maxima_off<kFirst>(s, state, scale_log2());
    }
    constexpr int kBitChains = kFirst || kMasked ? 0 : C::kBitChains;
    update_maxima<kFirst, kMasked, !C::kHalf, kBitChains>(s, state, scale_log2());
  }

  /// Drops scores below the row's threshold. Where maxima are found before, they may be theirs: the
  /// row's highest score is kept, and comes to be the maximum.
  __device__ __forceinline__ void keep_top(ScoreFragment& s, const StepInfo& info) const {
    if constexpr (C::kTop) kept_.drop_others(s, info.key + 2 * (lane_ % 4));
  }

  /// How far from 0 the scores of rows that count are, of a tile that is seen whole under a
  /// softcap; infinity of others.
  template <class Rows>
  __device__ __forceinline__ float farthest(const ScoreFragment& s, const StepInfo& info,
                                            const Rows& rows) const {
    return args_.capped && info.mask == TileMask::kNone ? farthest_of(s, rows) : INFINITY;
  }
  /// Where sequences are apart zeros follow the last row, whose scores are small.
  __device__ __forceinline__ auto rows_that_count(const Work& work) const {
    if constexpr (C::kRagged) {
      return OwnRows{work.slice.rows.length - work.first_row - tile_row()};
    } else {
      return AllRows{};
    }
  }

 private:
  /// The first of this thread's two rows, in the query tile; where heads share it, in that of its
  /// head: all heads see the same.
  __device__ __forceinline__ int32_t tile_row() const {
    const int32_t row = consumer_ * kConsumerRows + kWarpRows * warp_ + lane_ / 4;
    return C::kPacks ? args_.packing.row(row) : row;
  }

  __device__ __forceinline__ void scale_and_cap(ScoreFragment& s, const StepInfo& info,
                                                const Work& work) const {
    const float rate = score_rate(work);
#pragma unroll
    for (int i = 0; i < C::BLOCK_KV / 2; ++i) s[i] *= rate;
    if (!args_.capped) return;
    const bool whole = info.mask == TileMask::kNone;
    cap_scores<!C::kEarlyRescale && !C::kBiased>(s, whole, rows_that_count(work));
    if constexpr (C::kBiased) {
      const float unit = args_.biased ? args_.cap_unit : 1.0f;
#pragma unroll
      for (int i = 0; i < C::BLOCK_KV / 2; ++i) s[i] *= unit;
    }
  }

  /// What a score is multiplied by before anything else.
  __device__ __forceinline__ float score_rate(const Work& work) const {
    return ptx::clamp(args_.score_rate * key_scale(work), FLT_MAX);
  }
  /// The factor of the query tile's keys.
  __device__ __forceinline__ float key_scale(const Work& work) const {
    return scale_of(args_.params.keys.key_scale, work);
  }

  const Arguments& args_;
  SharedStorage<C>& smem_;
  ScoreBias<C> bias_;  // for kBiased
  RowMasks<C> masks_;
  KeptScores<C> kept_;  // for kTop
  float scale_log2_;    // for kScaled
  const int consumer_, warp_, lane_;
};

}  // namespace sparse_attn::cuda::hopper
