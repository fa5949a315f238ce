// The end of a query tile: O / l leaves through shared memory and the copy engine, lse straight
// from registers. A warp stores its own 16 rows, so that the warps of a consumer need not meet. Of
// the tile in which a sequence ends it stores the sequence's rows alone, whatever follows them in
// memory.
#pragma once

#include <type_traits>

#include "../common/ptx/mbarrier.cuh"
#include "../common/ptx/shared.cuh"
#include "../common/ptx/stmatrix.cuh"
#include "../common/ptx/tma.cuh"
#include "../common/ptx/warpgroup.cuh"
#include "../common/types.cuh"
#include "arguments.h"
#include "chunks.cuh"
#include "config.h"
#include "softmax.cuh"

namespace sparse_attn::cuda::hopper {

template <class C>
class Epilogue {
  using Work = typename SharedStorage<C>::Work;
  using Element = std::conditional_t<C::kDtype == Dtype::kFloat16, __half, __nv_bfloat16>;

 public:
  __device__ __forceinline__ Epilogue(const Arguments& args, const TensorMaps& maps,
                                      SharedStorage<C>& smem, int consumer)
      : args_(args),
        maps_(maps),
        smem_(smem),
        consumer_(consumer),
        row_(consumer * kConsumerRows + threadIdx.x % kWarpgroup / kWarp * kWarpRows),
        lane_(threadIdx.x % kWarp) {}

  /// Writes lse, and finds 1 / l of both rows, times the values' scale; of a chunk m and l, for the
  /// merge.
  __device__ __forceinline__ void finish_rows(const SoftmaxState& rows, float scale_log2,
                                              const Work& work, float (&inverse)[2]) {
    const AttentionParams& params = args_.params;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float l = quad_sum(rows.l[r]);
      const int32_t row = row_of(work, r);
      if (is_chunk(work)) {
        if (lane_ % 4 == 0 && row < work.slice.rows.length) {
          args_.partials.state[partial(work, row)] = {log2_of_maximum(rows.m[r], scale_log2), l};
          if (work.chunk == 0) {
            args_.partials.chunks[partial_row(args_, work, head_of(work), row)] = work.chunks;
          }
        }
        continue;
      }
      if (params.outputs.lse != nullptr && lane_ % 4 == 0 && row < work.slice.rows.length) {
        params.outputs.lse[work.batch * params.outputs.lse_stride_b +
                           work.head * params.outputs.lse_stride_h +
                           tensor_row(work, row) * params.outputs.lse_stride_s] =
            l == 0.0f ? -INFINITY : log2_of_maximum(rows.m[r], scale_log2) * kLn2 + __logf(l);
      }
      if (params.scores.sink_logits != nullptr && l != 0.0f) {
        l += exp2_approx(params.scores.sink_logits[work.head] * kLog2e -
                         log2_of_maximum(rows.m[r], scale_log2));
      }
      inverse[r] = l == 0.0f ? 0.0f : scale_of(params.keys.value_scale, work) * (1.0f / l);
    }
  }

  /// Stores O = `o` / l of a finished tile; of a chunk `o`.
  __device__ __forceinline__ void write(const float (&o)[C::HEAD_DIM / 2],
                                        const float (&inverse)[2], const Work& work) {
    if (is_chunk(work)) {
      write_partial(o, work);
      return;
    }
    uint8_t* tile = smem_.query[C::kOutBuffer][0] + row_ * C::kColumns * 2;
    const uint32_t sO = ptx::smem_address(tile);
    if (C::kCrossTile) {
      if (lane_ == 0) ptx::tma_store_wait_read();  // of the tile before
      __syncwarp();
    } else {  // the consumer's Q lies there
      ptx::named_barrier_sync(kBarrierOut + consumer_, kOutThreads);
    }
#pragma unroll
    for (int i = 0; i < C::HEAD_DIM / 16; ++i) {
      ptx::stmatrix_x4(sO + chunk_offset(lane_ % 16, 2 * i + lane_ / 16),
                       pack<Element>(o[8 * i] * inverse[0], o[8 * i + 1] * inverse[0]),
                       pack<Element>(o[8 * i + 2] * inverse[1], o[8 * i + 3] * inverse[1]),
                       pack<Element>(o[8 * i + 4] * inverse[0], o[8 * i + 5] * inverse[0]),
                       pack<Element>(o[8 * i + 6] * inverse[1], o[8 * i + 7] * inverse[1]));
    }
    ptx::fence_async_proxy();
    __syncwarp();
    const int32_t rows = work.slice.rows.length - work.first_row - row_;  // of the warp's
    // A class of packed rows has no place of its own in the map.
    const bool strewn = args_.params.pattern.dilation > 1 && args_.params.sequences.packed();
    if (__any_sync(~0u, rows < kWarpRows || strewn)) {  // a vote: uniform to the compiler
      store_first(rows, sO, work);
    } else if (lane_ == 0) {
      store(sO, work);
    }
    if (!C::kCrossTile) release_query();
    __syncwarp();
  }

  /// Waits until everything is stored.
  __device__ __forceinline__ void drain() {
    if (lane_ == 0) ptx::tma_store_wait();
  }

 private:
  __device__ __forceinline__ static bool is_chunk(const Work& work) {
    return C::kSplits && work.chunk >= 0;
  }

  /// m in log2 units; under masks of the lowest float it would overflow.
  __device__ __forceinline__ static float log2_of_maximum(float m, float scale_log2) {
    const float exponent = m * scale_log2;
    if (!C::kBiased || m == -INFINITY) return exponent;
    return ptx::clamp(exponent, FLT_MAX);
  }

  /// The head of this warp's rows.
  __device__ __forceinline__ int32_t head_of(const Work& work) const {
    return C::kPacks ? work.head + args_.packing.head(row_) : work.head;
  }

  /// Row r of this thread's two, in the slice; kUnlimited if their head does not exist.
  __device__ __forceinline__ int32_t row_of(const Work& work, int r) const {
    const int32_t in_warp = lane_ / 4 + 8 * r;
    if (!C::kPacks) return work.first_row + row_ + in_warp;
    if (head_of(work) >= work.head + work.heads) return kUnlimited;
    return work.first_row + args_.packing.row(row_) + in_warp;
  }

  /// Where the chunk's results of a row lie.
  __device__ __forceinline__ int64_t partial(const Work& work, int32_t row) const {
    return args_.partials.at(partial_row(args_, work, head_of(work), row), work.chunk);
  }

  __device__ __forceinline__ void write_partial(const float (&o)[C::HEAD_DIM / 2],
                                                const Work& work) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t row = row_of(work, r);
      if (row >= work.slice.rows.length) continue;
      float* out = args_.partials.out + partial(work, row) * C::HEAD_DIM + lane_ % 4 * 2;
#pragma unroll
      for (int i = 0; i < C::HEAD_DIM / 8; ++i) {
        *reinterpret_cast<float2*>(out + 8 * i) = {o[4 * i + 2 * r], o[4 * i + 2 * r + 1]};
      }
    }
    if (!C::kCrossTile) release_query();
    __syncwarp();  // before lane 0 gives the work's slot back
  }

  /// Row r of the slice among the tensor's.
  __device__ __forceinline__ static int32_t tensor_row(const Work& work, int32_t r) {
    return work.sequence_row + work.slice.rows.at(r);
  }

  __device__ __forceinline__ void store(uint32_t sO, const Work& work) {
#pragma unroll 1
    for (int32_t slab = 0; slab < args_.at.query_copies; ++slab) {
      ptx::tma_store(sO + slab * kWarpRows * C::kRowBytes, &maps_.out[work.query_rows],
                     {slab * args_.at.slab_columns, work.sequence_row + work.first_row + row_,
                      work.slice.rows.offset * args_.at.out_step + slab * args_.at.slab_step,
                      work.head, args_.query_batch(work.batch)});
    }
    ptx::tma_store_commit();
    if (!C::kCrossTile) ptx::tma_store_wait_read();
  }

  /// The same for the first `rows` rows alone, by plain stores.
  __device__ __forceinline__ void store_first(int32_t rows, uint32_t sO, const Work& work) {
    const TensorView& out = args_.params.outputs.out;
    const int32_t row = lane_ % kWarpRows;
    if (row < rows) {
      auto* to = static_cast<uint16_t*>(out.data) + work.batch * out.stride_b +
                 work.head * out.stride_h +
                 tensor_row(work, work.first_row + row_ + row) * out.stride_s;
#pragma unroll 1
      for (int32_t chunk = lane_ / kWarpRows; chunk * 8 < args_.params.problem.value_dim;
           chunk += 2) {
        *reinterpret_cast<float4*>(to + chunk * 8) =
            ptx::load_shared_float4(sO + chunk_offset(row, chunk));
      }
    }
    __syncwarp();  // before the tile is written again
  }

  /// The consumer's Q may be loaded again. Only lane 0 of each warp arrives.
  __device__ __forceinline__ void release_query() const {
    if (lane_ != 0) return;
    ptx::mbarrier_arrive(ptx::smem_address(&smem_.query_empty[C::kOutBuffer][consumer_]));
  }

  /// Byte of a 16-byte chunk of a row in a swizzled tile of a warp's rows.
  __device__ __forceinline__ static uint32_t chunk_offset(int32_t row, int32_t chunk) {
    constexpr int kChunks = C::kRowBytes / 16;
    int32_t swizzled = chunk % kChunks ^ (kChunks == 8 ? row % 8 : row / 2 % 4);
    return chunk / kChunks * (kWarpRows * C::kRowBytes) + row * C::kRowBytes + swizzled * 16;
  }

  const Arguments& args_;
  const TensorMaps& maps_;
  SharedStorage<C>& smem_;
  const int consumer_;
  const int row_;  // first of this warp's in the query tile
  const int lane_;
};

}  // namespace sparse_attn::cuda::hopper
