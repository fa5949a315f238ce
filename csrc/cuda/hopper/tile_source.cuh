// The key tiles of a query tile, one a call, in the order in which they are visited: main tiles
// right to left, named by a range or by a list, of 32 listed runs those of one kind first, then
// lead tiles; and the mask that each needs. Run by each warp that walks them; a lane holds the key
// of one run.
#pragma once

#include "arguments.h"
#include "config.h"

namespace sparse_attn::cuda::hopper {

/// A key tile. A tile of a list is made of several runs (boxes) of keys.
struct Step {
  bool valid = false;
  bool lead = false;
  bool narrow = false;       // the last tile, of which rows see kNarrowKeys keys at most
  int32_t key = kUnlimited;  // first element of this lane's box in its view; kUnlimited loads zeros
  TileMask need = TileMask::kNone;  // of a list's tile; kWritten: any that is not of bits
  int32_t bits = -1;  // of this lane's partial block, the row of bits; -1: it is seen whole
  int32_t run = -1;   // of this lane's box in the list; -1: none, or no half tile
};

/// What a step says of the next one.
__device__ __forceinline__ Follows what_follows(const Step& next, bool masked) {
  if (!next.valid) return Follows::kNothing;
  if (next.narrow) return Follows::kNarrow;
  if (next.need == TileMask::kBits) return Follows::kBits;
  return masked ? Follows::kMasked : Follows::kWhole;
}

/// The mask of a key tile; `columns` are those of the tile, where the mask slides.
struct StepMask {
  TileMask kind = TileMask::kNone;
  Sliding columns;
};

/// Whether TileSource may name a written mask for one of the tiles.
template <class C>
__device__ __forceinline__ bool may_write_masks(const Arguments& args, const Tiles& tiles) {
  const BlockList& list = args.params.pattern.list;
  if (C::kListed && (args.box_rows < C::BLOCK_KV || list.has_bits())) {
    // Of a list that no row sees a part of, only bits that consumers cannot read are written.
    const bool cuts = !tiles.full_keys.holds({0, list.num_kv * list.block_kv});
    return cuts || (list.has_bits() && !args.reads_bits);
  }
  const Interval main = {tiles.main.begin * C::BLOCK_KV, tiles.main.end * C::BLOCK_KV};
  return !tiles.slides(main) || !tiles.full_lead.holds(tiles.seen_lead);
}

/// Tiles of keys that a query tile visits, at most.
template <class C>
__device__ __forceinline__ int32_t most_visits(const Arguments& args, const Work& work) {
  if constexpr (!C::kListed) return work.tiles.count();
  return ceil_div(work.runs.count * args.box_rows, C::BLOCK_KV);
}

/// Whether the call is one whose query tiles are claimed late: where they may differ in length.
template <class C>
__device__ __forceinline__ bool claims_late(const Arguments& args) {
  const Pattern& pattern = args.params.pattern;
  return C::kClaimsLate &&
         (C::kListed || C::kDeals || pattern.causal || pattern.left != kUnlimited);
}

/// Whether a thread block's first plan follows from the launch's parameters alone: it is then made
/// while the kernel in front still runs, and the loaders wait for that one.
template <class C>
__device__ __forceinline__ bool plans_early(const Arguments& args) {
  return C::kPlain && !C::kRagged && args.counter == nullptr &&
         args.params.sequences.query_offsets == nullptr &&
         args.params.sequences.key_origins == nullptr;
}

/// Key tiles in whose time the next query tile is claimed and planned; where bounds alone say what
/// it visits, they are read first.
constexpr int32_t kPlanningTiles = 4, kBoundedPlanningTiles = 6;
/// Key tiles of a query tile that is so short that the next one is claimed as it begins.
constexpr int32_t kShortTile = 8;

/// Where query tiles are claimed late, the key tiles of one that are loaded before the next one is
/// claimed; 0: it is claimed without. A list is read from memory before its first tile is named.
template <class C>
__device__ __forceinline__ int32_t loads_before_claim(const Arguments& args, const Work& work) {
  const bool window = !C::kListed && args.params.pattern.left != kUnlimited;
  const int32_t most_at_once = window || C::kDeals ? kPlanningTiles : kShortTile;
  const bool bounded =
      C::kBounds && !C::kListed && !window && args.params.scores.bounds.data != nullptr;
  const int32_t planning = bounded ? kBoundedPlanningTiles : kPlanningTiles;
  const int32_t visits = most_visits<C>(args, work);
  return claims_late<C>(args) && visits > most_at_once ? visits - planning : 0;
}

/// `kMasks`: for a warp that asks for masks, and in lists for bits of partial blocks.
template <class C, bool kMasks>
class TileSource {
 public:
  __device__ __forceinline__ TileSource(const Arguments& args, const Work& work)
      : list_(args.params.pattern.list),
        tiles_(work.tiles),
        runs_(work.runs),
        box_rows_(args.box_rows),
        boxes_(args.boxes),
        reads_bits_(args.reads_bits),
        main_begin_(work.tiles.main.begin),
        full_keys_(work.tiles.full_keys),
        main_left_(C::kListed ? work.runs.count : work.tiles.main.size()),
        lead_left_(work.tiles.lead_left),
        lead_right_(work.tiles.lead_right),
        narrow_(C::kNarrows && args.lead_rows == kNarrowKeys && is_narrow(work.tiles)) {}

  /// The first tile. There always is one: where nothing is visited, zeros that no row sees.
  __device__ __forceinline__ Step first() {
    Step step = next();
    if (!step.valid) step.need = TileMask::kWritten;
    step.valid = true;
    return step;
  }

  /// The next tile; not valid when there is none.
  __device__ __forceinline__ Step next() {
    Step step;
    if constexpr (C::kListed) {
      step = next_listed();
    } else if (main_left_ > 0) {
      step = {true, false, false, (main_begin_ + --main_left_) * C::BLOCK_KV};
    }
    if (C::kLeads && !step.valid) step = next_lead();
    return step;
  }

  /// Whether a tile that was named needs a mask.
  __device__ __forceinline__ bool needs_mask(const Step& step) const {
    if constexpr (C::kListed) return step.need != TileMask::kNone;
    const Interval run = {step.key, step.key + C::BLOCK_KV};
    return step.lead ? tiles_.lead_needs_mask(run) : !full_keys_.holds(run);
  }

  /// The mask of a tile that needs one.
  __device__ __forceinline__ StepMask mask(const Step& step) const {
    if constexpr (C::kListed) return listed_mask(step);
    if (step.key == kUnlimited) return same_for_all({0, 0}, 0);
    const Interval run = {step.key, step.key + C::BLOCK_KV};
    if (step.lead) {
      return tiles_.lead_is_shared(run) ? same_for_all(tiles_.full_lead, step.key) : written();
    }
    return C::kPlain || tiles_.slides(run) ? sliding(tiles_.sliding, step.key) : written();
  }

 private:
  __device__ __forceinline__ Step next_lead() {
    if (!lead_right_.empty()) return {true, true, false, --lead_right_.end * C::BLOCK_KV};
    if (lead_left_.empty()) return {};
    const int32_t key = --lead_left_.end * C::BLOCK_KV;
    return {true, true, narrow_, narrow_ ? narrow_keys(tiles_) * kNarrowKeys : key};
  }

  /// Which aligned run of kNarrowKeys begins the lead tiles.
  __device__ __forceinline__ static int32_t narrow_keys(const Tiles& tiles) {
    return tiles.seen_lead.begin / kNarrowKeys;
  }
  /// Whether that run is all that rows see of the one lead tile, which follows a main one. In the
  /// place that keys have in a whole tile, they give the same bits.
  __device__ __forceinline__ static bool is_narrow(const Tiles& tiles) {
    return !tiles.main.empty() && tiles.lead_left.size() == 1 && tiles.lead_right.empty() &&
           (tiles.seen_lead.end - 1) / kNarrowKeys == narrow_keys(tiles);
  }

  static constexpr bool kBits = kMasks && C::kPartial;  // whether it names them
  __device__ __forceinline__ bool has_bits() const { return C::kPartial && list_.has_bits(); }

  // ---- Lists ------------------------------------------------------------------------------------

  /// The candidates of which the next tile is made: those of one kind while they fill it, then all
  /// that are left. So a query tile goes from one loop of the consumers to the other once, and few
  /// whole boxes are multiplied beside partial ones. Which kind comes first was measured.
  __device__ __forceinline__ uint32_t pool() const {
    const uint32_t first = candidates_ & (C::kHalf ? partial_ : ~partial_);
    return C::kPartial && __popc(first) >= boxes_ ? first : candidates_;
  }

  /// Fills a tile with the last boxes of the pool, in the order of their keys.
  __device__ __forceinline__ Step next_listed() {
    Step step;
    while (candidates_ == 0) {
      if (main_left_ == 0) return step;
      read_candidates();
    }
    const int32_t box = threadIdx.x % kWarp;
    const uint32_t pool = this->pool();
    const int32_t last = kWarp - 1 - __clz(static_cast<int>(pool));
    const int32_t first = last + 1 - boxes_;
    const uint32_t neighbours = first < 0 ? 0 : ((1u << boxes_) - 1) << first;
    if (first >= 0 && (pool & neighbours) == neighbours) {
      const int32_t key = __shfl_sync(~0u, candidate_, first + box);
      if (box < boxes_) step.key = key;
      step.need = need(cut_ & neighbours, false, partial_ & neighbours);
      const int32_t bits = kBits ? __shfl_sync(~0u, bits_, first + box) : -1;
      if (box < boxes_) step.bits = bits;
      if (C::kHalf && box < boxes_) step.run = main_left_ + first + box;
      candidates_ ^= neighbours;
    } else {
      gather(step, pool);
    }
    step.valid = true;
    return step;
  }

  /// Fills the tile with boxes that are not neighbours in the window, or too few.
  __device__ __forceinline__ void gather(Step& step, uint32_t pool) {
    const int32_t box = threadIdx.x % kWarp;
    const int32_t boxes = imin(boxes_, __popc(pool));
    const int32_t from = nth_highest(pool, imax(boxes - 1 - box, 0));
    const int32_t key = __shfl_sync(~0u, candidate_, from);
    const int32_t bits = kBits ? __shfl_sync(~0u, bits_, from) : -1;
    if (box < boxes) {
      step.key = key;
      step.bits = bits;
      if (C::kHalf) step.run = main_left_ + from;
    }
    const uint32_t taken = pool & ~0u << __shfl_sync(~0u, from, 0);
    candidates_ ^= taken;
    const bool missing = boxes < boxes_;
    step.need = need(cut_ & taken, missing, partial_ & taken);
  }

  /// The place of the highest bit that is set, or of one of those after it.
  __device__ __forceinline__ static int32_t nth_highest(uint32_t bits, int32_t n) {
    int32_t at = 0;  // the highest place from which on more than n bits are set
#pragma unroll
    for (int32_t half = kWarp / 2; half > 0; half /= 2) {
      if (__popc(bits >> (at + half)) > n) at += half;
    }
    return at;
  }

  /// What boxes need that are cut by what rows see of a range, too few, or have bits of their own.
  __device__ __forceinline__ TileMask need(uint32_t cut, bool missing, uint32_t partial) const {
    if (partial == 0) return cut == 0 && !missing ? TileMask::kNone : TileMask::kWritten;
    return reads_bits_ && cut == 0 ? TileMask::kBits : TileMask::kPartial;
  }

  /// The window of candidates: a lane holds a box of the list, and bits say whether it is visited,
  /// and whether it needs a mask: cut by what rows see of a range, or for its own bits.
  __device__ __forceinline__ void read_candidates() {
    int32_t first = imax(main_left_ - kWarp, 0);
    int32_t at = first + threadIdx.x % kWarp;
    bool visited = false, cut = false;
    bits_ = -1;
    if (at < main_left_) {
      Interval run = runs_.keys(at);
      candidate_ = run.begin;
      visited = tiles_.visits(run);
      cut = tiles_.needs_mask(run);
      if (has_bits() && visited) bits_ = list_.bits_row(runs_, at);
    }
    candidates_ = __ballot_sync(~0u, visited);
    cut_ = __ballot_sync(~0u, cut);
    if (has_bits()) partial_ = __ballot_sync(~0u, bits_ >= 0);
    main_left_ = first;
  }

  /// Boxes that follow each other slide as one; columns past the last box count for no row.
  __device__ __forceinline__ StepMask listed_mask(const Step& step) const {
    if (kBits && list_.has_bits() && step.need != TileMask::kWritten) return {step.need, {}};
    const int32_t key = step.key;
    const int32_t box = threadIdx.x % kWarp;
    const bool filled = key != kUnlimited;
    const int32_t columns = __popc(__ballot_sync(~0u, filled)) * box_rows_;
    const bool masked = filled && tiles_.needs_mask({key, key + box_rows_});
    if (!__any_sync(~0u, masked)) {
      return columns == C::BLOCK_KV ? StepMask{} : same_for_all({0, columns}, 0);
    }
    const int32_t first = __shfl_sync(~0u, key, 0);
    const bool adjacent = __all_sync(~0u, !filled || key == first + box * box_rows_);
    if (!adjacent || !tiles_.slides({first, first + columns})) return written();
    StepMask mask = sliding(tiles_.sliding, first);
    mask.columns.keys.end = imin(mask.columns.keys.end, columns);
    return mask;
  }

  // ---- Masks ------------------------------------------------------------------------------------

  __device__ __forceinline__ static StepMask written() { return {TileMask::kWritten, {}}; }

  /// Brought to columns of a tile that begins with element `key`.
  __device__ __forceinline__ static StepMask sliding(const Sliding& seen, int32_t key) {
    auto column = [key](int32_t x) { return imax(-C::BLOCK_Q, imin(x - key, C::BLOCK_KV)); };
    return {TileMask::kSliding,
            {{column(seen.window.begin), column(seen.window.end)},
             {column(seen.keys.begin), column(seen.keys.end)}}};
  }
  __device__ __forceinline__ static StepMask same_for_all(Interval seen, int32_t key) {
    return sliding({{-kUnlimited, kUnlimited}, seen}, key);
  }

  const BlockList& list_;
  const Tiles& tiles_;
  const ListedRuns& runs_;
  const int32_t box_rows_, boxes_;  // keys of a box, boxes of a tile
  const bool reads_bits_;
  const int32_t main_begin_;
  const Interval full_keys_;
  int32_t main_left_;  // tiles of the range, or boxes of the list, that are still to come
  Interval lead_left_, lead_right_;
  const bool narrow_;
  int32_t candidate_ = kUnlimited;
  int32_t bits_ = -1;  // of the candidate, see Step
  uint32_t candidates_ = 0, cut_ = 0, partial_ = 0;
};

}  // namespace sparse_attn::cuda::hopper
