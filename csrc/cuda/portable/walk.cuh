// The tiles of keys that a query tile visits, one after the other: lead tiles, the main range or
// the list, tiles with scattered global tokens. Everything is uniform over the thread block.
#pragma once

#include "../../visited_tiles.h"

namespace sparse_attn::cuda::portable {

/// A visited tile, or none: the first element of its view with flags in the low bits, so that the
/// main loop holds it in one register. A gathered tile has a first key for each of its granules
/// instead, kUnlimited where the list names none. Kernels of partial blocks know the rows of bits.
template <int kGranules, bool kBits>
struct TileStep {
  static constexpr int32_t kLead = 1;    // of the lead view
  static constexpr int32_t kMasked = 2;  // some row does not see all of it
  static constexpr int32_t kWhole = 4;   // consecutive elements that all exist
  static constexpr int32_t kFlags = 7;   // tiles start at multiples of 8

  int32_t code = -1;
  int32_t granules[kGranules];
  int32_t bits[kBits ? kGranules : 1];  // of the granules' blocks; -1 where they are seen whole

  __device__ __forceinline__ bool exists() const { return code >= 0; }
  __device__ __forceinline__ int32_t start() const { return code & ~kFlags; }
  __device__ __forceinline__ bool lead() const { return code & kLead; }
  __device__ __forceinline__ bool masked() const { return code & kMasked; }
  __device__ __forceinline__ bool whole() const { return code & kWhole; }
  /// Element of the view in row or column `c` of the tile; where `listed`, of its granules.
  template <int kGranule>
  __device__ __forceinline__ int32_t element(bool listed, int c) const {
    if (kGranules == 1 || !listed) return start() + c;
    int32_t first = granules[0];  // a chain of sums keeps the array in registers
#pragma unroll
    for (int g = 1; g < kGranules; ++g) {
      first += static_cast<int>(c / kGranule >= g) * (granules[g] - granules[g - 1]);
    }
    return first + c % kGranule;
  }
  /// Whether some granule of a list's tile is of a partial block.
  __device__ __forceinline__ bool partial() const {
    if (!kBits) return false;
    bool some = false;
#pragma unroll
    for (int g = 0; g < (kBits ? kGranules : 1); ++g) some |= bits[g] >= 0;
    return some;
  }
};

/// What the walk of one query tile needs; lives in shared memory. The steps of a range pattern are
/// its lead and main tiles, those of a list its runs; tiles with global tokens come last.
struct alignas(16) WalkPlan {
  Interval main_steps;      // main tiles of a range pattern
  Interval full_steps;      // those of them that need no mask
  Interval whole_steps;     // those of them whose elements all exist
  int32_t tile_offset = 0;  // step s of main_steps is tile s + tile_offset
  int32_t steps = 0;
  int32_t range_steps = 0;
  ListedRuns runs;          // of a list
  Interval whole_granules;  // first elements of its granules whose elements all exist
  Tiles tiles;
  Interval keys_loaded;  // elements of the main view that exist for some row
};

/// Walks lists by granules of `kGranule` keys, one or several to a tile: a listed block is a whole
/// number of them.
template <int BLOCK_KV, int kGranule, bool kBits>
struct TileWalk {
  static constexpr int32_t kGranules = BLOCK_KV / kGranule;
  using Step = TileStep<kGranules, kBits>;

  const Pattern& pattern;
  const WalkPlan& plan;

  /// Moves `position` past the next visited tile and describes it.
  __device__ __forceinline__ Step next(int32_t& position) const {
    Step step;
    while (position < plan.steps) {
      int32_t at = position++;
      if (plan.main_steps.contains(at)) {
        step.code = (at + plan.tile_offset) * BLOCK_KV |
                    (plan.full_steps.contains(at) ? 0 : Step::kMasked) |
                    (plan.whole_steps.contains(at) ? Step::kWhole : 0);
        break;
      }
      if (pattern.list.present() ? listed(at, step) : other(at, step)) break;
    }
    return step;
  }

 private:
  /// A lead tile, or one with a scattered global token unless another step visits it or no row
  /// reaches it.
  __device__ __forceinline__ bool other(int32_t at, Step& step) const {
    const Tiles& tiles = plan.tiles;
    int32_t tile;
    bool masked = true;
    if (at < plan.range_steps) {
      tile = at < plan.main_steps.begin ? tiles.lead_left.begin + at
                                        : tiles.lead_right.begin + at - plan.main_steps.end;
      masked = tiles.lead_needs_mask({tile * BLOCK_KV, (tile + 1) * BLOCK_KV});
    } else {
      tile = pattern.global_tiles[at - plan.range_steps];
      if (tiles.main.contains(tile) || tiles.lead_left.contains(tile) ||
          tiles.lead_right.contains(tile) || tile * BLOCK_KV >= plan.keys_loaded.end) {
        return false;
      }
    }
    step.code = tile * BLOCK_KV | Step::kLead | (masked ? Step::kMasked : 0);
    return true;
  }

  __device__ __forceinline__ bool listed(int32_t at, Step& step) const {
    const ListedRuns& runs = plan.runs;
    bool visited = false;
    bool masked = false;
    bool whole = true;
    Interval run;
#pragma unroll
    for (int32_t g = 0; g < kGranules; ++g) {
      int32_t r = at * kGranules + g;
      run = kGranules == 1 || r < runs.count ? runs.keys(r) : Interval{kUnlimited, kUnlimited};
      step.granules[g] = run.begin;
      if (kBits) {
        step.bits[g] = run.begin < kUnlimited ? pattern.list.bits_row(runs, r) : -1;
      }
      visited |= plan.tiles.visits(run);
      masked |= plan.tiles.needs_mask(run);
      whole &= plan.whole_granules.contains(run.begin);
    }
    step.code = (kGranules == 1 ? run.begin : 0) | (masked ? Step::kMasked : 0) |
                (whole ? Step::kWhole : 0);
    if (!visited) step.code = -1;
    return visited;
  }
};

/// The plan of the query tile `rows`; `bounds` are those of its rows. `runs_load` says whether
/// consecutive elements that exist can be loaded without a look at each.
template <int BLOCK_KV, int kGranule>
__device__ WalkPlan plan_walk(const Pattern& pattern, const Slice& slice, Interval rows,
                              const Bounds& bounds, int64_t batch, int64_t head, int32_t list_row,
                              bool runs_load) {
  WalkPlan plan;
  plan.tiles = visited_tiles(pattern, slice, rows, bounds, BLOCK_KV);
  plan.keys_loaded = slice.keys.inside(bounds.any);
  Interval loaded = runs_load ? plan.keys_loaded : Interval{};
  if (pattern.list.present()) {
    plan.runs = pattern.list.runs(batch, head, list_row, kGranule);
    plan.steps = ceil_div(plan.runs.count, BLOCK_KV / kGranule);
    plan.whole_granules = {loaded.begin, loaded.end - kGranule + 1};
    return plan;
  }
  const Tiles& tiles = plan.tiles;
  int32_t left = tiles.lead_left.size();
  int32_t offset = plan.tile_offset = tiles.main.begin - left;
  plan.main_steps = {left, left + tiles.main.size()};
  plan.full_steps = {tiles.full.begin - offset, tiles.full.end - offset};
  plan.whole_steps = {ceil_div(loaded.begin, BLOCK_KV) - offset, loaded.end / BLOCK_KV - offset};
  plan.range_steps = plan.steps = tiles.count();
  if (pattern.num_global_tiles != nullptr) plan.steps += *pattern.num_global_tiles;
  return plan;
}

}  // namespace sparse_attn::cuda::portable
