// The end of the ranking pass of token top-k: the scores of a row's last interval are gathered and
// ranked one by one. Where equal scores stand there of which only some are kept, the row's keys are
// counted in their order.
#pragma once

#include "rows.cuh"

namespace sparse_attn::cuda::topk {

/// The highest score whose key is `key` at most; no score has the key of -0.
__device__ inline float highest_score(uint32_t key) {
  constexpr uint32_t kMinusZero = 0x7fffffff;
  return score_of(key == kMinusZero ? key - 1 : key);
}

/// Collects the candidates of the warp's rows, each lane in a list of its own that holds them all;
/// no branch depends on a score. Free places are -inf, which is no score.
template <typename Config, typename Source>
__device__ void gather_candidates(Source& source, const RowRank* rows, CandidateLists* candidates) {
  constexpr int kRows = 2 * Config::MT;
  const int first = threadIdx.x / 32 * Config::kWarpRows;
  for (int r = first; r < first + Config::kWarpRows; ++r) {
    candidates[r].quads[threadIdx.x % 32] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
  }
  __syncwarp();
  float low[kRows], high[kRows];
  uint32_t place[kRows];
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const int r = lane_row<Config>(row / 2, row % 2);
    const bool few = rows[r].few();
    low[row] = few ? score_of(rows[r].low) : INFINITY;
    high[row] = few ? highest_score(rows[r].high) : -INFINITY;
    place[row] = ptx::shared_address(&candidates[r].lists[0][threadIdx.x % 4]);
  }
  auto gather = [&](typename Config::ScoreFragment& rS, const typename Config::Step&) {
    for_each_score<Config>(rS, [&](float score, int mt, int h, int) {
      const int row = 2 * mt + h;
      const bool hit = low[row] <= score && score <= high[row];
      ptx::store_shared_if(hit, place[row], score);
      place[row] += hit ? sizeof(CandidateLists::lists[0]) : 0;
    });
  };
  source.visit_straight(Stride{}, gather);
  __syncwarp();
}

/// Ranks a row's candidates; a whole warp calls it. The row's interval becomes the wanted score.
__device__ inline void choose_candidate(RowRank& row, CandidateLists& candidates) {
  static_assert(kCandidates == 32, "a lane has a candidate");
  const uint32_t lane = threadIdx.x % 32;
  const float4 quad = candidates.quads[lane];
  const float own[4] = {quad.x, quad.y, quad.z, quad.w};
  uint32_t count = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) count += own[i] != -INFINITY;
  const uint32_t end = warp_prefix_sum(count);
  const uint32_t total = __shfl_sync(~0u, end, 31);
  float* packed = &candidates.lists[0][0];
  uint32_t place = end - count;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (own[i] != -INFINITY && place < kCandidates) packed[place++] = own[i];
  }
  if (lane >= total) packed[lane] = -INFINITY;
  __syncwarp();
  const float mine = packed[lane];
  uint32_t higher = 0, equal = 0;
#pragma unroll
  for (int i = 0; i < kCandidates / 4; ++i) {  // all at once: a chain of loads took longer
    const float4 others = candidates.quads[i];
    higher += (others.x > mine) + (others.y > mine) + (others.z > mine) + (others.w > mine);
    equal += (others.x == mine) + (others.y == mine) + (others.z == mine) + (others.w == mine);
  }
  const bool found = lane < total && higher < row.wanted && row.wanted <= higher + equal;
  const uint32_t finders = __ballot_sync(~0u, found);
  if (finders != 0 && lane == static_cast<uint32_t>(__ffs(finders)) - 1) {
    row.low = row.high = ordered_key(mine);
    row.wanted -= higher;
    row.count = equal;
  }
  __syncwarp();
}

/// Finds the last key kept of the rows whose interval is one score with many keys.
template <typename Config, typename Source>
__device__ void find_last_ties(Source& source, const RowRank* rows, Threshold* thresholds) {
  constexpr int kColumns = 64;  // whose ties fit a word
  uint32_t seen[Config::MT][2] = {};
  auto find = [&](typename Config::ScoreFragment& rS, const typename Config::Step& step) {
#pragma unroll
    for (int row = 0; row < 2 * Config::MT; ++row) {
      const int r = lane_row<Config>(row / 2, row % 2);
      const RowRank& rank = rows[r];
      uint32_t& before = seen[row / 2][row % 2];
#pragma unroll
      for (int part = 0; part < Config::BLOCK_KV / kColumns; ++part) {
        uint64_t ties = 0;
#pragma unroll
        for (int k = 0; k < kColumns / 4; ++k) {
          const int nt = part * (kColumns / 8) + k / 2;
          bool tie = ordered_key(rS[row / 2][nt][row % 2 * 2 + k % 2]) == rank.low;
          if (tie) ties |= uint64_t{1} << lane_column(k);
        }
        ties |= __shfl_xor_sync(~0u, ties, 1);
        ties |= __shfl_xor_sync(~0u, ties, 2);
        uint32_t count = __popcll(ties);
        if (threadIdx.x % 4 == 0 && rank.tied() && before < rank.wanted &&
            before + count >= rank.wanted) {
          for (uint32_t skip = rank.wanted - before - 1; skip > 0; --skip) ties &= ties - 1;
          int column = part * kColumns + __ffsll(ties) - 1;
          thresholds[r] = {rank.low, source.tile.key_position(step, column)};
        }
        before += count;
      }
    }
  };
  source.visit(Stride{}, find);
  __syncwarp();
}

}  // namespace sparse_attn::cuda::topk
