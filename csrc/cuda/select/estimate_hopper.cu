// The walk of estimate.cu by wgmma, for estimates of one slice in half precision without bounds:
// the two halves of `mixed`. A thread block is a warp that loads and two warpgroups, each with 64
// query vectors of its own; both read the same tiles of 128 key vectors. The products of a tile run
// under the exponentials of the one before.
//
//   masses of a warpgroup, in the workspace    [num_kv, 64], log2 of a key block's mass for a
//   vector shares of its query blocks                 2^(mass - lse), summed over a block's vectors
#include <cuda.h>

#include "../common/launch.cuh"
#include "../common/log2_units.h"
#include "../common/ptx/cp_async.cuh"
#include "../common/ptx/global.cuh"
#include "../common/ptx/math.cuh"
#include "../common/ptx/mbarrier.cuh"
#include "../common/ptx/tma.cuh"
#include "../common/ptx/warpgroup.cuh"
#include "../common/ptx/wgmma.cuh"
#include "../common/tensor_map.h"
#include "estimate_hopper.h"

namespace sparse_attn::cuda {
namespace {

constexpr int kWarpgroup = 128, kConsumers = 2;
constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
constexpr int kVectors = kEstimateRows;  // of a warpgroup
constexpr int kKeys = 128;               // key vectors of a tile
constexpr int kRowBytes = 128;           // of a slab, which holds 64 columns
constexpr int kSlabColumns = kRowBytes / 2;
constexpr int kFragments = kKeys / 8;      // of a row: a lane holds two columns of each
constexpr int kChunk = 32;                 // key blocks whose shares are written at once ...
constexpr int kChunkPitch = kVectors + 4;  // ... their masses in shared memory, in all banks
constexpr int kChunks = 3;
constexpr int kLanesOfOwner = kWarpgroup / kChunk;
constexpr int kMostOwners = kVectors / kLanesOfOwner;  // query blocks of a thread
constexpr int kItems = 2;                              // claimed ahead
constexpr int kConsumerRegisters = 232, kLoaderRegisters = 40;
constexpr int kWarpgroupBarrier = 1;  // and one more; 0 is __syncthreads

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
  uint8_t query[kItems][kConsumers][C::kQueryBytes];
  uint8_t key[C::kStages][C::kKeyBytes];
  alignas(16) float chunk[kConsumers][kChunks][kChunk * kChunkPitch];
  alignas(16) float lse[kConsumers][kVectors];
  Owner owners[kConsumers][kVectors];
  int64_t item[kItems];
  uint64_t item_full[kItems], item_empty[kItems];
  uint64_t key_full[C::kStages], key_empty[C::kStages];
};

struct Arguments {
  SelectParams params;
  Estimate estimate;
  CUtensorMap query, key;
  int32_t blocks_at_once;  // query blocks of a warpgroup
  int32_t pairs;           // of warpgroups' units in a head
  int64_t items;
  int32_t* counter;  // zeroed; null where each thread block has one item
  float* masses;     // [thread blocks, kConsumers, num_kv, kVectors]
  float* shares;     // [B, Hq, num_q, num_kv]
};

/// What a warpgroup works on: some query blocks of a head.
struct Unit {
  int32_t batch, head;
  Interval blocks, vectors;
  int32_t end;  // of the key vectors that some of the vectors see

  /// Items go by key head, so that its query heads find their keys in L2, the longest first.
  __device__ Unit(const Arguments& args, int64_t item, int consumer) {
    const SelectParams& params = args.params;
    const int32_t group = params.group();
    const int64_t of_key_head = int64_t{args.pairs} * group;
    const int64_t key_head = item / of_key_head;
    const int32_t rest = static_cast<int32_t>(item % of_key_head);
    batch = static_cast<int32_t>(key_head / params.heads_kv);
    head = static_cast<int32_t>(key_head % params.heads_kv) * group + rest % group;
    const int32_t pair = args.pairs - 1 - rest / group;
    const int32_t first = (pair * kConsumers + consumer) * args.blocks_at_once;
    blocks = {imin(first, params.num_q), imin(first + args.blocks_at_once, params.num_q)};
    vectors = blocks.empty() ? Interval{} : args.estimate.vectors(params, blocks);
    end = vectors.empty() ? 0 : args.estimate.seen(params, batch, head, vectors.end - 1).end;
  }
  __device__ int32_t tiles() const { return ceil_div(end, kKeys); }
};

template <typename C>
__device__ void load(const Arguments& args, Storage<C>& storage) {
  int stage = 0;
  uint32_t parity = 0;
  int64_t item = blockIdx.x;
  for (int turn = 0;; ++turn) {
    const int slot = turn % kItems;
    ptx::mbarrier_wait(ptx::smem_address(&storage.item_empty[slot]), turn / kItems % 2 ^ 1);
    const uint32_t item_full = ptx::smem_address(&storage.item_full[slot]);
    storage.item[slot] = item < args.items ? item : -1;
    if (item >= args.items) return ptx::mbarrier_arrive(item_full);
    ptx::mbarrier_arrive_expect(item_full, kConsumers * C::kQueryBytes);
    int32_t tiles = 0;
    Unit unit(args, item, 0);
#pragma unroll 1
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      unit = Unit(args, item, consumer);
      tiles = imax(tiles, unit.tiles());
      for (int slab = 0; slab < C::kSlabs; ++slab) {
        ptx::tma_load(
            ptx::smem_address(storage.query[slot][consumer]) + slab * kVectors * kRowBytes,
            &args.query, {slab * kSlabColumns, unit.vectors.begin, 0, unit.head, unit.batch},
            item_full, ptx::kEvictFirst);
      }
    }
    const int32_t key_head = unit.head / args.params.group();
    for (int32_t tile = 0; tile < tiles; ++tile) {
      ptx::mbarrier_wait(ptx::smem_address(&storage.key_empty[stage]), parity ^ 1);
      const uint32_t key_full = ptx::smem_address(&storage.key_full[stage]);
      ptx::mbarrier_arrive_expect(key_full, C::kKeyBytes);
      for (int slab = 0; slab < C::kSlabs; ++slab) {
        ptx::tma_load(ptx::smem_address(storage.key[stage]) + slab * kKeys * kRowBytes, &args.key,
                      {slab * kSlabColumns, tile * kKeys, 0, key_head, unit.batch}, key_full,
                      ptx::kEvictLast);
      }
      if (++stage == C::kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
    item = args.counter == nullptr ? args.items : gridDim.x + atomicAdd(args.counter, 1);
  }
}

/// The walk of one warpgroup over all its items.
template <typename C>
struct Consumer {
  using Product = ptx::Wgmma<C::kDtype, kKeys>;
  using Scores = float[kKeys / 2];

  const Arguments& args;
  Storage<C>& storage;
  const int consumer;
  float* const masses;
  const int lane = threadIdx.x % 32, quad = threadIdx.x % 4;
  const int row = threadIdx.x % kWarpgroup / 32 * 16 + lane / 4;  // and the row 8 below it
  int stage = 0;
  uint32_t parity = 0;
  // Of the item at hand.
  uint64_t query = 0;        // descriptor
  int32_t limits[2];         // key vectors before it are seen, by row
  int32_t every;             // the same by all rows of the warpgroup
  float highest[2], sum[2];  // of the row's scores; the lane's own terms

  __device__ static void arrive(uint64_t& barrier) {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::smem_address(&barrier));
  }
  __device__ void synchronise() const {
    ptx::named_barrier_sync(kWarpgroupBarrier + consumer, kWarpgroup);
  }

  __device__ static uint64_t descriptor(uint32_t tile) {
    return ptx::wgmma_descriptor(tile, 16, 8 * kRowBytes, ptx::Swizzle::k128Bytes);
  }

  /// Waits for a tile's keys and starts its products.
  __device__ __forceinline__ void issue(Scores& scores) const {
    ptx::mbarrier_wait(ptx::smem_address(&storage.key_full[stage]), parity);
    const uint64_t keys = descriptor(ptx::smem_address(storage.key[stage]));
    constexpr int kSteps = kSlabColumns / 16;
    ptx::pin(scores);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::HEAD_DIM / 16; ++i) {
      const uint32_t in_slab = i % kSteps * 32;
      Product::ss(scores, ptx::wgmma_advance(query, i / kSteps * kVectors * kRowBytes + in_slab),
                  ptx::wgmma_advance(keys, i / kSteps * kKeys * kRowBytes + in_slab), i > 0);
    }
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ static void wait(Scores& scores) {
    ptx::wgmma_wait<0>();
    ptx::pin(scores);
  }
  __device__ __forceinline__ void release() {
    arrive(storage.key_empty[stage]);
    if (++stage == C::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }

  /// Adds what the quad's lanes hold, each lane for its half of the terms.
  template <int kStep, int kHeld>
  __device__ __forceinline__ void halve(float (&terms)[2][kFragments]) const {
    constexpr int kKept = kHeld > 1 ? kHeld / 2 : 1;
    constexpr int kOther = kHeld > 1 ? kKept : 0;
    const bool upper = kHeld > 1 && (quad & kStep);
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float kept = upper ? terms[r][kOther + i] : terms[r][i];
        const float given = upper ? terms[r][i] : terms[r][kOther + i];
        terms[r][i] = kept + __shfl_xor_sync(~0u, given, kStep);
      }
    }
  }

  /// Stores the masses of kBlocks key blocks, of which each lane of the quad sums some. No branch
  /// of single lanes: products are running.
  template <int kBlocks>
  __device__ __forceinline__ void store(float (&terms)[2][kFragments], const float (&base)[2],
                                        int32_t block) const {
    constexpr int kTogether = kFragments / kBlocks;
    constexpr int kHalf = kBlocks > 1 ? kBlocks / 2 : 1, kHeld = kBlocks > 2 ? kBlocks / 4 : 1;
    constexpr int kCopies = kBlocks >= 4 ? 1 : 4 / kBlocks;  // lanes with the same sum
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        float together = terms[r][i * kTogether];
#pragma unroll
        for (int j = 1; j < kTogether; ++j) together += terms[r][i * kTogether + j];
        terms[r][i] = together;
      }
    }
    halve<2, kBlocks>(terms);
    halve<1, kHalf>(terms);
    if (kBlocks > 1) block += quad / 2 * kHalf;
    if (kBlocks > 2) block += quad % 2 * kHeld;
    float* to = masses + int64_t{block} * kVectors + row;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const bool stores = quad % kCopies == 0 && block + i < args.params.num_kv;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        ptx::store_global_if(stores, to + i * kVectors + 8 * r, base[r] + __log2f(terms[r][i]));
      }
    }
  }

  /// Hides what a row does not see.
  __device__ __forceinline__ void mask(Scores& scores, int32_t first) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int j = 0; j < kFragments; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = scores[4 * j + 2 * r + e];
          x = first + 8 * j + 2 * quad + e < limits[r] ? x : -INFINITY;
        }
      }
    }
  }

  /// Takes in the scores of a tile: both rows at once, as each alone waits for itself.
  __device__ __forceinline__ void take(const Scores& scores, int32_t first) {
    const float scale = args.params.scale * kLog2e;
    float base[2], terms[2][kFragments];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float tops[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
      for (int j = 0; j < kFragments; ++j) {
        const float* x = scores + 4 * j + 2 * r;
        tops[j % 4] = fmaxf(tops[j % 4], fmaxf(x[0], x[1]));
      }
      base[r] = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
#pragma unroll
      for (int r = 0; r < 2; ++r) base[r] = fmaxf(base[r], __shfl_xor_sync(~0u, base[r], step));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float before = highest[r];
      highest[r] = fmaxf(before, base[r] * scale);
      base[r] = highest[r] == -INFINITY ? 0.0f : highest[r];
      sum[r] *= ptx::exp2_approx(before - base[r]);
    }
#pragma unroll
    for (int j = 0; j < kFragments; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float* x = scores + 4 * j + 2 * r;
        terms[r][j] = ptx::exp2_approx(fmaf(x[0], scale, -base[r])) +
                      ptx::exp2_approx(fmaf(x[1], scale, -base[r]));
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float all[4] = {};
#pragma unroll
      for (int j = 0; j < kFragments; ++j) all[j % 4] += terms[r][j];
      sum[r] += (all[0] + all[1]) + (all[2] + all[3]);
    }
    const int32_t per_block = args.estimate.per_block, block = first / per_block;
    switch (per_block) {
      case 8:
        return store<16>(terms, base, block);
      case 16:
        return store<8>(terms, base, block);
      case 32:
        return store<4>(terms, base, block);
      case 64:
        return store<2>(terms, base, block);
      default:
        return store<1>(terms, base, block);
    }
  }

  __device__ void begin(const Unit& unit, uint32_t tile) {
    query = descriptor(tile);
    every = kUnlimited;
    for (int32_t v = unit.vectors.begin; v < unit.vectors.begin + kVectors; v += kVectors - 1) {
      const int32_t end = unit.vectors.contains(v) ? seen(unit, v) : 0;
      every = imin(every, end);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t vector = unit.vectors.begin + row + 8 * r;
      limits[r] = unit.vectors.contains(vector) ? seen(unit, vector) : 0;
      highest[r] = -INFINITY;
      sum[r] = 0.0f;
    }
  }
  __device__ int32_t seen(const Unit& unit, int32_t vector) const {
    return args.estimate.seen(args.params, unit.batch, unit.head, vector).end;
  }

  /// Walks over the tiles that the unit sees, and lets the others pass.
  __device__ __forceinline__ void walk(int32_t own, int32_t all) {
    Scores even, odd;
    int32_t tile = 0;
    auto turn = [&](Scores& scores, Scores& upcoming) {
      const bool more = tile + 1 < own;
      if ((tile + 1) * kKeys > every) mask(scores, tile * kKeys);
      if (more) issue(upcoming);
      take(scores, tile * kKeys);
      wait(upcoming);
      if (more) release();
      ++tile;
      return more;
    };
    if (own > 0) {
      issue(even);
      wait(even);
      release();
      while (turn(even, odd) && turn(odd, even)) {
      }
    }
    for (; tile < all; ++tile) {
      ptx::mbarrier_wait(ptx::smem_address(&storage.key_full[stage]), parity);
      release();
    }
  }

  /// Writes what each row's shares are relative to: infinity where it sees nothing.
  __device__ void write_lse() const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = sum[r];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      if (quad == 0) {
        storage.lse[consumer][row + 8 * r] = limits[r] > 0 ? highest[r] + __log2f(total) : INFINITY;
      }
    }
  }

  /// Finds what the unit's query blocks own.
  __device__ void write_owners(const Unit& unit) const {
    const SelectParams& params = args.params;
    for (int32_t at = threadIdx.x % kWarpgroup; at < unit.blocks.size(); at += kWarpgroup) {
      const int32_t block = unit.blocks.begin + at;
      const Interval own =
          intersect(unit.vectors, args.estimate.vectors(params, {block, block + 1}));
      int32_t live = 0;
      for (int32_t v = own.begin; v < own.end; ++v) live += seen(unit, v) > 0;
      const Interval keys = params.keys_of_rows(unit.batch, unit.head, params.rows_of_block(block));
      storage.owners[consumer][at] = {
          {own.begin - unit.vectors.begin, own.end - unit.vectors.begin},
          SelectParams::blocks_of(keys, params.block_kv).end,
          live > 0 ? 1.0f / static_cast<float>(live) : 0.0f};
    }
  }

  /// Asks for the masses of some key blocks; zeros where none were stored.
  __device__ void load_chunk(int32_t chunk, int32_t there) const {
    constexpr int kPieces = kVectors / 4;
    const uint32_t to = ptx::smem_address(storage.chunk[consumer][chunk % kChunks]);
    for (int at = threadIdx.x % kWarpgroup; at < kChunk * kPieces; at += kWarpgroup) {
      const int32_t j = chunk * kChunk + at / kPieces;
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

  /// Adds the vectors' shares to those of their query blocks.
  __device__ void write_shares(const Unit& unit) const {
    const SelectParams& params = args.params;
    const int32_t column = threadIdx.x % kChunk;
    const Owner* owners = storage.owners[consumer];
    const int32_t there = imin(ceil_div(unit.end, args.estimate.per_block), params.num_kv);
    const int64_t list = int64_t{unit.batch} * params.heads_q + unit.head;
    float* shares = args.shares + (list * params.num_q + unit.blocks.begin) * params.num_kv;
    const int32_t chunks = ceil_div(owners[unit.blocks.size() - 1].visible, kChunk);
    float before[kMostOwners], upcoming[kMostOwners];
    for (int chunk = 0; chunk < kChunks - 1; ++chunk) load_chunk(chunk, there);
    read_shares(before, unit, shares, column);
    for (int32_t chunk = 0; chunk < chunks; ++chunk) {
      ptx::cp_async_wait<kChunks - 2>();
      synchronise();
      load_chunk(chunk + kChunks - 1, there);
      const int32_t j = chunk * kChunk + column;
      read_shares(upcoming, unit, shares, j + kChunk);
      const float* mass = storage.chunk[consumer][chunk % kChunks] + column * kChunkPitch;
#pragma unroll
      for (int i = 0; i < kMostOwners; ++i) {
        const int32_t at = threadIdx.x % kWarpgroup / kChunk + i * kLanesOfOwner;
        if (at >= unit.blocks.size()) break;
        const Owner owner = owners[at];
        const float share = j < there ? share_of(owner.rows, mass) * owner.weight : 0.0f;
        if (j < owner.visible) shares[int64_t{at} * params.num_kv + j] = before[i] + share;
        before[i] = upcoming[i];
      }
    }
    ptx::cp_async_wait<0>();
  }

  __device__ void run() {
    for (int turn = 0;; ++turn) {
      const int slot = turn % kItems;
      ptx::mbarrier_wait(ptx::smem_address(&storage.item_full[slot]), turn / kItems % 2);
      const int64_t item = storage.item[slot];
      if (item < 0) return;
      const Unit unit(args, item, consumer), other(args, item, 1 - consumer);
      begin(unit, ptx::smem_address(storage.query[slot][consumer]));
      walk(unit.tiles(), imax(unit.tiles(), other.tiles()));
      arrive(storage.item_empty[slot]);
      write_lse();
      write_owners(unit);
      synchronise();
      if (!unit.blocks.empty()) write_shares(unit);
      synchronise();  // masses and lse may be written again
    }
  }
};

template <typename C>
__global__ void __launch_bounds__(kThreads, 1)
    estimate_kernel(const __grid_constant__ Arguments args) {
  extern __shared__ __align__(1024) char memory[];
  auto& storage = *reinterpret_cast<Storage<C>*>(memory);
  if (threadIdx.x == 0) {
    constexpr int kWarps = kConsumers * kWarpgroup / 32;
    for (int i = 0; i < kItems; ++i) {
      ptx::mbarrier_init(ptx::smem_address(&storage.item_full[i]), 1);
      ptx::mbarrier_init(ptx::smem_address(&storage.item_empty[i]), kWarps);
    }
    for (int i = 0; i < C::kStages; ++i) {
      ptx::mbarrier_init(ptx::smem_address(&storage.key_full[i]), 1);
      ptx::mbarrier_init(ptx::smem_address(&storage.key_empty[i]), kWarps);
    }
    ptx::mbarrier_fence_init();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    ptx::give_registers_back<kLoaderRegisters>();
    if (threadIdx.x == 0) load<C>(args, storage);
  } else {
    ptx::take_registers<kConsumerRegisters>();
    const int consumer = threadIdx.x / kWarpgroup - 1;
    float* masses =
        args.masses + (int64_t{blockIdx.x} * kConsumers + consumer) * args.params.num_kv * kVectors;
    Consumer<C>{args, storage, consumer, masses}.run();
  }
}

/// The vectors of a tensor as a map: (column, 1, vector, head, batch), box rows `rows`.
Status encode(const SelectParams& params, const TensorView& view, int64_t first, int64_t step,
              int64_t vectors, int32_t heads, int32_t rows, CUtensorMap* map) {
  const auto* data = static_cast<const uint16_t*>(view.data) + first * view.stride_s;
  return encode_tensor_map(params.dtype, data,
                           {{params.head_dim, vectors, 1, heads, params.batch},
                            {step * view.stride_s, 0, view.stride_h, view.stride_b},
                            {kSlabColumns, rows, 1, 1, 1}},
                           map);
}

template <typename C>
Status launch(Arguments& args, int32_t most) {
  constexpr int kBytes = sizeof(Storage<C>);
  auto* kernel = estimate_kernel<C>;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return to_status(error);
  cudaStream_t stream = to_stream(args.params.stream);
  const uint32_t blocks = static_cast<uint32_t>(args.items < most ? args.items : most);
  if (blocks == args.items) args.counter = nullptr;
  if (args.counter != nullptr) {
    error = cudaMemsetAsync(args.counter, 0, sizeof(int32_t), stream);
    if (error != cudaSuccess) return to_status(error);
  }
  kernel<<<blocks, kThreads, kBytes, stream>>>(args);
  return launched();
}

template <Dtype kDtype>
Status launch_head_dim(Arguments& args, int32_t most) {
  if (args.params.head_dim <= 64) return launch<Config<kDtype, 64>>(args, most);
  return launch<Config<kDtype, 128>>(args, most);
}

bool is_aligned(const TensorView& view) {
  auto whole = [](int64_t stride) { return stride * 2 % 16 == 0; };
  return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && whole(view.stride_b) &&
         whole(view.stride_h) && whole(view.stride_s);
}

}  // namespace

bool serves_estimate_hopper(const SelectParams& params, const Estimate& estimate) {
  int32_t major = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, params.device);
  const bool halves = params.dtype != Dtype::kFloat32 && params.head_dim <= 128;
  const int32_t per_block = estimate.per_block;
  const bool whole = per_block >= 8 && per_block <= kKeys && kKeys % per_block == 0;
  return major == 9 && halves && whole && estimate.slices == 1 && params.bounds.data == nullptr &&
         is_common_scale(params.scale) && params.softcap == 0 &&
         ceil_div(params.block_q, estimate.rows) <= kVectors && is_aligned(estimate.query) &&
         is_aligned(estimate.key);
}

Status launch_estimate_hopper(const SelectParams& params, const Estimate& estimate,
                              const SelectWorkspace& workspace) {
  Arguments args = {};
  args.params = params;
  args.estimate = estimate;
  const bool rows = estimate.kind == Vectors::kRows;
  const int32_t step = rows ? estimate.rows : 1;
  const int64_t queries = rows ? params.seq_q / step : ceil_div(params.seq_q, estimate.rows);
  const int64_t keys = ceil_div(params.seq_kv, estimate.keys);
  Status status = encode(params, estimate.query, step - 1, step, queries, params.heads_q, kVectors,
                         &args.query);
  if (!status.ok()) return status;
  status = encode(params, estimate.key, 0, 1, keys, params.heads_kv, kKeys, &args.key);
  if (!status.ok()) return status;
  args.blocks_at_once = imax(1, kVectors / ceil_div(params.block_q, estimate.rows));
  args.pairs = ceil_div(params.num_q, kConsumers * args.blocks_at_once);
  args.items = int64_t{args.pairs} * params.batch * params.heads_q;
  args.counter = workspace.counter;
  args.masses = workspace.masses;
  args.shares = workspace.scores;
  int32_t multiprocessors = 0;
  cudaError_t error =
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, params.device);
  if (error != cudaSuccess) return to_status(error);
  return params.dtype == Dtype::kFloat16 ? launch_head_dim<Dtype::kFloat16>(args, multiprocessors)
                                         : launch_head_dim<Dtype::kBFloat16>(args, multiprocessors);
}

}  // namespace sparse_attn::cuda
