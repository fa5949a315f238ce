// A consumer: one warpgroup, 64 query rows. QK(n), then PV(n-1) are issued; softmax(n) overlaps
// PV(n-1); with kCrossTile this goes on across query tiles. Every consumer of a block takes the
// same steps, as the producer names them.
#pragma once

#include <type_traits>

#include "../common/ptx/wgmma.cuh"
#include "../common/types.cuh"
#include "arguments.h"
#include "chunks.cuh"
#include "config.h"
#include "consumer_rings.cuh"
#include "epilogue.cuh"
#include "online_softmax.cuh"
#include "products.cuh"
#include "tile_scores.cuh"

namespace sparse_attn::cuda::hopper {

template <class C>
class Consumer {
  using Element = std::conditional_t<C::kDtype == Dtype::kFloat16, __half, __nv_bfloat16>;
  static constexpr bool kReadsBits = C::kPartial && !C::kBiased;  // in steps of their own
  /// Which of a key tile's scores a step may have to hide.
  enum class Hides { kNothing, kBits, kAny };

 public:
  __device__ __forceinline__ Consumer(const Arguments& args, const TensorMaps& maps,
                                      SharedStorage<C>& smem, int consumer)
      : args_(args),
        smem_(smem),
        epilogue_(args, maps, smem, consumer),
        scores_(args, smem, consumer),
        softmax_(args),
        rings_(smem, consumer),
        products_(smem, consumer),
        consumer_(consumer) {}

  __device__ __forceinline__ void run() {
    if (C::kPingPong && consumer_ == 0) rings_.pass_turn_to(0);
    if (!rings_.next_work()) return;
    rings_.announce_first_key();
    begin_tile();
    for (;;) {
      while (info_.follows >= Follows::kWhole) {
        while (masked_follows() && !softmax_.have_moved()) {
          scores_.transform() ? step<Hides::kAny, true>() : step<Hides::kAny>();
        }
        if constexpr (kReadsBits) {
          while (bits_follow() && !softmax_.have_moved()) step<Hides::kBits>();
        }
        plain_steps();
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
      if (C::kWritesInStep && crosses && plain_follows()) {
        pack_probabilities();
        step<Hides::kNothing, false, true>();
        softmax_.rescale_moved(o_);
        continue;
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
    ask_for_mask();
    take_mask();
    take_rows();
    ptx::wgmma_wait<0>();
    ptx::pin(s_);
    rings_.release_key();
    prepare_scores<C::kTransforms>();
    softmax_.begin(s_, scores_, info_, [] {});
    pack_probabilities();
    clear_out();
  }

  /// Steps of plain tiles. O is rescaled before them where a step before moved a maximum, and
  /// wherever one of them does. With a loop of their own the compiler orders them 2 to 3 % faster;
  /// kernels that transform scores or have lead views lose 6 % by it.
  __device__ __forceinline__ void plain_steps() {
    constexpr bool kOwnLoop = C::kLazy && !C::kTransforms && !C::kLeads;
    if constexpr (!kOwnLoop) {
      while (plain_follows() && !softmax_.have_moved()) step<Hides::kNothing>();
    }
    softmax_.rescale_moved(o_);
    if constexpr (kOwnLoop) {
      while (plain_follows()) {
        do {
          step<Hides::kNothing>();
        } while (plain_follows() && !softmax_.have_moved());
        softmax_.rescale_moved(o_);
      }
    }
  }

  /// One key tile; `kWrites`: the query tile before is written first. The code for scores that are
  /// more than scaled would lie in the way of the rest. Where maxima may have moved O is to be
  /// rescaled before the next one. Warps find that apart and leave loops apart, but take the same
  /// steps: which one follows does not depend on maxima.
  template <Hides kHides, bool kTransforms = false, bool kWrites = false>
  __device__ __forceinline__ void step() {
    constexpr bool kMasked = kHides != Hides::kNothing, kBits = kHides == Hides::kBits;
    constexpr bool kReadsLate = C::kPingPong && !kMasked;  // not in a turn, which others wait for
    constexpr bool kAsksEarly = C::kPingPong && kBits;     // likewise
    rings_.wait_key();
    if constexpr (!kReadsLate) info_ = rings_.take_info();
    if constexpr (kAsksEarly) ask_for_mask<kBits>();
    rings_.take_turn();
    pin_all();
    ptx::wgmma_fence();
    issue_qk();
    if constexpr (kMasked && !kAsksEarly) ask_for_mask<kBits>();
    if constexpr (C::kEarlyRescale) rescale_early();
    if constexpr (kWrites) {
      write_out(false);
      clear_out();
      ptx::pin(o_);
    }
    rings_.wait_value();
    issue_pv();
    rings_.pass_turn();
    if constexpr (kReadsLate) info_ = rings_.take_info();
    if constexpr (kMasked) take_mask<kBits>();
    ptx::wgmma_wait<1>();
    ptx::pin(s_);
    rings_.release_key();
    const auto end_pv = [&] { this->end_pv(); };
    if (!(C::kSmallCaps && kTransforms && softmax_.add_small(s_, scores_, info_, work(), end_pv))) {
      if constexpr (kMasked) prepare_scores<kTransforms>();
      softmax_.template add<kMasked, kTransforms>(s_, scores_, info_, end_pv);
    }
    pack_probabilities();
    if constexpr (!C::kEarlyRescale) softmax_.template rescale<kTransforms>(o_);
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
    scores_.hide_unseen(few);
    softmax_.add_narrow(few, scores_, [&] { end_pv(); });
#pragma unroll
    for (int i = 0; i < kNarrowKeys / 4; ++i) p_[i] = pack<Element>(few[2 * i], few[2 * i + 1]);
    narrow_ = true;
    softmax_.template rescale<false>(o_);
    softmax_.rescale_moved(o_);
  }

  /// The first QK of the next tile with the last PV of the finished one.
  __device__ __forceinline__ void cross_tiles() {
    rings_.wait_query();
    wait_key();
    rings_.take_turn();
    pin_all();
    ptx::wgmma_fence();
    issue_qk();
    ask_for_mask();
    keep_rows();
    rings_.wait_value();
    issue_last_pv();
    rings_.pass_turn();
    take_mask();
    take_rows();
    ptx::wgmma_wait<1>();
    ptx::pin(s_);
    rings_.release_key();
    prepare_scores<C::kTransforms>();
    softmax_.begin(s_, scores_, info_, [&] { end_pv(); });
  }

  __device__ __forceinline__ void finish_products() {
    if constexpr (C::kEarlyRescale) rescale_early();
    rings_.wait_value();
    pin_all();
    issue_last_pv();
    keep_rows();
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
    ptx::pin(o_);
    ptx::pin(p_);
    rings_.release_value();
  }
  __device__ __forceinline__ void pin_all() {
    ptx::pin(s_);
    ptx::pin(o_);
    ptx::pin(p_);
  }

  // ---- Scores -----------------------------------------------------------------------------------

  /// The plan of the query tile that runs.
  __device__ __forceinline__ const hopper::Work& work() const {
    return smem_.work[rings_.work.index];
  }
  template <bool kBits = false>
  __device__ __forceinline__ void ask_for_mask() {
    scores_.template ask<kBits>(info_, rings_.info_slot());
  }
  template <bool kBits = false>
  __device__ __forceinline__ void take_mask() {
    scores_.template take_mask<kBits>(info_, work(), rings_.info_slot());
  }
  __device__ __forceinline__ void take_rows() { scores_.begin(work()); }

  template <bool kTransforms>
  __device__ __forceinline__ void prepare_scores() {
    scores_.template prepare<kTransforms>(s_, info_, work(), rings_.info_slot());
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

  /// Multiplies O by what the maxima of the step before ask, where that is done while QK runs.
  __device__ __forceinline__ void rescale_early() {
    softmax_.template rescale<C::kTransforms>(o_);
    ptx::pin(o_);
  }

  /// Finishes the rows before the next tile overwrites their state, or sets that aside.
  __device__ __forceinline__ void keep_rows() {
    if constexpr (C::kFinishesLate) {
      finished_rows_ = softmax_.state();
    } else {
      finish_rows(softmax_.state());
    }
  }
  __device__ __forceinline__ void finish_rows(const SoftmaxState& rows) {
    epilogue_.finish_rows(rows, softmax_.unit(scores_), smem_.work[finished_], inverse_);
  }

  /// Of a tile, or of one of its chunks that another one follows.
  __device__ __forceinline__ void write_out(bool chunk) {
    if constexpr (C::kFinishesLate) finish_rows(finished_rows_);
    epilogue_.write(o_, inverse_, smem_.work[finished_], chunk);
    if (!chunk) rings_.arrive_warp(&smem_.work_empty[finished_]);
  }

  // ---- Steps ------------------------------------------------------------------------------------

  /// Waits for K of the next step, and reads what is to be known of it.
  __device__ __forceinline__ void wait_key() {
    rings_.wait_key();
    info_ = rings_.take_info();
  }
  /// Whether a tile follows that may need a mask or a transformation.
  __device__ __forceinline__ bool masked_follows() const {
    return info_.follows >= Follows::kWhole && !plain_follows() && !bits_follow();
  }
  /// Whether a tile follows that needs neither mask nor transformation.
  __device__ __forceinline__ bool plain_follows() const {
    return info_.follows == Follows::kWhole && !scores_.transform();
  }
  /// Whether a tile follows that needs no more than a mask of bits.
  __device__ __forceinline__ bool bits_follow() const {
    return kReadsBits && info_.follows == Follows::kBits && !scores_.transform();
  }

  const Arguments& args_;
  SharedStorage<C>& smem_;
  Epilogue<C> epilogue_;
  TileScores<C> scores_;
  OnlineSoftmax<C> softmax_;
  ConsumerRings<C> rings_;
  const Products<C> products_;
  const int consumer_;
  StepInfo info_;                // of the tile whose K was waited for last
  bool narrow_ = false;          // the last step was narrow; for kNarrows
  int32_t finished_;             // slot of the finished tile ...
  SoftmaxState finished_rows_;   // ... its rows, for kFinishesLate ...
  float inverse_[2];             // ... and 1 / l of them
  float s_[C::BLOCK_KV / 2];     // S, then P in float32
  float o_[C::HEAD_DIM / 2];     // O
  uint32_t p_[C::BLOCK_KV / 4];  // P, as the A operand of PV
};

}  // namespace sparse_attn::cuda::hopper
