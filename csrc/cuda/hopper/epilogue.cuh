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
#include "chunk_sum.cuh"
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
        lane_(threadIdx.x % kWarp),
        sum_(args, row_, lane_) {}

  /// Writes lse, and finds 1 / l of both rows, times the values' scale; of a chunk m and l.
  __device__ __forceinline__ void finish_rows(const SoftmaxState& rows, float scale_log2,
                                              const Work& work, float (&inverse)[2]) {
    const Strip strip = strip_of(work);
    RowState state;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      state.m[r] = log2_of_maximum<C::kBiased>(rows.m[r], scale_log2);
      state.l[r] = quad_sum(rows.l[r]);
    }
    const bool folding = folds<C>(args_, work);
    if (folding || is_chunk(work)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!folding) write_state(state.m[r], state.l[r], r, work, strip);
        if constexpr (C::kFolds) maxima_[r] = state.m[r];
        inverse[r] = state.l[r];
      }
      return;
    }
    finish(state, work, strip, inverse);
  }

  /// Stores O = `o` / l of a finished tile; of a chunk `o`, which joins the sum where the thread
  /// block takes several: others follow unless `more` is false.
  __device__ __forceinline__ void write(float (&o)[C::HEAD_DIM / 2], float (&inverse)[2],
                                        const Work& work, bool more) {
    const Strip strip = strip_of(work);
    if (folds<C>(args_, work)) {
      const RowState state = fold(o, inverse, work, strip, !more);
      if (more) return;
      if (is_piece(work)) {
        write_piece(o, state, work, strip);
        if constexpr (!C::kCrossTile) release_query();
        __syncwarp();  // before lane 0 gives the work's slot back
        return;
      }
    } else if (is_chunk(work)) {
      write_partial(o, work, strip);
      if constexpr (!C::kCrossTile) release_query();
      __syncwarp();  // before lane 0 gives the work's slot back
      return;
    }
    const uint32_t sO = ptx::shared_address(staged(work));
    if constexpr (C::kCrossTile) {
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
    // A class of packed rows has no place of its own in the map.
    const bool strewn = args_.params.pattern.dilation > 1 && args_.params.sequences.packed();
    if (__any_sync(~0u, strip.rows < kWarpRows || strewn)) {  // a vote: uniform to the compiler
      store_first(sO, work, strip);
    } else if (lane_ == 0) {
      store(sO, work, strip);
    }
    if constexpr (!C::kCrossTile) release_query();
    __syncwarp();
  }

  /// Waits until everything is stored.
  __device__ __forceinline__ void drain() {
    if (lane_ == 0) ptx::tma_store_wait();
  }

 private:
  /// Where the warp's rows of O are staged; of a sum in float32, which takes the place of the
  /// second Q too.
  __device__ __forceinline__ uint8_t* staged(const Work& work) {
    if (!C::kWide && folds<C>(args_, work))
      return smem_.query[C::kOutBuffer - 1][0] + row_ * C::HEAD_DIM * 4;
    return smem_.query[C::kOutBuffer][0] + row_ * C::kColumns * 2;
  }

  __device__ __forceinline__ static bool is_chunk(const Work& work) {
    return C::kFewQueries || (C::kSplits && work.chunk >= 0);
  }

  /// Whether the merge joins what is summed here with other pieces of the tile.
  __device__ __forceinline__ bool is_piece(const Work& work) const {
    if constexpr (C::kDeals) {
      return __any_sync(~0u, work.slot >= 0);  // a vote: uniform to the compiler
    } else {
      return !C::kRagged && !C::kWide && args_.folds == Fold::kGroup;
    }
  }

  /// Where the warp's rows stand. Taken once, since a wait makes the compiler read memory again.
  struct Strip {
    int32_t batch, head;
    int32_t first;  // row in the slice of its head
    int32_t rows;   // of a query, from there on; none or less: there are none
  };
  __device__ __forceinline__ Strip strip_of(const Work& work) const {
    Strip strip = {work.batch, work.head, work.first_row + row_, work.slice.rows.length};
    if constexpr (C::kPacks) {
      const int32_t head = args_.packing.head(row_);
      strip.head += head;
      strip.first = work.first_row + args_.packing.row(row_);
      if (head >= work.heads) strip.rows = 0;
    }
    strip.rows -= strip.first;
    return strip;
  }

  /// Writes lse of this thread's rows; finds 1 / l of them, times the values' scale.
  __device__ __forceinline__ void finish(const RowState& state, const Work& work,
                                         const Strip& strip, float (&inverse)[2]) const {
    inverse[0] = inverse[1] = 0.0f;
    if (strip.rows <= 0) return;
    const Outputs& outputs = args_.params.outputs;
    if (outputs.lse != nullptr && lane_ % 4 == 0) {
      float* of_head =
          outputs.lse + strip.batch * outputs.lse_stride_b + strip.head * outputs.lse_stride_h;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int32_t row = lane_ / 4 + 8 * r;
        if (row >= strip.rows) continue;
        of_head[tensor_row(work, strip.first + row) * outputs.lse_stride_s] =
            log_sum(state.m[r], state.l[r]);
      }
    }
    const float scale = scale_of(args_.params.keys.value_scale, work);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      inverse[r] =
          scale * inverse_of(state.m[r], state.l[r], args_.params.scores.sink_logits, strip.head);
    }
  }

  /// Its number among the strips of Partials.
  __device__ __forceinline__ int32_t number_of(const Strip& strip, const Work& work) const {
    const Partials& partials = args_.partials;
    const int32_t first = partials.first_query(work.slice.origin, work.slice.offset);
    const int32_t head = strip.batch * args_.params.problem.heads_q + strip.head;
    const int32_t problem = (head - partials.first_head) * args_.classes + work.slice.rows.offset;
    return problem * partials.strips + (strip.first - first) / kStripRows;
  }

  /// Of a chunk: row r of this thread's two.
  __device__ __forceinline__ void write_state(float m, float l, int r, const Work& work,
                                              const Strip& strip) {
    if (strip.rows <= 0 || lane_ % 4 != 0) return;
    const Partials& partials = args_.partials;
    const int32_t number = number_of(strip, work);
    partials.state[partials.at(number, work.chunk) * kStripRows + lane_ / 4 + 8 * r] = {m, l};
    if (work.chunk == 0 && lane_ == 0) partials.counts[number] = work.chunks;
  }

  __device__ __forceinline__ void write_partial(const float (&o)[C::HEAD_DIM / 2], const Work& work,
                                                const Strip& strip) {
    if (strip.rows > 0) {
      sum_.store_out(o, args_.partials, args_.partials.at(number_of(strip, work), work.chunk));
    }
  }

  /// Of a piece of a tile: the sum of its chunks.
  __device__ __forceinline__ void write_piece(const float (&o)[C::HEAD_DIM / 2],
                                              const RowState& state, const Work& work,
                                              const Strip& strip) {
    if (strip.rows <= 0) return;
    const Partials& partials = args_.partials;
    if constexpr (C::kDeals) {
      sum_.store(o, state, partials, int64_t{work.slot} * args_.deal.strips + row_ / kStripRows);
    } else {
      const int32_t number = number_of(strip, work);
      if (work.chunk == 0 && lane_ == 0) partials.counts[number] = work.chunks;
      sum_.store(o, state, partials, partials.at(number, work.chunk));
    }
  }

  /// Adds a chunk to what is summed of the tile; the last one becomes the result, of which
  /// `inverse` is 1 / l.
  __device__ __forceinline__ RowState fold(float (&o)[C::HEAD_DIM / 2], float (&inverse)[2],
                                           const Work& work, const Strip& strip, bool last) {
    RowState state;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      state.m[r] = inverse[r] == 0.0f ? -INFINITY : maxima_[r];
      state.l[r] = inverse[r];
    }
    if constexpr (C::kWide) {
      sum_.add_wide(o, state, strip.rows > 0, last);
    } else {
      sum_.add(o, state, reinterpret_cast<float4*>(staged(work)), work, last);
    }
    if (last && !is_piece(work)) finish(state, work, strip, inverse);
    return state;
  }

  /// Row r of the slice among the tensor's.
  __device__ __forceinline__ static int32_t tensor_row(const Work& work, int32_t r) {
    return work.sequence_row + work.slice.rows.at(r);
  }

  __device__ __forceinline__ void store(uint32_t sO, const Work& work, const Strip& strip) {
    const int32_t batch = args_.query_batch(strip.batch), row = work.sequence_row + strip.first;
    const int32_t class_at = work.slice.rows.offset * args_.at.out_step;
    const CUtensorMap* map = &maps_.out[work.query_rows];
#pragma unroll 1
    for (int32_t slab = 0; slab < args_.at.query_copies; ++slab) {
      ptx::tma_store(sO + slab * kWarpRows * C::kRowBytes, map,
                     {slab * args_.at.slab_columns, row, class_at + slab * args_.at.slab_step,
                      strip.head, batch});
    }
    ptx::tma_store_commit();
    if constexpr (!C::kCrossTile) ptx::tma_store_wait_read();
  }

  /// The same for a query's rows alone, by plain stores.
  __device__ __forceinline__ void store_first(uint32_t sO, const Work& work, const Strip& strip) {
    const TensorView& out = args_.params.outputs.out;
    const int32_t row = lane_ % kWarpRows;
    if (row < strip.rows) {
      auto* to = static_cast<uint16_t*>(out.data) + strip.batch * out.stride_b +
                 strip.head * out.stride_h + tensor_row(work, strip.first + row) * out.stride_s;
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
    ptx::mbarrier_arrive(ptx::shared_address(&smem_.query_empty[C::kOutBuffer][consumer_]));
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

  float maxima_[2];  // m of a chunk's rows
  ChunkSum<C> sum_;
};

}  // namespace sparse_attn::cuda::hopper
