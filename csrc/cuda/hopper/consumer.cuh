// A consumer: one warpgroup, 64 query rows. QK(n), then PV(n-1) are issued; softmax(n) overlaps
// PV(n-1); with kCrossTile this goes on across query tiles. Every consumer of a block takes the
// same steps, as the producer names them.
#pragma once

#include <type_traits>

#include "../common/ptx/warpgroup.cuh"
#include "../common/ptx/wgmma.cuh"
#include "../common/types.cuh"
#include "arguments.h"
#include "chunks.cuh"
#include "config.h"
#include "consumer_rings.cuh"
#include "epilogue.cuh"
#include "products.cuh"
#include "row_masks.cuh"
#include "score_bias.cuh"
#include "softmax.cuh"
#include "topk_keep.cuh"

namespace sparse_attn::cuda::hopper {

template <class C>
class Consumer {
  using Element = std::conditional_t<C::kDtype == Dtype::kFloat16, __half, __nv_bfloat16>;

 public:
  __device__ __forceinline__ Consumer(const Arguments& args, const TensorMaps& maps,
                                      SharedStorage<C>& smem, int consumer)
      : args_(args),
        smem_(smem),
        epilogue_(args, maps, smem, consumer),
        bias_(args, smem),
        masks_(args, smem, consumer),
        rings_(smem, consumer),
        products_(smem, consumer),
        consumer_(consumer),
        warp_(threadIdx.x / kWarp % 4),
        lane_(threadIdx.x % kWarp) {}

  __device__ __forceinline__ void run() {
    if (C::kPingPong && consumer_ == 0) rings_.pass_turn_to(0);
    if (!rings_.next_work()) return;
    rings_.announce_first_key();
    begin_tile();
    for (;;) {
      while (info_.follows >= Follows::kWhole) {
        while (info_.follows >= Follows::kWhole && !plain_follows()) {
          transforms() ? step<true, true>() : step<true>();
        }
        while (plain_follows()) step<false>();
      }
      if constexpr (C::kNarrows) {
        if (info_.follows == Follows::kNarrow) narrow_step();
      }
      finished_ = rings_.work.index;
      const bool chunk = C::kFolds && info_.follows == Follows::kChunk;  // not the tile's last one
      if (!chunk) {
        if (C::kCrossTile) rings_.arrive_warp(&smem_.query_empty[rings_.query.index][consumer_]);
        rings_.query.advance();
        if (C::kCrossTile && folds<C>(args_, smem_.work[finished_])) {
          rings_.query.advance();  // the first buffer alone
        }
        rings_.work.advance();
      }
      const bool crosses = C::kCrossTile && (chunk || rings_.next_work());
      if (crosses) {
        cross_tiles();
      } else {
        finish_products();
      }
      write_out(chunk);
      if (crosses) {
        pack_probabilities();
        clear_out();
      } else {
        if (!chunk && (C::kCrossTile || !rings_.next_work())) break;
        begin_tile();
      }
    }
    epilogue_.drain();
  }

 private:
  // ---- Schedule ---------------------------------------------------------------------------------

  __device__ __forceinline__ void begin_tile() {
    rings_.wait_query();
    wait_key();
    ptx::pin(s_);
    ptx::wgmma_fence();
    issue_qk();
    masks_.ask(info_, tile_row(), rings_.info_slot());
    take_mask();
    take_rows();
    ptx::wgmma_wait<0>();
    ptx::pin(s_);
    rings_.release_key();
    prepare_scores<C::kTransforms>();
    find_maxima<true, true, C::kTransforms>();
    keep_top();
    exponentiate(s_, state_, scale_log2());
    pack_probabilities();
    clear_out();
  }

  /// One key tile. The code for scores that are more than scaled would lie in the way of the rest.
  template <bool kMasked, bool kTransforms = false>
  __device__ __forceinline__ void step() {
    constexpr bool kReadsLate = C::kPingPong && !kMasked;  // not in a turn, which others wait for
    rings_.wait_key();
    if constexpr (!kReadsLate) info_ = rings_.take_info();
    rings_.take_turn();
    pin_all();
    ptx::wgmma_fence();
    issue_qk();
    if constexpr (kMasked) masks_.ask(info_, tile_row(), rings_.info_slot());
    if constexpr (C::kEarlyRescale) rescale_out();
    rings_.wait_value();
    issue_pv();
    rings_.pass_turn();
    if constexpr (kReadsLate) info_ = rings_.take_info();
    if constexpr (kMasked) take_mask();
    ptx::wgmma_wait<1>();
    ptx::pin(s_);
    rings_.release_key();
    float high[2];
    if (C::kSmallCaps && kTransforms && scores_are_small(high)) {
      small_softmax_behind_pv(high);
    } else {
      if constexpr (kMasked) prepare_scores<kTransforms>();
      softmax_behind_pv<false, kMasked, kTransforms>();
    }
    pack_probabilities();
    if constexpr (!C::kEarlyRescale) rescale_out();
  }

  /// The last tile, where rows see a few leading keys alone: a step of an eighth of the products.
  __device__ __forceinline__ void narrow_step() {
    wait_key();
    rings_.take_turn();
    pin_all();
    float few[kNarrowKeys / 2];
    ptx::pin(few);
    ptx::wgmma_fence();
    products_.qk(few, rings_.query.index, rings_.key.index);
    rings_.wait_value();
    issue_pv();
    rings_.pass_turn();
    take_mask();
    ptx::wgmma_wait<1>();
    ptx::pin(few);
    rings_.release_key();
    mask_scores<C::kListed>(few, masks_.visible());
    update_maxima<false, true>(few, state_, scale_log2());
    end_pv();
    exponentiate(few, state_, scale_log2());
#pragma unroll
    for (int i = 0; i < kNarrowKeys / 4; ++i) p_[i] = pack<Element>(few[2 * i], few[2 * i + 1]);
    narrow_ = true;
    rescale_out();
  }

  /// The first QK of the next tile with the last PV of the finished one.
  __device__ __forceinline__ void cross_tiles() {
    rings_.wait_query();
    wait_key();
    rings_.take_turn();
    pin_all();
    ptx::wgmma_fence();
    issue_qk();
    masks_.ask(info_, tile_row(), rings_.info_slot());
    finish_rows();
    rings_.wait_value();
    issue_last_pv();
    rings_.pass_turn();
    take_mask();
    take_rows();
    ptx::wgmma_wait<1>();
    ptx::pin(s_);
    rings_.release_key();
    prepare_scores<C::kTransforms>();
    softmax_behind_pv<true, true, C::kTransforms>();
  }

  /// P of the step, while the PV of the step before ends.
  template <bool kFirst, bool kMasked, bool kTransforms>
  __device__ __forceinline__ void softmax_behind_pv() {
    find_maxima<kFirst, kMasked, kTransforms>();
    keep_top();
    end_pv();
    exponentiate(s_, state_, scale_log2());
  }

  /// The same under softcap, where scores are small beside it and all are seen.
  __device__ __forceinline__ void small_softmax_behind_pv(const float (&high)[2]) {
    update_small_maxima(high, state_, args_.small_cap, scale_log2());
    end_pv();
    exponentiate_small<0>(s_, state_, args_.small_cap);
    exponentiate_small<1>(s_, state_, args_.small_cap);
  }

  __device__ __forceinline__ bool scores_are_small(float (&high)[2]) const {
    if (!args_.capped || info_.mask != TileMask::kNone) return false;
    return are_small(s_, args_.small_cap, rows_that_count(), high);
  }

  __device__ __forceinline__ void finish_products() {
    if constexpr (C::kEarlyRescale) rescale_out();
    rings_.wait_value();
    pin_all();
    issue_last_pv();
    finish_rows();
    end_pv();
  }

  __device__ __forceinline__ void issue_qk() {
    products_.qk(s_, rings_.query.index, rings_.key.index);
  }
  __device__ __forceinline__ void issue_pv() { products_.pv(o_, p_, rings_.value.index); }

  /// That of the query tile's last step, which may be a narrow one.
  __device__ __forceinline__ void issue_last_pv() {
    if constexpr (C::kNarrows) {
      if (__any_sync(~0u, narrow_)) {
        products_.template pv<kNarrowKeys>(o_, p_, rings_.value.index);
      } else {
        issue_pv();
      }
      narrow_ = false;
    } else {
      issue_pv();
    }
  }

  __device__ __forceinline__ void end_pv() {
    ptx::wgmma_wait<0>();
    pin_all();
    rings_.release_value();
  }

  __device__ __forceinline__ void pin_all() {
    ptx::pin(s_);
    ptx::pin(o_);
    ptx::pin(p_);
  }

  // ---- Scores -----------------------------------------------------------------------------------

  /// The first of this thread's two rows, in the query tile; where heads share it, in that of its
  /// head: all heads see the same.
  __device__ __forceinline__ int32_t tile_row() const {
    const int32_t row = consumer_ * kConsumerRows + kWarpRows * warp_ + lane_ / 4;
    return C::kPacks ? args_.packing.row(row) : row;
  }

  /// Finds what this thread's rows see of the tile whose QK runs, if it needs a mask.
  __device__ __forceinline__ void take_mask() {
    if (info_.mask == TileMask::kNone) return;
    masks_.take(info_, tile_row(), smem_.work[rings_.work.index], rings_.info_slot());
  }

  template <bool kTransforms>
  __device__ __forceinline__ void prepare_scores() {
    const bool adds = kTransforms && bias_.adds();
    if constexpr (kTransforms) {
      if (args_.transform && (!adds || args_.capped)) transform_scores();
    }
    if constexpr (C::kBiased && kTransforms) {
      if (adds) {
        const float rate = args_.transform && !args_.capped ? score_rate() : 1.0f;
        const TileKeys<C> keys(args_, info_, smem_, rings_.info_slot());
        bias_.add(s_, rate, smem_.work[rings_.work.index], keys, tile_row(), 2 * (lane_ % 4));
      }
    }
    if (info_.mask != TileMask::kNone) mask_scores<C::kListed>(s_, masks_.visible());
  }

  __device__ __forceinline__ void transform_scores() {
    const float rate = score_rate();
#pragma unroll
    for (int i = 0; i < C::BLOCK_KV / 2; ++i) s_[i] *= rate;
    if (!args_.capped) return;
    const bool whole = info_.mask == TileMask::kNone;
    cap_scores<!C::kEarlyRescale && !C::kBiased>(s_, whole, rows_that_count());
    if constexpr (C::kBiased) {
      const float unit = args_.biased ? args_.cap_unit : 1.0f;
#pragma unroll
      for (int i = 0; i < C::BLOCK_KV / 2; ++i) s_[i] *= unit;
    }
  }

  /// Where sequences are apart zeros follow the last row, whose scores are small.
  __device__ __forceinline__ auto rows_that_count() const {
    if constexpr (C::kRagged) {
      const hopper::Work& work = smem_.work[rings_.work.index];
      return OwnRows{work.slice.rows.length - work.first_row - tile_row()};
    } else {
      return AllRows{};
    }
  }

  template <bool kFirst, bool kMasked, bool kTransforms>
  __device__ __forceinline__ void find_maxima() {
    if constexpr (kTransforms) {
      if (args_.transform && (!args_.capped || (C::kBiased && args_.biased))) {
        return take_maxima_off<kFirst>(s_, state_, scale_log2());
      }
    }
    update_maxima<kFirst, kMasked, !C::kHalf>(s_, state_, scale_log2());
  }

  /// What a score is multiplied by before anything else.
  __device__ __forceinline__ float score_rate() const {
    return ptx::clamp(args_.score_rate * key_scale(), FLT_MAX);
  }
  /// The factor of the keys of the query tile that begins or runs.
  __device__ __forceinline__ float key_scale() const {
    return scale_of(args_.params.keys.key_scale, smem_.work[rings_.work.index]);
  }
  /// What makes exponents of 2 of its scores.
  __device__ __forceinline__ float scale_log2() const {
    return C::kScaled ? scale_log2_ : args_.scale_log2;
  }

  /// What is to be known of the rows of the query tile that begins.
  __device__ __forceinline__ void take_rows() {
    if (C::kScaled) scale_log2_ = args_.scale_log2 * (args_.transform ? 1.0f : key_scale());
    const hopper::Work& work = smem_.work[rings_.work.index];
    if constexpr (C::kBiased) bias_.begin(work);
    if constexpr (C::kTop) {
      const int64_t head = int64_t{work.batch} * args_.params.problem.heads_q + work.head;
      kept_.load(args_, head, work.first_row + tile_row());
    }
  }

  /// Drops scores below the row's threshold. The maxima may be theirs: the row's highest score is
  /// kept, and comes to be the maximum.
  __device__ __forceinline__ void keep_top() {
    if constexpr (C::kTop) kept_.drop_others(s_, info_.key + 2 * (lane_ % 4));
  }

  __device__ __forceinline__ void pack_probabilities() {
#pragma unroll
    for (int i = 0; i < C::BLOCK_KV / 4; ++i) p_[i] = pack<Element>(s_[2 * i], s_[2 * i + 1]);
  }

  // ---- Output -----------------------------------------------------------------------------------

  __device__ __forceinline__ void clear_out() {
#pragma unroll
    for (int i = 0; i < C::HEAD_DIM / 2; ++i) o_[i] = 0.0f;
  }

  __device__ __forceinline__ void rescale_out() {
#pragma unroll
    for (int i = 0; i < C::HEAD_DIM / 2; ++i) o_[i] *= state_.rescale[i / 2 % 2];
    if constexpr (C::kEarlyRescale) ptx::pin(o_);
  }

  __device__ __forceinline__ void finish_rows() {
    epilogue_.finish_rows(state_, scale_log2(), smem_.work[finished_], inverse_);
  }

  /// Of a tile, or of one of its chunks that another one follows.
  __device__ __forceinline__ void write_out(bool chunk) {
    epilogue_.write(o_, inverse_, smem_.work[finished_], chunk);
    if (!chunk) rings_.arrive_warp(&smem_.work_empty[finished_]);
  }

  // ---- Steps ------------------------------------------------------------------------------------

  /// Waits for K of the next step, and reads what is to be known of it.
  __device__ __forceinline__ void wait_key() {
    rings_.wait_key();
    info_ = rings_.take_info();
  }
  /// Whether a tile follows that needs neither mask nor transformation.
  __device__ __forceinline__ bool plain_follows() const {
    return info_.follows == Follows::kWhole && !transforms();
  }
  /// Whether scores are more than scaled.
  __device__ __forceinline__ bool transforms() const { return args_.transform || bias_.adds(); }

  const Arguments& args_;
  SharedStorage<C>& smem_;
  Epilogue<C> epilogue_;
  ScoreBias<C> bias_;  // for kBiased
  RowMasks<C> masks_;
  ConsumerRings<C> rings_;
  const Products<C> products_;
  const int consumer_, warp_, lane_;
  StepInfo info_;       // of the tile whose K was waited for last
  KeptScores<C> kept_;  // for kTop
  SoftmaxState state_;
  float scale_log2_;             // for kScaled
  bool narrow_ = false;          // the last step was narrow; for kNarrows
  int32_t finished_;             // slot of the finished tile ...
  float inverse_[2];             // ... and 1 / l of its rows
  float s_[C::BLOCK_KV / 2];     // S, then P in float32
  float o_[C::HEAD_DIM / 2];     // O
  uint32_t p_[C::BLOCK_KV / 4];  // P, as the A operand of PV
};

}  // namespace sparse_attn::cuda::hopper
