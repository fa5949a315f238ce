// What the thread blocks of estimate_hopper.cu share: sizes, shared memory, arguments, and the
// query blocks that a warpgroup works on.
#pragma once

#include <cuda.h>

#include "../common/ptx/warpgroup.cuh"
#include "../common/slab.h"
#include "estimate.cuh"
#include "fragment.cuh"

namespace sparse_attn::cuda::estimates {

constexpr int kConsumers = 3;
constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
constexpr int kVectors = kEstimateRows;    // of a warpgroup
constexpr int kKeys = kFragmentColumns;    // key vectors of a tile
constexpr int kChunk = 32;                 // key blocks whose shares are written at once ...
constexpr int kChunkPitch = kVectors + 4;  // ... their masses in shared memory, in all banks
constexpr int kChunks = 2;
constexpr int kSegments = 8;  // of an entry's keys, whose sums are joined in order
constexpr int kLanesOfOwner = kWarpgroup / kChunk;
constexpr int kMostOwners = kVectors / kLanesOfOwner;  // query blocks of a thread
constexpr int kConsumerRegisters = 160, kLoaderRegisters = 32;
constexpr int kWarpgroupBarrier = 1;                          // and one more; 0 is __syncthreads
constexpr int kTurnBarrier = kWarpgroupBarrier + kConsumers;  // and one more each

template <Dtype kDtype_, int HEAD_DIM_>
struct Config {
  static constexpr Dtype kDtype = kDtype_;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int kSlabs = HEAD_DIM / kSlabColumns;
  static constexpr int kQueryBytes = kVectors * HEAD_DIM * 2;
  static constexpr int kKeyBytes = kKeys * HEAD_DIM * 2;
  static constexpr int kStages = 3;
};

/// A query block of a warpgroup, as its shares are written.
struct Owner {
  Interval rows;    // its vectors, from the unit's first one on
  int32_t visible;  // key blocks
  float weight;     // 1 / number of vectors that see a key
};

template <typename C>
struct alignas(1024) Storage {
  uint8_t query[kConsumers][C::kQueryBytes];
  uint8_t key[C::kStages][C::kKeyBytes];
  alignas(16) float chunk[kConsumers][kChunks][kChunk * kChunkPitch];
  alignas(16) float lse[kConsumers][kVectors];
  Owner owners[kConsumers][kVectors];
  float2 states[kConsumers][kSegments][kVectors];  // of a segment: base and sum, by vector
  int64_t item;
  uint64_t item_full, item_empty;
  uint64_t key_full[C::kStages], key_empty[C::kStages];
};

struct Arguments {
  SelectParams params;
  Estimate estimate;
  CUtensorMap query, key;
  int32_t blocks_at_once;  // query blocks of a warpgroup
  int32_t teams;           // of kConsumers units, of a key head
  int64_t items;
  int32_t parts;     // thread blocks of a cluster, which share the segments of an item
  int32_t* counter;  // zeroed; null where each cluster has one item
  float* masses;     // [clusters, kConsumers, num_kv, kVectors]
  float* shares;     // [B, Hq, num_q, num_kv]
};

/// What a warpgroup works on: some query blocks of a head.
struct Unit {
  int32_t batch, head;
  int32_t rows, keys, offset;  // of the batch entry
  Interval blocks, vectors;

  /// Items go by key head, the longest first. The units of one are neighbours among those of the
  /// query heads, which read the same keys: the same query blocks of all heads come first.
  __device__ Unit(const Arguments& args, int64_t item, int consumer) {
    const SelectParams& params = args.params;
    const int32_t group = params.problem.group();
    const int64_t key_head = item / args.teams;
    const int32_t team = args.teams - 1 - static_cast<int32_t>(item % args.teams);
    const int32_t number = team * kConsumers + consumer;
    batch = static_cast<int32_t>(key_head / params.problem.heads_kv);
    head = static_cast<int32_t>(key_head % params.problem.heads_kv) * group + number % group;
    rows = params.rows(batch);
    keys = params.entry_keys(batch);
    offset = params.offset(batch);
    const int32_t first = number / group * args.blocks_at_once;
    const int32_t there = ceil_div(rows, params.block_q);
    blocks = {imin(first, there), imin(first + args.blocks_at_once, there)};
    vectors = vectors_of(args, blocks);
  }
  __device__ Interval vectors_of(const Arguments& args, Interval some) const {
    return args.estimate.vectors(some, args.params.block_q, rows);
  }
  /// Where the keys end that a row sees, of calls without bounds.
  __device__ int32_t end_of_row(const Arguments& args, int32_t i) const {
    return imax(0, end_of_keys(args.params.causal, i + offset, keys));
  }
  /// Where the key vectors end that a vector sees.
  __device__ int32_t seen(const Arguments& args, int32_t vector) const {
    const int32_t last = imin((vector + 1) * args.estimate.rows, rows) - 1;
    return ceil_div(end_of_row(args, last), args.estimate.keys);
  }
  /// Tiles of key vectors that some of the vectors see.
  __device__ int32_t tiles(const Arguments& args) const {
    return vectors.empty() ? 0 : ceil_div(seen(args, vectors.end - 1), kKeys);
  }
  /// Tiles of a segment, from the entry's keys alone: sums have the same bits whoever makes them.
  __device__ int32_t segment_tiles(const Arguments& args) const {
    return imax(1, ceil_div(ceil_div(keys, args.estimate.keys), kKeys * kSegments));
  }
};

/// Waits for all of a warpgroup.
__device__ __forceinline__ void synchronise(int consumer) {
  ptx::named_barrier_sync(kWarpgroupBarrier + consumer, kWarpgroup);
}

/// The segments of this thread block of a cluster.
__device__ __forceinline__ Interval own_segments(const Arguments& args) {
  const auto rank = static_cast<int32_t>(blockIdx.x % args.parts);
  return {rank * kSegments / args.parts, (rank + 1) * kSegments / args.parts};
}

}  // namespace sparse_attn::cuda::estimates
