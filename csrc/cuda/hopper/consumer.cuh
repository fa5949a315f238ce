// A consumer: one warpgroup, 64 query rows. S = Q K^T of a step runs while the softmax of the step
// before it waits, O += P V of that step behind it; with kCrossTile this goes on across query
// tiles. Every consumer of a block takes the same steps, as the producer names them.
#pragma once

#include <type_traits>

#include "../common/ptx/mbarrier.cuh"
#include "../common/ptx/stmatrix.cuh"
#include "../common/ptx/tma.cuh"
#include "../common/ptx/warpgroup.cuh"
#include "../common/ptx/wgmma.cuh"
#include "../common/types.cuh"
#include "arguments.h"
#include "mask_words.h"
#include "softmax.cuh"

namespace sparse_attn::cuda::hopper {

template <class C>
class Consumer {
  using Element = std::conditional_t<C::kDtype == Dtype::kFloat16, __half, __nv_bfloat16>;
  using ProductQK = ptx::Wgmma<C::kDtype, C::BLOCK_KV>;
  using ProductPV = ptx::Wgmma<C::kDtype, C::HEAD_DIM>;

 public:
  __device__ __forceinline__ Consumer(const Arguments& args, const TensorMaps& maps,
                                      SharedStorage<C>& smem, int consumer)
      : args_(args),
        maps_(maps),
        smem_(smem),
        consumer_(consumer),
        warp_(threadIdx.x / kWarp % 4),
        lane_(threadIdx.x % kWarp) {
    constexpr auto kSwizzle =
        C::kRowBytes == 128 ? ptx::Swizzle::k128Bytes : ptx::Swizzle::k64Bytes;
    constexpr uint32_t kEightRows = 8 * C::kRowBytes;
    sQ_ =
        ptx::wgmma_descriptor(ptx::smem_address(smem.query[0][consumer]), 16, kEightRows, kSwizzle);
    sK_ = ptx::wgmma_descriptor(ptx::smem_address(smem.key[0]), 16, kEightRows, kSwizzle);
    sV_ = ptx::wgmma_descriptor(ptx::smem_address(smem.value[0]), C::BLOCK_KV * C::kRowBytes,
                                kEightRows, kSwizzle);
  }

  __device__ __forceinline__ void run() {
    if (C::kPingPong && consumer_ == 0) pass_turn_to(0);
    if (!next_work()) return;
    begin_tile();
    for (;;) {
      while (more_steps_) {
        while (more_steps_ && !whole_tile()) step<true>();
        while (more_steps_ && whole_tile()) step<false>();
      }
      int32_t finished = work_.index;
      SoftmaxState rows = state_;
      if (C::kCrossTile) arrive_warp(&smem_.query_empty[query_.index][consumer_]);
      query_.advance();
      work_.advance();
      if (C::kCrossTile && next_work()) {
        cross_tiles(rows, finished);
        continue;
      }
      finish_products();
      write_out(rows, finished);
      if (C::kCrossTile || !next_work()) break;
      begin_tile();
    }
    if (threadIdx.x % kWarpgroup == 0) ptx::tma_store_wait();
  }

 private:
  // ---- Schedule ---------------------------------------------------------------------------------

  __device__ __forceinline__ void begin_tile() {
    wait_query();
    wait_key();
    ptx::pin(s_);
    ptx::wgmma_fence();
    issue_qk();
    find_row_limits();
    ptx::wgmma_wait<0>();
    ptx::pin(s_);
    release_key();
    prepare_scores();
    update_maxima<true>(s_, state_, args_.scale_log2);
    exponentiate<0>(s_, state_, args_.scale_log2);
    exponentiate<1>(s_, state_, args_.scale_log2);
    wait_next_key();
    pack_probabilities();
    clear_out();
  }

  /// One key tile, whose K is there.
  template <bool kMasked>
  __device__ __forceinline__ void step() {
    take_turn();
    pin_all();
    ptx::wgmma_fence();
    issue_qk();
    if (C::kEarlyRescale) rescale_out();
    wait_value();
    issue_pv();
    pass_turn();
    ptx::wgmma_wait<1>();
    ptx::pin(s_);
    release_key();
    if (kMasked) prepare_scores();
    softmax_behind_pv<false>();
    pack_probabilities();
    if (!C::kEarlyRescale) rescale_out();
  }

  /// The first QK of the next tile with the last PV of the finished one.
  __device__ __forceinline__ void cross_tiles(const SoftmaxState& rows, int32_t finished) {
    wait_query();
    wait_key();
    take_turn();
    pin_all();
    ptx::wgmma_fence();
    issue_qk();
    wait_value();
    issue_pv();
    pass_turn();
    find_row_limits();
    ptx::wgmma_wait<1>();
    ptx::pin(s_);
    release_key();
    prepare_scores();
    softmax_behind_pv<true>();
    write_out(rows, finished);
    pack_probabilities();
    clear_out();
  }

  /// P of the step, while the PV of the step before ends. ptxas would wait for that PV before the
  /// first exponential; the branch in the wait for the next K keeps it behind the first row's.
  template <bool kFirst>
  __device__ __forceinline__ void softmax_behind_pv() {
    update_maxima<kFirst>(s_, state_, args_.scale_log2);
    exponentiate<0>(s_, state_, args_.scale_log2);
    wait_next_key();
    ptx::wgmma_wait<0>();
    pin_all();
    release_value();
    exponentiate<1>(s_, state_, args_.scale_log2);
  }

  __device__ __forceinline__ void finish_products() {
    if (C::kEarlyRescale) rescale_out();
    wait_value();
    pin_all();
    issue_pv();
    ptx::wgmma_wait<0>();
    pin_all();
    release_value();
  }

  __device__ __forceinline__ void issue_qk() {
    constexpr int kSteps = C::kSlabColumns / 16;  // of 16 columns in a slab
    uint64_t q = ptx::wgmma_advance(sQ_, query_.index * C::kConsumers * C::kQueryBytes);
    uint64_t k = ptx::wgmma_advance(sK_, key_.index * C::kKeyBytes);
#pragma unroll
    for (int i = 0; i < C::HEAD_DIM / 16; ++i) {
      int slab = i / kSteps * C::kRowBytes, column = i % kSteps * 32;
      ProductQK::ss(s_, ptx::wgmma_advance(q, slab * kConsumerRows + column),
                    ptx::wgmma_advance(k, slab * C::BLOCK_KV + column), i > 0);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void issue_pv() {
    uint64_t v = ptx::wgmma_advance(sV_, value_.index * C::kKeyBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::BLOCK_KV / 16; ++i) {
      ProductPV::template rs<true>(o_, p_[4 * i], p_[4 * i + 1], p_[4 * i + 2], p_[4 * i + 3],
                                   ptx::wgmma_advance(v, i * 16 * C::kRowBytes));
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void pin_all() {
    ptx::pin(s_);
    ptx::pin(o_);
    ptx::pin(p_);
  }

  // ---- Scores -----------------------------------------------------------------------------------

  /// What each of the warp's 16 rows sees, for the masks of the whole tile.
  __device__ __forceinline__ void find_row_limits() {
    const Work& work = smem_.work[work_.index];
    if (!work.masked) return;
    __syncwarp();
    if (lane_ < 16) {
      const AttentionParams& params = args_.params;
      int32_t in_tile = consumer_ * kConsumerRows + 16 * warp_ + lane_;
      int32_t r = work.first_row + in_tile;
      RowLimits limits;
      if (r < work.slice.rows.length) {
        Interval bounds =
            params.bounds.row(work.batch, work.head, work.slice.rows.at(r), params.seq_kv);
        Row row = make_row(params.pattern, work.slice, r, bounds);
        limits = {row.keys, row.lead};
      }
      smem_.rows[in_tile] = limits;
    }
    __syncwarp();
  }

  __device__ __forceinline__ void prepare_scores() {
    if (args_.transform) transform_scores(s_, args_.params.scale, args_.params.softcap);
    if (info_.kind != TileKind::kWhole) mask_scores();
  }

  __device__ __forceinline__ void mask_scores() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t word =
          visible_columns(smem_.rows[consumer_ * kConsumerRows + 16 * warp_ + lane_ / 4 + 8 * r]);
#pragma unroll
      for (int i = 0; i < C::BLOCK_KV / 4; ++i) {
        float& score = s_[4 * (i / 2) + 2 * r + i % 2];
        score = word & (1u << i) ? score : -INFINITY;
      }
    }
  }

  /// The columns of this thread that the row sees.
  __device__ __forceinline__ uint32_t visible_columns(const RowLimits& row) {
    const Pattern& pattern = args_.params.pattern;
    const int32_t column = 2 * (lane_ % 4);
    if (info_.kind == TileKind::kLead) {
      return lead_columns(pattern, smem_.work[work_.index].slice, row, info_.key + column);
    }
    if (args_.box_rows == C::BLOCK_KV) return main_columns(pattern, row, info_.key + column);
    return boxed_columns(pattern, row, info_.keys, args_.box_rows, C::BLOCK_KV, column);
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
    if (C::kEarlyRescale) ptx::pin(o_);
  }

  /// O / l and lse of a finished tile.
  __device__ __forceinline__ void write_out(const SoftmaxState& rows, int32_t finished) {
    const Work& work = smem_.work[finished];
    const bool leader = threadIdx.x % kWarpgroup == 0;
    const int32_t first = work.first_row + consumer_ * kConsumerRows;
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float l = quad_sum(rows.l[r]);
      write_lse(work, first + 16 * warp_ + lane_ / 4 + 8 * r, rows.m[r], l);
      if (args_.params.sink_logits != nullptr && l != 0.0f) {
        l += exp2_approx(args_.params.sink_logits[work.head] * kLog2e -
                         rows.m[r] * args_.scale_log2);
      }
      inverse[r] = l == 0.0f ? 0.0f : 1.0f / l;
    }

    if (C::kCrossTile && leader) ptx::tma_store_wait_read();
    ptx::named_barrier_sync(kBarrierOut + consumer_, kOutThreads);
    const uint32_t sO = ptx::smem_address(smem_.query[C::kOutBuffer][consumer_]);
    const int32_t row = 16 * warp_ + lane_ % 16;
#pragma unroll
    for (int i = 0; i < C::HEAD_DIM / 16; ++i) {
      ptx::stmatrix_x4(sO + chunk_offset(row, 2 * i + lane_ / 16),
                       pack<Element>(o_[8 * i] * inverse[0], o_[8 * i + 1] * inverse[0]),
                       pack<Element>(o_[8 * i + 2] * inverse[1], o_[8 * i + 3] * inverse[1]),
                       pack<Element>(o_[8 * i + 4] * inverse[0], o_[8 * i + 5] * inverse[0]),
                       pack<Element>(o_[8 * i + 6] * inverse[1], o_[8 * i + 7] * inverse[1]));
    }
    ptx::fence_async_proxy();
    ptx::named_barrier_sync(kBarrierOut + consumer_, kOutThreads);
    if (leader) {
#pragma unroll 1
      for (int32_t slab = 0; slab < args_.at.query_copies; ++slab) {
        ptx::tma_store(sO + slab * kConsumerRows * C::kRowBytes, &maps_.out[work.query_rows],
                       {slab * args_.at.slab_columns, first,
                        work.slice.rows.offset * args_.at.out_step + slab * args_.at.slab_step,
                        work.head, work.batch});
      }
      ptx::tma_store_commit();
      if (!C::kCrossTile) {
        ptx::tma_store_wait_read();
        ptx::mbarrier_arrive(ptx::smem_address(&smem_.query_empty[C::kOutBuffer][consumer_]));
      }
    }
    __syncwarp();
    arrive_warp(&smem_.work_empty[finished]);
  }

  __device__ __forceinline__ void write_lse(const Work& work, int32_t r, float m, float l) {
    const AttentionParams& params = args_.params;
    if (params.lse == nullptr || lane_ % 4 != 0 || r >= work.slice.rows.length) return;
    int64_t i = work.slice.rows.at(r);
    params.lse[work.batch * params.lse_stride_b + work.head * params.lse_stride_h +
               i * params.lse_stride_s] =
        l == 0.0f ? -INFINITY : m * args_.scale_log2 * kLn2 + __logf(l);
  }

  /// Byte of a 16-byte chunk of a row in a swizzled tile of 64 rows.
  __device__ __forceinline__ static uint32_t chunk_offset(int32_t row, int32_t chunk) {
    constexpr int kChunks = C::kRowBytes / 16;
    int32_t swizzled = chunk % kChunks ^ (kChunks == 8 ? row % 8 : row / 2 % 4);
    return chunk / kChunks * (kConsumerRows * C::kRowBytes) + row * C::kRowBytes + swizzled * 16;
  }

  // ---- Barriers ---------------------------------------------------------------------------------

  __device__ __forceinline__ bool next_work() {
    ptx::mbarrier_wait(ptx::smem_address(&smem_.work_full[work_.index]), work_.parity);
    return smem_.work[work_.index].batch >= 0;
  }

  __device__ __forceinline__ void wait_query() {
    ptx::mbarrier_wait(ptx::smem_address(&smem_.query_full[query_.index][consumer_]),
                       query_.parity);
  }

  /// Waits for K of the next step, and reads what is to be known of it.
  __device__ __forceinline__ void wait_key() {
    ptx::mbarrier_wait(ptx::smem_address(&smem_.key_full[key_.index]), key_.parity);
    const StepInfo& info = smem_.info[steps_++ % SharedStorage<C>::kInfoSlots];
    info_ = {info.kind, info.last != 0, info.key[0], info.key};
  }
  __device__ __forceinline__ void wait_next_key() {
    more_steps_ = !info_.last;
    if (more_steps_) wait_key();
  }
  /// Whether the tile whose K is there needs neither mask nor transformation.
  __device__ __forceinline__ bool whole_tile() const {
    return info_.kind == TileKind::kWhole && !args_.transform;
  }
  __device__ __forceinline__ void release_key() {
    arrive_warp(&smem_.key_empty[key_.index]);
    key_.advance();
  }

  __device__ __forceinline__ void wait_value() {
    ptx::mbarrier_wait(ptx::smem_address(&smem_.value_full[value_.index]), value_.parity);
  }
  __device__ __forceinline__ void release_value() {
    arrive_warp(&smem_.value_empty[value_.index]);
    value_.advance();
  }

  __device__ __forceinline__ void arrive_warp(uint64_t* barrier) {
    if (lane_ == 0) ptx::mbarrier_arrive(ptx::smem_address(barrier));
  }

  __device__ __forceinline__ void take_turn() {
    if (C::kPingPong) ptx::named_barrier_sync(kBarrierTurn + consumer_, kTurnThreads);
  }
  __device__ __forceinline__ void pass_turn() {
    if (C::kPingPong) pass_turn_to(consumer_ + 1 == C::kConsumers ? 0 : consumer_ + 1);
  }
  __device__ __forceinline__ void pass_turn_to(int consumer) {
    ptx::named_barrier_arrive(kBarrierTurn + consumer, kTurnThreads);
  }

  struct CurrentInfo {
    TileKind kind;
    bool last;
    int32_t key;
    const int32_t* keys;
  };

  const Arguments& args_;
  const TensorMaps& maps_;
  SharedStorage<C>& smem_;
  const int consumer_, warp_, lane_;
  uint64_t sQ_, sK_, sV_;
  uint32_t steps_ = 0;
  CurrentInfo info_;
  bool more_steps_ = false;
  Ring<C::kQueryBuffers> query_;
  Ring<C::kStages> key_, value_;
  Ring<SharedStorage<C>::kWorkSlots> work_;
  SoftmaxState state_;
  float s_[C::BLOCK_KV / 2];     // S, then P in float32
  float o_[C::HEAD_DIM / 2];     // O
  uint32_t p_[C::BLOCK_KV / 4];  // P, as the A operand of PV
};

}  // namespace sparse_attn::cuda::hopper
