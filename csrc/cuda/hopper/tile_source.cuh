// The key tiles of a query tile, one a call, in the order in which they are visited: main tiles
// right to left, named by a range or by a list, then lead tiles. Run by each warp that walks them;
// a lane holds the key of one run.
#pragma once

#include "arguments.h"
#include "config.h"

namespace sparse_attn::cuda::hopper {

/// A key tile. A tile of a list is made of several runs (boxes) of keys.
struct Step {
  TileKind kind;
  bool valid = false;
  int32_t key;  // first element of this lane's box in its view; kUnlimited loads zeros
};

template <class C>
class TileSource {
 public:
  __device__ __forceinline__ TileSource(const Arguments& args, const Work& work)
      : list_(args.params.pattern.list),
        tiles_(work.tiles),
        main_left_(work.tiles.main.size()),
        box_rows_(args.box_rows) {
    if (!list_.present()) return;
    int32_t row = work.first_row / list_.block_q;
    runs_ = list_.runs(work.batch, work.head, row, box_rows_);
    main_left_ = runs_.count;
  }

  /// The first tile. There always is one: where nothing is visited, zeros that no row sees.
  __device__ __forceinline__ Step first() {
    Step step = next();
    if (!step.valid) step = {TileKind::kMasked, true, kUnlimited};
    return step;
  }

  /// The next tile; not valid when there is none.
  __device__ __forceinline__ Step next() {
    Step step;
    if (list_.present()) {
      step = next_listed();
    } else if (main_left_ > 0) {
      int32_t tile = tiles_.main.begin + --main_left_;
      step.kind = tiles_.full.contains(tile) ? TileKind::kWhole : TileKind::kMasked;
      step.key = tile * C::BLOCK_KV;
      step.valid = true;
    }
    if (!step.valid) step = next_lead();
    return step;
  }

 private:
  __device__ __forceinline__ Step next_lead() {
    Step step;
    step.kind = TileKind::kLead;
    step.valid = true;
    if (!tiles_.lead_right.empty()) {
      step.key = --tiles_.lead_right.end * C::BLOCK_KV;
    } else if (!tiles_.lead_left.empty()) {
      step.key = --tiles_.lead_left.end * C::BLOCK_KV;
    } else {
      step.valid = false;
    }
    return step;
  }

  /// Fills a tile with the last boxes of the window of candidates.
  __device__ __forceinline__ Step next_listed() {
    Step step;
    while (candidates_ == 0) {
      if (main_left_ == 0) return step;
      read_candidates();
    }
    int32_t boxes = C::BLOCK_KV / box_rows_;
    int32_t box = threadIdx.x % kWarp;
    step.key = kUnlimited;
    for (int32_t i = 0; i < boxes; ++i) {
      int32_t from = kWarp - 1 - __clz(static_cast<int>(candidates_));
      int32_t key = __shfl_sync(~0u, candidate_, imax(from, 0));
      if (i == box && candidates_ != 0) step.key = key;
      if (candidates_ != 0) candidates_ &= ~(1u << from);
    }
    bool masked = box < boxes && tiles_.needs_mask({step.key, step.key + box_rows_});
    step.kind = __any_sync(~0u, masked) ? TileKind::kMasked : TileKind::kWhole;
    step.valid = true;
    return step;
  }

  /// The window of candidates: a lane holds a box of the list, and a bit says whether it is
  /// visited.
  __device__ __forceinline__ void read_candidates() {
    int32_t first = imax(main_left_ - kWarp, 0);
    int32_t at = first + threadIdx.x % kWarp;
    bool visited = false;
    if (at < main_left_) {
      Interval run = runs_.keys(at);
      candidate_ = run.begin;
      visited = tiles_.visits(run);
    }
    candidates_ = __ballot_sync(~0u, visited);
    main_left_ = first;
  }

  const BlockList& list_;
  Tiles tiles_;
  int32_t main_left_;  // tiles of the range, or boxes of the list, that are still to come
  int32_t box_rows_;
  ListedRuns runs_;
  int32_t candidate_ = kUnlimited;
  uint32_t candidates_ = 0;
};

}  // namespace sparse_attn::cuda::hopper
