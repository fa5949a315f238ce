// The ranking pass of token top-k over an engine's score tiles: per row the k-th highest q.k and
// the last key that an exact tie still admits.
//   1 sample   the spread of two tiles' scores, then a histogram of some thousand keys
//   2 bracket  bins that hold the k-th score with high probability, few scores of the row in each
//   3 count    one walk over all tiles; rows whose bin holds many scores divide it again
//   4 choose   one more walk gathers the bin's scores, which are ranked one by one
// Counts are exact, so that a poor sample costs time and nothing else.
#pragma once

#include "bracket.cuh"
#include "candidates.cuh"

namespace sparse_attn::cuda::topk {

/// The ranking kernel's shared memory after the tiles.
template <typename Config>
struct RankStorage {
  RowRank rows[Config::BLOCK_Q];
  Threshold thresholds[Config::BLOCK_Q];
  union {
    alignas(16) uint32_t histograms[Config::BLOCK_Q * kBinPitch];
    CandidateLists candidates[Config::BLOCK_Q];
  };
};

/// The interval of the bin that holds the row's k-th score, after a histogram over `bins`.
__device__ inline void narrow(RowRank& row, const LinearBins& bins, const uint32_t* histogram,
                              uint32_t k) {
  RankedBin found[2];
  rank_bins(histogram, {k, k}, found);
  const RankedBin& place = found[0];
  row.low = place.bin < 0 ? kLowestKey + 1 : bins.first_key(place.bin);
  row.high = place.bin == kBins ? kHighestKey : bins.first_key(place.bin + 1) - 1;
  row.wanted = place.bin < 0 ? ~0u : place.wanted;
  row.count = place.bin < 0 ? ~1u : place.count;  // not known, many
}

/// The same over bins of keys, which lie inside the row's interval; `k` of all scores are wanted.
__device__ inline void narrow(RowRank& row, const KeyBins& bins, const uint32_t* histogram,
                              uint32_t k) {
  RankedBin found[2];
  rank_bins(histogram, {k, k}, found);
  const RankedBin& place = found[0];
  if (place.bin < 0 || place.bin == kBins) {  // of NaN
    row.wanted = row.count = 1;
    return;
  }
  row.low = bins.low + (static_cast<uint32_t>(place.bin) << bins.shift);
  const uint32_t rest = (1u << bins.shift) - 1;
  row.high = bins.high - row.low < rest ? bins.high : row.low + rest;
  row.wanted = place.wanted;
  row.count = place.count;
}

/// Ranks the tile's rows, whose state is prepared; all threads call it.
template <typename Config, typename Source>
__device__ __forceinline__ void rank_rows(Source& source, RankStorage<Config>& storage,
                                          Threshold* thresholds) {
  constexpr int32_t kSampleTiles = 1024 / Config::BLOCK_KV;
  const auto& tile = source.tile;

  // Each lane ranks one row of its warp.
  const int first_row = threadIdx.x / 32 * Config::kWarpRows;
  const bool has_row = threadIdx.x % 32 < Config::kWarpRows;
  const int own = first_row + threadIdx.x % Config::kWarpRows;
  RowRank& row = storage.rows[own];
  uint32_t* histogram = storage.histograms + own * kBinPitch;
  const Interval keys = tile.lane_keys();
  const int32_t k = tile.params.pattern.topk;
  const bool ranked = has_row && keys.size() > k;
  if (has_row) {
    row = RowRank{};
    storage.thresholds[own] = {kLowestKey, kUnlimited};
  }
  const int32_t steps = tile.num_steps();
  if (__syncthreads_or(ranked)) {
    spread_bins<Config>(source, steps, storage.rows);
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      const bool sampling = pass == 0;
      Stride stride = sampling ? Stride::sample(steps, kSampleTiles) : Stride{};
      if (has_row && !ranked) row.bins = {};
      __syncwarp();
      count_scores<Config>(source, stride, storage.histograms,
                           [&](int r) { return storage.rows[r].bins; });
      if (!ranked) continue;
      if (sampling) {
        int32_t sampled = 0;
        for (int32_t at = stride.first(); at < steps; at += stride.step) {
          sampled += intersect(keys, tile.keys_of_step(at)).size();
        }
        row.bins = bracket_bins(row.bins, histogram, sampled, keys.size(), k);
      } else {
        narrow(row, row.bins, histogram, k);
      }
    }
    while (__syncthreads_or(ranked && row.open())) {
      auto make_bins = [&](int r) {
        const RowRank& rank = storage.rows[r];
        return rank.open() ? KeyBins::over(rank.low, rank.high) : KeyBins{};
      };
      __syncwarp();
      const bool open = ranked && row.open();
      count_scores<Config>(source, Stride{}, storage.histograms, make_bins);
      if (open) narrow(row, make_bins(own), histogram, k);
      __syncwarp();
    }
    if (__syncthreads_or(ranked && row.few())) {
      gather_candidates<Config>(source, storage.rows, storage.candidates);
      for (int r = first_row; r < first_row + Config::kWarpRows; ++r) {
        if (storage.rows[r].few()) choose_candidate(storage.rows[r], storage.candidates[r]);
      }
    }
    __syncwarp();
    if (ranked && row.settled()) storage.thresholds[own] = {row.low, kUnlimited};
    if (__syncthreads_or(ranked && row.tied())) {
      find_last_ties<Config>(source, storage.rows, storage.thresholds);
    }
  }
  __syncwarp();
  if (has_row && own < tile.work.rows.size()) {
    thresholds[tile.row_index(own)] = storage.thresholds[own];
  }
}

}  // namespace sparse_attn::cuda::topk
