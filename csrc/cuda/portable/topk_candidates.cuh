// The end of the ranking pass of token top-k: the scores of a row's last interval are gathered and
// ranked one by one. Where more equal scores stand there than candidates fit, the row's keys are
// counted in their order.
#pragma once

#include "topk_rows.cuh"

namespace sparse_attn::cuda::portable {

/// A score of the last interval.
struct Candidate {
  uint32_t key;
  int32_t j;  // position on the key axis
  __device__ bool before(const Candidate& other) const {
    return key > other.key || (key == other.key && j < other.j);
  }
};

/// Collects the candidates of the warp's rows, in any order.
template <typename Config, typename Source>
__device__ void gather_candidates(const Source& source, RowRank* rows, Candidate* candidates) {
  // Two operations a score tell whether any of a group lies near its interval; few groups have one.
  constexpr int kGroup = 4;
  constexpr float kWider = 1.0f + 1e-6f;
  float middle[Config::MT][2], reach[Config::MT][2];
#pragma unroll
  for (int row = 0; row < 2 * Config::MT; ++row) {
    const RowRank& rank = rows[lane_row<Config>(row / 2, row % 2)];
    float low = fmaxf(score_of(rank.low), -FLT_MAX), high = fminf(score_of(rank.high), FLT_MAX);
    float centre = low + (0.5f * high - 0.5f * low);
    middle[row / 2][row % 2] = centre;
    reach[row / 2][row % 2] =
        rank.few() ? fmaxf(high - centre, centre - low) * kWider + FLT_MIN : -1.0f;
  }
  source.visit(Stride{}, [&](typename Config::Scores& rS, const typename Config::Step& step) {
#pragma unroll
    for (int row = 0; row < 2 * Config::MT; ++row) {
      const int mt = row / 2, h = row % 2;
#pragma unroll
      for (int group = 0; group < 2 * Config::NT; group += kGroup) {
        bool near = false;
        float scores[kGroup];
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          scores[i] = rS[mt][(group + i) / 2][2 * h + i % 2];
          near |= fabsf(scores[i] - middle[mt][h]) <= reach[mt][h];
        }
        if (!__any_sync(~0u, near)) continue;
        RowRank& rank = rows[lane_row<Config>(mt, h)];
#pragma unroll 1
        for (int i = 0; i < kGroup; ++i) {  // short code, that the main loop jumps over
          float score = scores[0];
#pragma unroll
          for (int other = 1; other < kGroup; ++other) {
            score = i == other ? scores[other] : score;
          }
          uint32_t key = ordered_key(score);
          if (!near || key < rank.low || key > rank.high) continue;
          uint32_t slot = atomicAdd(&rank.gathered, 1u);
          if (slot < kCandidates) {
            candidates[lane_row<Config>(mt, h) * kCandidates + slot] = {
                key, source.tile.key_position(step, lane_column(group + i))};
          }
        }
      }
    }
  });
  __syncwarp();
}

/// The threshold of one row from its candidates; a whole warp calls it, one lane gets `found`.
__device__ inline bool choose_candidate(const RowRank& rank, const Candidate* candidates,
                                        Threshold* threshold) {
  static_assert(kCandidates <= 64, "a lane has two candidates");
  const uint32_t count = rank.gathered < kCandidates ? rank.gathered : kCandidates;
  bool found = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t own = threadIdx.x % 32 + 32 * half;
    if (own >= count) continue;
    const Candidate mine = candidates[own];
    uint32_t place = 1;
    bool tied = false;
    for (uint32_t i = 0; i < count; ++i) {
      const Candidate other = candidates[i];
      place += other.before(mine);
      tied |= other.key == mine.key && other.j > mine.j;
    }
    if (place != rank.wanted) continue;
    *threshold = {mine.key, tied ? mine.j : kUnlimited};
    found = true;
  }
  return found;
}

/// Finds the last key kept of the rows whose interval is one score with many keys.
template <typename Config, typename Source>
__device__ void find_last_ties(const Source& source, const RowRank* rows, Threshold* thresholds) {
  constexpr int kColumns = 64;  // whose ties fit a word
  uint32_t seen[Config::MT][2] = {};
  source.visit(Stride{}, [&](typename Config::Scores& rS, const typename Config::Step& step) {
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
  });
  __syncwarp();
}

}  // namespace sparse_attn::cuda::portable
