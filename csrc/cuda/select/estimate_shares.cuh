// The shares of a warpgroup's query blocks in estimate_hopper.cu, from the masses that its walk
// left in the workspace and the lse of its vectors:
//
//   share of a key block = sum of 2^(mass - lse) over a query block's vectors / how many see a key
//
// Masses come in chunks of 32 key blocks, by cp.async into shared memory; a thread writes one key
// block of each chunk, for some of the query blocks. Consumer::run calls it at a walk's end.
#pragma once

#include "../common/ptx/cp_async.cuh"
#include "../common/ptx/math.cuh"
#include "estimate_unit.cuh"

namespace sparse_attn::cuda::estimates {

template <typename C>
struct Shares {
  const Arguments& args;
  Storage<C>& storage;
  const int consumer;
  const float* const masses;

  /// Finds what the unit's query blocks own.
  __device__ void write_owners(const Unit& unit) const {
    const SelectParams& params = args.params;
    for (int32_t at = threadIdx.x % kWarpgroup; at < unit.blocks.size(); at += kWarpgroup) {
      const int32_t block = unit.blocks.begin + at;
      const Interval own = intersect(unit.vectors, unit.vectors_of(args, {block, block + 1}));
      const int32_t last = imin((block + 1) * params.block_q, unit.rows) - 1;
      int32_t live = 0;
      for (int32_t v = own.begin; v < own.end; ++v) live += unit.seen(args, v) > 0;
      storage.owners[consumer][at] = {
          {own.begin - unit.vectors.begin, own.end - unit.vectors.begin},
          ceil_div(unit.end_of_row(args, last), params.block_kv),
          live > 0 ? 1.0f / static_cast<float>(live) : 0.0f};
    }
  }

  /// Asks for the masses of some key blocks, of those from `first` on; zeros where none were
  /// stored.
  __device__ void load_chunk(int32_t first, int32_t chunk, int32_t there) const {
    constexpr int kPieces = kVectors / 4;
    const uint32_t to = ptx::shared_address(storage.chunk[consumer][chunk % kChunks]);
    for (int at = threadIdx.x % kWarpgroup; at < kChunk * kPieces; at += kWarpgroup) {
      const int32_t j = first + chunk * kChunk + at / kPieces;
      const bool valid = j < there;
      ptx::cp_async_16(
          to + (at / kPieces * kChunkPitch + at % kPieces * 4) * static_cast<int>(sizeof(float)),
          masses + (valid ? int64_t{j} * kVectors + at % kPieces * 4 : 0), valid);
    }
    ptx::cp_async_commit();
  }

  /// What the query blocks of a thread have of a chunk already.
  __device__ __forceinline__ void read_shares(float (&to)[kMostOwners], const Unit& unit,
                                              const float* shares, int32_t j) const {
    const Owner* owners = storage.owners[consumer];
#pragma unroll
    for (int i = 0; i < kMostOwners; ++i) {
      const int32_t at = threadIdx.x % kWarpgroup / kChunk + i * kLanesOfOwner;
      if (at >= unit.blocks.size()) break;
      const bool reads = args.estimate.adds && j < owners[at].visible;
      to[i] = reads ? shares[int64_t{at} * args.params.num_kv + j] : 0.0f;
    }
  }

  /// The share of a key block, from its masses for the vectors of a query block.
  __device__ __forceinline__ float share_of(const Interval& rows, const float* mass) const {
    const float* lse = storage.lse[consumer];
    float total = 0.0f;
    int32_t v = rows.begin;
    if (v % 4 == 0) {
      for (; v + 4 <= rows.end; v += 4) {
        const float4 m = *reinterpret_cast<const float4*>(mass + v);
        const float4 l = *reinterpret_cast<const float4*>(lse + v);
        total += ptx::exp2_approx(m.x - l.x);
        total += ptx::exp2_approx(m.y - l.y);
        total += ptx::exp2_approx(m.z - l.z);
        total += ptx::exp2_approx(m.w - l.w);
      }
    }
    // A vector that sees nothing has an lse of infinity, and no share.
    for (; v < rows.end; ++v) total += ptx::exp2_approx(mass[v] - lse[v]);
    return total;
  }

  /// Adds the vectors' shares to those of their query blocks, for the key blocks of this thread
  /// block.
  __device__ void write(const Unit& unit) const {
    const SelectParams& params = args.params;
    const int32_t column = threadIdx.x % kChunk;
    const Owner* owners = storage.owners[consumer];
    const int32_t end = unit.vectors.empty() ? 0 : unit.seen(args, unit.vectors.end - 1);
    const Interval segments = own_segments(args);
    const int32_t of_segment = unit.segment_tiles(args) * (kKeys / args.estimate.per_block);
    const int32_t first = imin(segments.begin * of_segment, params.num_kv);
    const int32_t own_end =
        segments.end == kSegments ? params.num_kv : imin(segments.end * of_segment, params.num_kv);
    const int32_t there = imin(ceil_div(end, args.estimate.per_block), own_end);
    const int64_t list = int64_t{unit.batch} * params.problem.heads_q + unit.head;
    float* shares = args.shares + (list * params.num_q + unit.blocks.begin) * params.num_kv;
    const int32_t visible = imin(owners[unit.blocks.size() - 1].visible, own_end);
    const int32_t chunks = ceil_div(imax(visible - first, 0), kChunk);
    float before[kMostOwners], upcoming[kMostOwners];
    for (int chunk = 0; chunk < kChunks - 1; ++chunk) load_chunk(first, chunk, there);
    read_shares(before, unit, shares, first + column);
    for (int32_t chunk = 0; chunk < chunks; ++chunk) {
      ptx::cp_async_wait<kChunks - 2>();
      synchronise(consumer);
      load_chunk(first, chunk + kChunks - 1, there);
      const int32_t j = first + chunk * kChunk + column;
      read_shares(upcoming, unit, shares, j + kChunk);
      const float* mass = storage.chunk[consumer][chunk % kChunks] + column * kChunkPitch;
#pragma unroll
      for (int i = 0; i < kMostOwners; ++i) {
        const int32_t at = threadIdx.x % kWarpgroup / kChunk + i * kLanesOfOwner;
        if (at >= unit.blocks.size()) break;
        const Owner owner = owners[at];
        const float share = j < there ? share_of(owner.rows, mass) * owner.weight : 0.0f;
        if (j < imin(owner.visible, own_end))
          shares[int64_t{at} * params.num_kv + j] = before[i] + share;
        before[i] = upcoming[i];
      }
    }
    ptx::cp_async_wait<0>();
  }
};

}  // namespace sparse_attn::cuda::estimates
