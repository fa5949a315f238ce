// What a consumer waits for and gives back: query tiles and their plans, stages of K and V, and its
// turn to issue products.
#pragma once

#include "../common/ptx/mbarrier.cuh"
#include "../common/ptx/warpgroup.cuh"
#include "config.h"
#include "work_ring.cuh"

namespace sparse_attn::cuda::hopper {

template <class C>
class ConsumerRings {
 public:
  __device__ __forceinline__ ConsumerRings(SharedStorage<C>& smem, int consumer)
      : smem_(smem), consumer_(consumer), lane_(threadIdx.x % kWarp) {}

  /// Waits for the next query tile's plan; false where there is none.
  __device__ __forceinline__ bool next_work() const { return wait_work<C>(smem_, work).batch >= 0; }

  __device__ __forceinline__ void wait_query() const {
    ptx::mbarrier_wait(ptx::shared_address(&smem_.query_full[query.index][consumer_]),
                       query.parity);
  }

  /// Lets the loaders go on past the block's first Q and K.
  __device__ __forceinline__ void announce_first_key() const {
    wait_query();
    ptx::mbarrier_wait(ptx::shared_address(&smem_.key_full[0]), 0);
    if (threadIdx.x == kWarpgroup)
      ptx::mbarrier_arrive(ptx::shared_address(&smem_.event[kFirstKey]));
  }

  /// Waits for K of the next step.
  __device__ __forceinline__ void wait_key() const {
    ptx::mbarrier_wait(ptx::shared_address(&smem_.key_full[key.index]), key.parity);
  }
  /// What is to be known of that step; read before its K is released.
  __device__ __forceinline__ StepInfo take_info() { return smem_.info[steps_++ % kInfoSlots]; }
  /// The slot of what take_info returned last.
  __device__ __forceinline__ int32_t info_slot() const { return (steps_ - 1) % kInfoSlots; }
  __device__ __forceinline__ void release_key() {
    arrive_warp(&smem_.key_empty[key.index]);
    key.advance();
  }

  __device__ __forceinline__ void wait_value() const {
    ptx::mbarrier_wait(ptx::shared_address(&smem_.value_full[value.index]), value.parity);
  }
  __device__ __forceinline__ void release_value() {
    arrive_warp(&smem_.value_empty[value.index]);
    value.advance();
  }

  __device__ __forceinline__ void arrive_warp(uint64_t* barrier) const {
    if (lane_ == 0) ptx::mbarrier_arrive(ptx::shared_address(barrier));
  }

  __device__ __forceinline__ void take_turn() const {
    if constexpr (C::kPingPong) ptx::named_barrier_sync(kBarrierTurn + consumer_, kTurnThreads);
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (C::kPingPong) pass_turn_to(consumer_ + 1 == C::kConsumers ? 0 : consumer_ + 1);
  }
  __device__ __forceinline__ void pass_turn_to(int consumer) const {
    ptx::named_barrier_arrive(kBarrierTurn + consumer, kTurnThreads);
  }

  Ring<C::kQueryBuffers> query;
  Ring<C::kKeyStages> key;
  Ring<C::kValueStages> value;
  WorkRing<C> work;

 private:
  SharedStorage<C>& smem_;
  const int consumer_, lane_;
  uint32_t steps_ = 0;
};

}  // namespace sparse_attn::cuda::hopper
