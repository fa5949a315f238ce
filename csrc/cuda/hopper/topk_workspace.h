// What the ranking pass of token top-k holds in the workspace beside thresholds: lists of scores
// for each thread block, which works on one query tile after the other.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "../../params.h"

namespace sparse_attn::cuda::hopper {

constexpr int kListedRows = 128;  // of a query tile
constexpr int kListsOfRow = 4;    // one for each lane that holds it

inline int32_t rank_tiles(const AttentionParams& params) {
  return params.batch * params.heads_q * ceil_div(params.seq_q, kListedRows);
}

/// Thread blocks, of which a multiprocessor runs one.
inline int32_t rank_blocks(const AttentionParams& params) {
  int32_t multiprocessors = 1;
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, params.device);
  return std::min(multiprocessors, rank_tiles(params));
}

/// Quads of a list: a fourth of the scores that a row is expected to list, and four deviations; 0
/// where so many are listed that two walks over the tiles take less time.
inline int32_t list_capacity(const AttentionParams& params) {
  constexpr float kMostListed = 0.1f;
  constexpr float kSampled = 1024.0f, kDeviations = 4.0f, kSlack = 5.0f, kBin = 0.016f;
  const float keys = static_cast<float>(params.seq_kv);
  const float share = std::min(static_cast<float>(params.pattern.topk) / keys, 0.5f);
  const float spread = kDeviations * std::sqrt(kSampled * share * (1.0f - share));
  const float sampled = 2.0f * spread + kSlack + kBin * kSampled;
  const float most = (sampled + kDeviations * std::sqrt(sampled)) / kSampled;
  if (most > kMostListed) return 0;
  return static_cast<int32_t>(most * keys / (4 * kListsOfRow)) + 12;
}

inline int64_t list_bytes(const AttentionParams& params) {
  return int64_t{rank_blocks(params)} * kListedRows * kListsOfRow * list_capacity(params) *
         static_cast<int64_t>(sizeof(float4));
}

}  // namespace sparse_attn::cuda::hopper
