// Which scores count: in-tile masks of the pattern on score fragments. A tile in which each row
// sees an interval needs two comparisons a score; lead tiles of which rows see different parts,
// global bits and shared axes ask pattern.h key by key.
#pragma once

#include "../common/score_fragment.cuh"
#include "query_tile.cuh"

namespace sparse_attn::cuda::portable {

/// A main tile in which each row sees an interval of the view's elements and nothing beside it.
template <typename Config>
__device__ __forceinline__ bool is_interval_tile(const QueryTile<Config>& tile,
                                                 const typename Config::Step& step) {
  const Pattern& pattern = tile.params.pattern;
  if (Config::kRanges) return true;
  if (step.lead()) return false;
  if (!pattern.shared_axis()) return true;
  return pattern.global_bits == nullptr &&
         (!pattern.has_lead() ||
          (!pattern.list.present() && step.start() >= tile.work.slice.lead.view.length));
}

/// A lead tile of which every row sees the same interval.
template <typename Config>
__device__ __forceinline__ bool is_shared_tile(const QueryTile<Config>& tile,
                                               const typename Config::Step& step) {
  return step.lead() &&
         tile.state.walk.tiles.lead_is_shared({step.start(), step.start() + Config::BLOCK_KV});
}

/// Whether this warp computes and masks the tile of a step.
struct WarpStep {
  bool visited = true;
  bool masked = false;
};

template <typename Config>
__device__ __forceinline__ WarpStep refine(const QueryTile<Config>& tile,
                                           const typename Config::Step& step) {
  if (Config::kChunks &&
      lane_row<Config>(0, 0) - static_cast<int>(threadIdx.x) % 32 / 4 >= tile.work.rows.size()) {
    return {false, false};  // a warp without rows leaves the units to the others
  }
  if (!step.masked()) return {true, false};
  bool gathered = QueryTile<Config>::kGranules > 1 && tile.params.pattern.list.present();
  if (gathered || !is_interval_tile(tile, step)) return {true, true};
  const WarpKeys& keys = tile.state.warp_keys[threadIdx.x / 32];
  int32_t end = step.start() + Config::BLOCK_KV;
  return {step.start() < keys.any.end && keys.any.begin < end,
          step.start() < keys.all.begin || keys.all.end < end};
}

/// Bit k is set where the lane's k-th column, of a tile that begins with element `start`, is a
/// global token.
template <typename Config>
__device__ __forceinline__ uint32_t global_bits(const uint32_t* words, int32_t start,
                                                int32_t seq_kv) {
  const int32_t last = (seq_kv - 1) / 32;
  uint32_t bits = 0;
  for (int i = 0; i < ceil_div(Config::BLOCK_KV, 32); ++i) {
    const int32_t at = start / 32 + i;
    const uint32_t low = at <= last ? words[at] : 0, high = at < last ? words[at + 1] : 0;
    const uint32_t word = __funnelshift_r(low, high, start % 32) >> (threadIdx.x % 4 * 2);
#pragma unroll
    for (int k = 0; k < 8; k += 2) bits |= (word >> 4 * k & 3) << (8 * i + k);
  }
  return bits;
}

/// Bit k is set where row `r` of the tile sees the lane's k-th column; `globals` are those of
/// global tokens.
template <typename Config>
__device__ __forceinline__ uint32_t allowed_bits(const QueryTile<Config>& tile,
                                                 const typename Config::Step& step, int r,
                                                 uint32_t globals) {
  const Pattern& pattern = tile.params.pattern;
  uint32_t bits = 0;
  if (r >= tile.work.rows.size()) return bits;
  Row row = tile.row(tile.work.rows.begin + r);
  Seen seen = step.lead() ? seen_lead(pattern, tile.work.slice, row) : seen_main(pattern, row);
  if (tile.is_run() && seen.counted.empty()) {
    const int32_t start = step.start();
    auto columns = [&](Interval elements) {
      return column_bits<Config::BLOCK_KV>({elements.begin - start, elements.end - start});
    };
    return columns(seen.first) | columns(seen.second) | (globals & columns(seen.marked));
  }
#pragma unroll 1
  for (int k = 0; k < 2 * Config::NT; ++k) {
    int32_t element = tile.element(step, lane_column(k));
    bool allowed = sees(pattern, tile.work.slice, seen, element);
    bits |= static_cast<uint32_t>(allowed) << k;
  }
  return bits;
}

/// Scores of the pairs that the bits of partial blocks leave out become -inf.
template <typename Config>
__device__ __forceinline__ void mask_by_bits(typename Config::ScoreFragment& rS,
                                             const QueryTile<Config>& tile,
                                             const typename Config::Step& step) {
  constexpr int kGranule = QueryTile<Config>::kGranule;
  constexpr int kColumns = kGranule < 32 ? kGranule : 32;  // of a word
  const BlockList& list = tile.params.pattern.list;
  const int32_t first_row = tile.work.rows.begin - tile.work.list_row * list.block_q;
#pragma unroll
  for (int g = 0; g < QueryTile<Config>::kGranules; ++g) {
    const BlockBits bits = list.bits_at(step.bits[g]);
    if (!bits.present()) continue;
    const int32_t in_block = tile.granule(step, g) % list.block_kv;
#pragma unroll
    for (int row = 0; row < 2 * Config::MT; ++row) {
      const int r = imin(lane_row<Config>(row / 2, row % 2), tile.work.rows.size() - 1);
      const uint32_t* words = bits.row(first_row + r);
#pragma unroll
      for (int c = 0; c < kGranule; c += kColumns) {
        const int32_t key = in_block + c;
        const uint32_t word = words[key / 32] >> (key % 32 + threadIdx.x % 4 * 2);
#pragma unroll
        for (int k = 0; k < kColumns / 4; ++k) {
          float& score = rS[row / 2][(g * kGranule + c) / 8 + k / 2][2 * (row % 2) + k % 2];
          if (!(word >> (k / 2 * 8 + k % 2) & 1)) score = -INFINITY;
        }
      }
    }
  }
}

/// Scores that the pattern does not allow become -inf.
template <typename Config>
__device__ __forceinline__ void mask_scores(typename Config::ScoreFragment& rS,
                                            const QueryTile<Config>& tile,
                                            const typename Config::Step& step) {
  if (is_interval_tile(tile, step) || is_shared_tile(tile, step)) {
    const bool lead = !Config::kRanges && step.lead();
    Interval own = lead ? tile.state.walk.tiles.full_lead : tile.lane_keys();
    Interval keys[Config::MT][2];
#pragma unroll
    for (int row = 0; row < 2 * Config::MT; ++row) {
      int lane = row * 8 + threadIdx.x % 32 / 4;
      keys[row / 2][row % 2] = {__shfl_sync(~0u, own.begin, lane), __shfl_sync(~0u, own.end, lane)};
    }
    for_each_score<Config>(rS, [&](float& score, int mt, int h, int k) {
      constexpr int kGranule = QueryTile<Config>::kGranule;
      int g = k / 2 * 8 / kGranule;
      if (!keys[mt][h].contains(tile.granule(step, g) + lane_column(k) - g * kGranule)) {
        score = -INFINITY;
      }
    });
    return;
  }
  const uint32_t* words = tile.params.pattern.global_bits;
  uint32_t globals = 0;
  if (words != nullptr && tile.is_run()) {
    globals = global_bits<Config>(words, step.start(), tile.params.problem.seq_kv);
  }
  uint32_t bits[Config::MT][2] = {};
#pragma unroll 1
  for (int row = 0; row < 2 * Config::MT; ++row) {  // long code, that stays out of the loop's way
    uint32_t allowed = allowed_bits(tile, step, lane_row<Config>(row / 2, row % 2), globals);
#pragma unroll
    for (int i = 0; i < 2 * Config::MT; ++i) {
      bits[i / 2][i % 2] = i == row ? allowed : bits[i / 2][i % 2];
    }
  }
  for_each_score<Config>(rS, [&](float& score, int mt, int h, int k) {
    if (!(bits[mt][h] >> k & 1)) score = -INFINITY;
  });
}

}  // namespace sparse_attn::cuda::portable
