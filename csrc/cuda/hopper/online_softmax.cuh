// Online softmax of a consumer's rows: how the scores of their key tiles come to be P, and by what
// O is multiplied then. Scores are exponentiated while the PV of the tile before runs.
#pragma once

#include "arguments.h"
#include "config.h"
#include "small_cap.cuh"
#include "softmax.cuh"
#include "tile_scores.cuh"

namespace sparse_attn::cuda::hopper {

/// Of a thread's two rows. `end_pv` waits for the PV that runs, if one does. P takes the scores'
/// place.
template <class C>
class OnlineSoftmax {
  using ScoreFragment = float[C::BLOCK_KV / 2];
  using OutFragment = float[C::HEAD_DIM / 2];
  using Work = hopper::Work;

 public:
  __device__ __forceinline__ explicit OnlineSoftmax(const Arguments& args) : args_(args) {}

  __device__ __forceinline__ const SoftmaxState& state() const { return state_; }
  /// What the state's m is multiplied by to be in log2 units.
  __device__ __forceinline__ float unit(const TileScores<C>& scores) const {
    return follows_lazily<C::kTransforms>() ? 1.0f : scores.scale_log2();
  }

  /// P of a query tile's first key tile, with which its rows begin.
  template <class EndPv>
  __device__ __forceinline__ void begin(ScoreFragment& s, const TileScores<C>& scores,
                                        const StepInfo& info, const EndPv& end_pv) {
    if (follows_lazily<C::kTransforms>()) {
      scores.keep_top(s, info);
      begin_maxima(s, state_, scores.scale_log2());
    } else {
      scores.template find_maxima<true, true, C::kTransforms>(s, state_);
      scores.keep_top(s, info);
    }
    end_pv();
    ptx::pin(s);
    exponentiate_rows(s, plain(scores));
  }

  /// P of a later one, ...
  template <bool kMasked, bool kTransforms, class EndPv>
  __device__ __forceinline__ void add(ScoreFragment& s, const TileScores<C>& scores,
                                      const StepInfo& info, const EndPv& end_pv) {
    if (follows_lazily<kTransforms>()) {
      scores.keep_top(s, info);
      add_lazily(s, plain(scores), end_pv);
    } else {
      scores.template find_maxima<false, kMasked, kTransforms>(s, state_);
      scores.keep_top(s, info);
      add_exactly(s, plain(scores), end_pv);
    }
  }
  /// ... of one whose scores are small beside a softcap, and all seen; returns false of others, of
  /// which nothing is made, ...
  template <class EndPv>
  __device__ __forceinline__ bool add_small(ScoreFragment& s, const TileScores<C>& scores,
                                            const StepInfo& info, const Work& work,
                                            const EndPv& end_pv) {
    const SmallCap& cap = args_.small_cap;
    const auto rows = scores.rows_that_count(work);
    const bool lazy = may_follow_lazily();
    const bool low = lazy && have_low_maxima(state_, rows);
    const float farthest = scores.farthest(s, info, rows);
    if (cap.quadratic.serves(farthest) && !low) {
      lazy ? add_lazily_by_scores(s, cap.quadratic, end_pv)
           : add_small_exactly(s, scores, cap.quadratic, end_pv);
      return true;
    }
    if (cap.cubic.serves(farthest)) {
      lazy ? add_lazily(s, cap.cubic, end_pv) : add_small_exactly(s, scores, cap.cubic, end_pv);
      return true;
    }
    return false;
  }
  /// ... and of a narrow one.
  template <class EndPv>
  __device__ __forceinline__ void add_narrow(float (&s)[kNarrowKeys / 2],
                                             const TileScores<C>& scores, const EndPv& end_pv) {
    if (follows_lazily<false>()) {
      add_lazily(s, plain(scores), end_pv);
    } else {
      update_maxima<false, true>(s, state_, scores.scale_log2());
      add_exactly(s, plain(scores), end_pv);
    }
  }

  /// Multiplies O by what a step's maxima ask, where they are followed exactly: once a step.
  template <bool kTransforms>
  __device__ __forceinline__ void rescale(OutFragment& o) const {
    if (follows_lazily<kTransforms>()) return;
    rescale_row<0>(o);
    rescale_row<1>(o);
  }
  /// Whether maxima that are followed lazily may have moved in the last step, ...
  __device__ __forceinline__ bool have_moved() const {
    return C::kLazy && (moved_[0] || moved_[1]);
  }
  /// ... so that this has to multiply O before the next one: a step forgets the factors before.
  __device__ __forceinline__ void rescale_moved(OutFragment& o) {
    if constexpr (C::kLazy) {
      if (moved_[0]) rescale_row<0>(o);
      if (moved_[1]) rescale_row<1>(o);
      moved_[0] = moved_[1] = false;
    }
  }

 private:
  /// Whether maxima are followed lazily: not where they come off the scores.
  template <bool kTransforms>
  __device__ __forceinline__ bool follows_lazily() const {
    return may_follow_lazily() && !are_large<C, kTransforms>(args_);
  }
  __device__ __forceinline__ bool may_follow_lazily() const {
    return C::kLazy && (!C::kLazyByCall || args_.lazy);
  }
  static __device__ __forceinline__ PlainScores plain(const TileScores<C>& scores) {
    return {scores.scale_log2()};
  }

  template <class Factors, class EndPv, int kCount>
  __device__ __forceinline__ void add_exactly(float (&s)[kCount], const Factors& factors,
                                              const EndPv& end_pv) {
    end_pv();
    ptx::pin(s);
    exponentiate_rows(s, factors);
  }
  template <class Cap, class EndPv>
  __device__ __forceinline__ void add_small_exactly(ScoreFragment& s, const TileScores<C>& scores,
                                                    const Cap& cap, const EndPv& end_pv) {
    update_small_maxima(s, state_, cap, scores.scale_log2());
    add_exactly(s, cap, end_pv);
  }
  /// Scores that are being exponentiated need not wait for PV.
  template <class Factors, class EndPv, int kCount>
  __device__ __forceinline__ void add_lazily(float (&s)[kCount], const Factors& factors,
                                             const EndPv& end_pv) {
    moved_[0] = exponentiate_lazily<0>(s, state_, factors);
    moved_[1] = exponentiate_lazily<1>(s, state_, factors);
    end_pv();
  }
  /// The same by the scores' own maxima, which are there.
  template <class Factors, class EndPv>
  __device__ __forceinline__ void add_lazily_by_scores(ScoreFragment& s, const Factors& factors,
                                                       const EndPv& end_pv) {
    const float high[2] = {highest_by_bits<1>(kLeastBits, s, 0),
                           highest_by_bits<1>(kLeastBits, s, 1)};
    moved_[0] = exponentiate_lazily<0>(s, state_, factors, high[0]);
    moved_[1] = exponentiate_lazily<1>(s, state_, factors, high[1]);
    end_pv();
  }

  template <class Factors, int kCount>
  __device__ __forceinline__ void exponentiate_rows(float (&s)[kCount], const Factors& factors) {
    constexpr int kRow = C::kFinishesLate;  // in this order the compiler makes a faster loop
    exponentiate<kRow>(s, state_, factors);
    exponentiate<1 - kRow>(s, state_, factors);
  }

  template <int r>
  __device__ __forceinline__ void rescale_row(OutFragment& o) const {
#pragma unroll
    for (int i = 0; i < C::HEAD_DIM / 2; ++i) {
      if (i / 2 % 2 == r) o[i] *= state_.rescale[r];
    }
  }

  const Arguments& args_;
  SoftmaxState state_;
  bool moved_[2] = {};  // m of row r of some lane, by state_.rescale
};

}  // namespace sparse_attn::cuda::hopper
