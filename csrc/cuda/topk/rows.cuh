// Where the ranking pass of token top-k stands with each row of a query tile, and the walks over
// score tiles (score_tiles.cuh) that move it on: the spread of a few scores, then histograms. Each
// warp works on its own rows.
#pragma once

#include "../common/ptx/red.cuh"
#include "../common/ptx/shared.cuh"
#include "../common/score_fragment.cuh"
#include "../common/state.cuh"
#include "bins.cuh"
#include "score_tiles.cuh"

namespace sparse_attn::cuda::topk {

/// The k-th score of a row lies between two keys.
struct RowRank {
  LinearBins bins;             // of the next histogram
  uint32_t low = 0, high = 0;  // keys
  uint32_t wanted = 0;         // place of the k-th score among those from low to high
  uint32_t count = 0;          // how many those are; 0 for a row that keeps all

  /// Everything from `low` on is kept.
  __device__ bool settled() const { return count == wanted; }
  /// Equal scores of which some are kept: the keys' order decides.
  __device__ bool tied() const { return !settled() && low == high; }
  __device__ bool few() const { return !settled() && !tied() && count <= kCandidates; }
  __device__ bool open() const { return !settled() && !tied() && !few(); }
};

/// A row's candidates, by the four lanes that hold the row; all of them fit each list.
union CandidateLists {
  float lists[kCandidates][4];
  float4 quads[32];
};
static_assert(sizeof(CandidateLists::lists) == sizeof(CandidateLists::quads),
              "each lane of a warp clears and reads a part");

/// Bins of about five standard deviations around the mean of a few tiles' scores.
template <typename Config, typename Source>
__device__ void spread_bins(Source& source, int32_t steps, RowRank* rows) {
  constexpr int32_t kTiles = 2;
  constexpr float kDeviations = 5.0f;
  float n[Config::MT][2] = {}, sum[Config::MT][2] = {}, squares[Config::MT][2] = {};
  source.visit(Stride::sample(steps, kTiles),
               [&](typename Config::ScoreFragment& rS, const typename Config::Step&) {
                 for_each_score<Config>(rS, [&](float score, int mt, int h, int) {
                   if (score == -INFINITY) return;
                   n[mt][h] += 1.0f;
                   sum[mt][h] += score;
                   squares[mt][h] += score * score;
                 });
               });
  auto add = [](float a, float b) { return a + b; };
#pragma unroll
  for (int row = 0; row < 2 * Config::MT; ++row) {
    int mt = row / 2, h = row % 2;
    float keys = fmaxf(reduce_quad(n[mt][h], add), 1.0f);
    float mean = reduce_quad(sum[mt][h], add) / keys;
    float variance = fmaxf(reduce_quad(squares[mt][h], add) / keys - mean * mean, 0.0f);
    float reach = kDeviations * sqrtf(variance);
    if (threadIdx.x % 4 == 0) {
      rows[lane_row<Config>(mt, h)].bins = LinearBins::over(mean - reach, mean + reach);
    }
  }
  __syncwarp();
}

/// The warp's rows' histograms over the visited tiles; make_bins(r) gives a row's bins.
template <typename Config, typename Source, typename MakeBins>
__device__ __forceinline__ void count_scores(Source& source, Stride stride, uint32_t* histograms,
                                             const MakeBins& make_bins) {
  const int first = threadIdx.x / 32 * Config::kWarpRows;
  uint4* own = reinterpret_cast<uint4*>(histograms + first * kBinPitch);
  for (int i = threadIdx.x % 32; i < Config::kWarpRows * kBinPitch / 4; i += 32) own[i] = {};
  __syncwarp();
  using Bins = decltype(make_bins(0));
  Bins bins[Config::MT][2];
  uint32_t words[Config::MT][2];  // where code 0 would be
#pragma unroll
  for (int row = 0; row < 2 * Config::MT; ++row) {
    const int r = lane_row<Config>(row / 2, row % 2);
    bins[row / 2][row % 2] = make_bins(r);
    words[row / 2][row % 2] =
        ptx::shared_address(histograms + r * kBinPitch) - uint32_t{4} * kFirstCode;
  }
  auto count = [&](typename Config::ScoreFragment& rS, const typename Config::Step&) {
    for_each_score<Config>(rS, [&](float score, int mt, int h, int) {
      ptx::count_shared(words[mt][h] + 4 * bins[mt][h].code(score));
    });
  };
  if constexpr (std::is_same_v<Bins, LinearBins>) {
    source.visit_straight(stride, count);
  } else {
    source.visit(stride, count);
  }
  __syncwarp();
}

}  // namespace sparse_attn::cuda::topk
