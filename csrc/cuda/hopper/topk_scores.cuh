// Score tiles for the ranking pass of token top-k by wgmma: 128 queries and 128 keys a tile, two
// warpgroups. The products of a tile run under the work on the scores of the one before. They are
// those of the attention kernel, bit by bit. Keys come by TMA, asked for by one thread.
#pragma once

#include "../common/ptx/mbarrier.cuh"
#include "../common/ptx/tma.cuh"
#include "../common/ptx/wgmma.cuh"
#include "../portable/config.cuh"
#include "../portable/mask.cuh"
#include "../topk/score_tiles.cuh"
#include "config.h"

namespace sparse_attn::cuda::hopper {

template <int HEAD_DIM>
struct RankShape {
  static constexpr portable::TileShape kShape = {HEAD_DIM, 128, 128, 8, 3, 128, false, 2};
};

/// The portable engine's ranking, whose plan and rows the pass shares, with a shape for wgmma.
template <typename T, int HEAD_DIM>
struct RankConfig
    : portable::Config<T, portable::KernelKind::kRank, HEAD_DIM, false, RankShape<HEAD_DIM>> {
  static constexpr Dtype kDtype = std::is_same_v<T, __half> ? Dtype::kFloat16 : Dtype::kBFloat16;
  static_assert(RankConfig::kWarpRows == hopper::kWarpRows,
                "a warp holds the rows that wgmma gives it");
};

template <typename Config>
class WgmmaScores {
  using Step = typename Config::Step;
  using ScoreFragment = typename Config::ScoreFragment;
  using FlatFragment = float[Config::BLOCK_KV / 2];  // the same, as wgmma takes them
  using Product = ptx::Wgmma<Config::kDtype, Config::BLOCK_KV>;
  static constexpr int kRows = 128;  // of every tile
  static constexpr int kSlabBytes = kRows * kSlabRowBytes;
  static_assert(Config::BLOCK_Q == kRows && Config::BLOCK_KV == kRows, "tiles are alike");

 public:
  const portable::QueryTile<Config>& tile;

  /// `smem` has room for a tile of queries and three of keys, `full` a barrier for each of those.
  __device__ __forceinline__ WgmmaScores(const portable::QueryTile<Config>& tile,
                                         const CUtensorMap& map, uint32_t smem, uint32_t full)
      : tile(tile),
        map_(map),
        queries_(smem),
        keys_(smem + Config::kShape.query_bytes()),
        full_(full) {}

  /// Initialises the barriers; one thread calls it, before all synchronise.
  __device__ __forceinline__ static void init(uint32_t full) {
    for (int i = 0; i < kSlots; ++i) ptx::mbarrier_init(full + i * sizeof(uint64_t), 1);
    ptx::mbarrier_fence_init();
  }

  /// Loads the tile's queries and reads its plan; all threads call it.
  __device__ __forceinline__ void start() {
    const AttentionParams& params = tile.params;
    const View& rows = tile.work.slice.rows;
    const int64_t stride = params.query.stride_s;
    const auto* head = static_cast<const typename Config::T*>(params.query.data) +
                       tile.work.batch * params.query.stride_b +
                       tile.work.head * params.query.stride_h;
    load(queries_, {head + rows.offset * stride, rows.step * stride, tile.work.rows},
         tile.work.rows.begin);
    ptx::cp_async_commit();
    steps_ = tile.state.walk.steps;
    tile_offset_ = tile.state.walk.tile_offset;
    full_steps_ = tile.state.walk.full_steps;
    ptx::cp_async_wait<0>();
    ptx::fence_async_proxy();
    __syncthreads();
  }

  template <typename Function>
  __device__ __forceinline__ void visit(topk::Stride stride, const Function& function) {
    ScoreFragment scores;
    Walk walk = begin(stride);
#pragma unroll 1
    while (walk.more()) {
      advance(scores, walk);
      ptx::wgmma_wait<0>();
      pin(scores);
      work_on(scores, walk.current, function);
    }
    end();
  }

  /// The same for a function without branches of single lanes, under which the next products run;
  /// it gets tiles in which nothing is seen, too.
  template <typename Function>
  __device__ __forceinline__ void visit_straight(topk::Stride stride, const Function& function) {
    ScoreFragment even, odd;
    Walk walk = begin(stride);
    if (!walk.more()) return end();
    advance(even, walk);
    ptx::wgmma_wait<0>();
    pin(even);
    auto turn = [&](ScoreFragment& scores, ScoreFragment& upcoming) {
      const Step step = walk.current;
      if (step.masked()) portable::mask_scores(scores, tile, step);
      const bool more = walk.more();
      if (more) advance(upcoming, walk);
      function(scores, step);
      ptx::wgmma_wait<0>();
      pin(upcoming);
      return more;
    };
    while (turn(even, odd) && turn(odd, even)) {
    }
    end();
  }

 private:
  static constexpr int kSlots = Config::kShape.slots;
  static constexpr int kAhead = kSlots - 1;

  /// Where a walk stands: the step whose products were started last, and those after it, whose
  /// keys are on their way.
  struct Walk {
    topk::Stride stride;
    int32_t position;
    int slot;  // of ahead[0]
    Step current;
    Step ahead[kAhead];
    __device__ __forceinline__ bool more() const { return ahead[0].exists(); }
  };

  __device__ __forceinline__ Walk begin(topk::Stride stride) {
    Walk walk = {stride, stride.first(), 0, {}, {}};
#pragma unroll
    for (int i = 0; i < kAhead; ++i) walk.ahead[i] = load_next(walk, i);
    return walk;
  }

  /// Waits for the readers of the last keys.
  __device__ __forceinline__ static void end() { __syncthreads(); }

  /// Asks for the next step's keys: all of a plain call's tiles are main tiles.
  __device__ __forceinline__ Step load_next(Walk& walk, int slot) const {
    Step step;
    const int32_t at = walk.position;
    walk.position += walk.stride.step;
    if (at >= steps_) return step;
    step.code =
        (at + tile_offset_) * Config::BLOCK_KV | (full_steps_.contains(at) ? 0 : Step::kMasked);
    if (threadIdx.x == 0) {
      const uint32_t full = full_ + slot * sizeof(uint64_t);
      ptx::mbarrier_arrive_expect(full, Config::kShape.slot_bytes());
      ptx::tma_load(keys_ + slot * Config::kShape.slot_bytes(), &map_,
                    {0, step.start(), 0, tile.work.kv_head, tile.work.batch}, full,
                    ptx::kEvictLast);
    }
    return step;
  }

  /// Starts the products of the next step, and loads one into the slot that all have read.
  __device__ __forceinline__ void advance(ScoreFragment& scores, Walk& walk) {
    ptx::mbarrier_wait(full_ + walk.slot * sizeof(uint64_t), parities_ >> walk.slot & 1);
    parities_ ^= 1u << walk.slot;
    __syncthreads();
    issue(scores, walk.slot);
    walk.current = walk.ahead[0];
#pragma unroll
    for (int i = 1; i < kAhead; ++i) walk.ahead[i - 1] = walk.ahead[i];
    walk.ahead[kAhead - 1] = load_next(walk, walk.slot == 0 ? kAhead : walk.slot - 1);
    walk.slot = walk.slot == kAhead ? 0 : walk.slot + 1;
  }

  template <typename Function>
  __device__ __forceinline__ void work_on(ScoreFragment& scores, const Step& step,
                                          const Function& function) const {
    const portable::WarpStep warp_step = portable::refine(tile, step);
    if (!warp_step.visited) return;
    if (warp_step.masked) portable::mask_scores(scores, tile, step);
    function(scores, step);
  }

  __device__ __forceinline__ static FlatFragment& flat(ScoreFragment& scores) {
    return reinterpret_cast<FlatFragment&>(scores);
  }
  __device__ __forceinline__ static void pin(ScoreFragment& scores) { ptx::pin(flat(scores)); }

  /// A tile of rows from `first` on in slabs of 64 columns, swizzled as wgmma reads them.
  __device__ __forceinline__ static void load(uint32_t to,
                                              const portable::RowSource<typename Config::T>& source,
                                              int32_t first) {
    constexpr int kChunks = Config::HEAD_DIM / 8;
    constexpr int kRowsAtOnce = Config::kThreads / kChunks;
    const int chunk = threadIdx.x % kChunks;
    const int row = threadIdx.x / kChunks;
    const int32_t element = first + row;
    const auto* from = source.data + element * source.stride + chunk * 8;
    to += chunk / 8 * kSlabBytes;
#pragma unroll
    for (int pass = 0; pass < kRows / kRowsAtOnce; ++pass) {
      const bool valid = source.valid.contains(element + pass * kRowsAtOnce);
      ptx::cp_async_16(to + swizzled<kSlabRowBytes>(row + pass * kRowsAtOnce, chunk % 8), from,
                       valid);
      from += kRowsAtOnce * source.stride;
    }
  }

  __device__ __forceinline__ void issue(ScoreFragment& scores, int slot) const {
    constexpr int kSteps = 4;  // of 16 columns in a slab
    const uint64_t queries =
        ptx::slab_descriptor(queries_ + threadIdx.x / kWarpgroup * kConsumerRows * kSlabRowBytes);
    const uint64_t keys = ptx::slab_descriptor(keys_ + slot * Config::kShape.slot_bytes());
    pin(scores);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::HEAD_DIM / 16; ++i) {
      const uint32_t at = i / kSteps * kSlabBytes + i % kSteps * 32;
      Product::ss(flat(scores), ptx::wgmma_advance(queries, at), ptx::wgmma_advance(keys, at),
                  i > 0);
    }
    ptx::wgmma_commit();
  }

  const CUtensorMap& map_;
  const uint32_t queries_, keys_;
  const uint32_t full_;    // barriers of the slots
  uint32_t parities_ = 0;  // of the phases to wait for, a bit a slot
  int32_t steps_ = 0;
  int32_t tile_offset_ = 0;
  Interval full_steps_;  // that need no mask
};

}  // namespace sparse_attn::cuda::hopper
