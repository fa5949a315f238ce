// The tools of the CUDA library: list.cu, merge.cu, and block selection, which tools.cu puts
// together. pool.cu has means and extremes of blocks. Estimates are made by score.cu (products of
// means, scores of the caller), estimate.cu (products of vectors; by wgmma in the *_hopper.cu),
// lines.cu (columns and diagonals) and ../sketch, of keys that gather.cu laid out where need be.
// choose.cu and choose_warp.cu choose the best blocks by mass, choose_count.cu and choose_step.cu
// by number.
#pragma once

#include <cuda_runtime.h>

#include <numeric>

#include "../../select_features.h"

namespace sparse_attn::cuda {

constexpr int32_t kEstimateRows = 64;      // query vectors of a thread block's tile
constexpr int32_t kMostWalks = 396;        // at a time, each with its own masses
constexpr int64_t kMassBytes = 16 << 20;   // of all walks, or as much as the scores take, ...
constexpr int64_t kWalkBytes = 128 << 20;  // ... or half of queries and keys, up to this
constexpr int32_t kLineKeys = 1024;        // that a thread block multiplies with the last rows

/// The last rows' probabilities, and their sums by column and diagonal in units of 2^-32.
struct LineWorkspace {
  float2* partial = nullptr;           // [B, Hq, spans of keys, kLastRows], maximum and sum
  float* lse = nullptr;                // [B, Hq, kLastRows]
  unsigned long long* sums = nullptr;  // [B, Hq, num_kv + Skv + kLastRows], columns by block first
  float* slashes = nullptr;            // [B, Hq, num_slashes], by difference of first row and key
};

/// Where block selection keeps what its launches hand on.
struct SelectWorkspace {
  float* scores = nullptr;        // [B, Hq, num_q, num_kv], scores or shares
  int32_t* key_marks = nullptr;   // [B, Skv + 1], with bounds: rows that may see the key
  float* query_means = nullptr;   // mean: [B, Hq, num_q, D]
  float* key_means = nullptr;     // mean: [B, Hkv, num_kv, D]
  void* query_vectors = nullptr;  // mixed: [B, Hq, num_q * groups, D], of the inputs' type
  void* key_vectors = nullptr;    // mixed: [B, Hkv, num_kv * groups, D]; minmax: launch_extremes
  float* masses = nullptr;        // [walks, num_kv, kEstimateRows], logarithms
  int32_t walks = 0;
  int32_t mass_heads = 0;        // query heads whose masses the same memory holds
  int32_t* counter = nullptr;    // of the work that thread blocks have claimed
  LineWorkspace lines;           // vertical_slash
  SketchView sketch;             // sketch: the caller's, or one for the call
  float* tile_masses = nullptr;  // sketch: [B, Hq, Sq, tiles of kSketchTile keys]
};

/// Whether the device has wgmma, which sm_90 alone has.
inline bool has_wgmma(int32_t device) {
  int32_t major = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  return major == 9;
}
/// What walks by wgmma take: scores that are scaled, whose rows see all keys or those up to their
/// own position, and ...
constexpr Features kScaledByWgmma =
    Features::of(Feature::kQueryOffsets, Feature::kKeyOrigins, Feature::kUsedKeys);
/// ... capped ones too.
constexpr Features kScoredByWgmma =
    kScaledByWgmma.with(Features::of(Feature::kSoftcap, Feature::kOddScale));

/// Whether every row of the view begins at a multiple of so many bytes.
inline bool begins_at(int64_t bytes, const TensorView& view, int32_t element_size) {
  auto whole = [&](int64_t stride) { return stride * element_size % bytes == 0; };
  return reinterpret_cast<uintptr_t>(view.data) % bytes == 0 && whole(view.stride_b) &&
         whole(view.stride_h) && whole(view.stride_s);
}
inline bool begins_at_16_bytes(const TensorView& view, int32_t element_size) {
  return begins_at(16, view, element_size);
}

/// Whether some row of the batch entry may see key j.
__device__ __forceinline__ bool key_exists(const SelectParams& params, const int32_t* marks,
                                           int64_t batch, int32_t j) {
  if (marks == nullptr) return j < params.num_keys(batch);
  return j < params.problem.seq_kv && marks[batch * (params.problem.seq_kv + 1) + j] > 0;
}

/// Blocks of rows and of keys are multiples of it.
inline int32_t slash_step(const SelectParams& params) {
  return std::gcd(params.block_q, params.block_kv);
}
/// Differences of a query block's first row and a key block's first key, in steps.
inline int64_t num_slashes(const SelectParams& params) {
  int64_t rows = int64_t{params.num_q} * params.block_q;
  return (rows + int64_t{params.num_kv} * params.block_kv) / slash_step(params);
}

Status list_from_mask(const ListParams& params);
Status merge_states(const MergeParams& params);
Status select_blocks(const SelectParams& params);
int64_t select_workspace_bytes(const SelectParams& params);

/// Marks the keys that some row may see; with bounds only.
Status launch_marks(const SelectParams& params, int32_t* marks);
/// Means of blocks, means of groups, or extremes of key blocks, over the keys that exist (those of
/// their groups where a sketch is given): the greatest and least elements as [B, Hkv, num_kv, 2,
/// D], or side by side as [B, Hkv, num_kv, D, 2].
Status launch_block_means(const SelectParams& params, const SelectWorkspace& workspace);
Status launch_group_means(const SelectParams& params, const SelectWorkspace& workspace);
Status launch_extremes(const SelectParams& params, bool side_by_side,
                       const SelectWorkspace& workspace);
/// Shares by products of vectors (mixed, antidiagonal, minmax), or by lines (vertical_slash).
Status launch_products(const SelectParams& params, const SelectWorkspace& workspace);
Status launch_lines(const SelectParams& params, const SelectWorkspace& workspace);
/// scale * mean(Q_i) . mean(K_j) for every pair of blocks.
Status launch_block_scores(const SelectParams& params, const SelectWorkspace& workspace);
/// The caller's scores as the kernels' own.
Status launch_given_scores(const SelectParams& params, const SelectWorkspace& workspace);
/// NaN as the scores or shares of blocks that are kept because the caller's sketch does not hold
/// them.
Status launch_not_held(const SelectParams& params, const SelectWorkspace& workspace);
/// The same by their number alone: `values` are scores, whose softmax the shares are, or shares.
Status launch_choose_count(const SelectParams& params, float* values, bool scores);
/// The same for a decoding step that makes one list of the heads of a group.
bool serves_choose_step(const SelectParams& params, bool scores);
Status launch_choose_step(const SelectParams& params, const float* scores);
/// The same by mass, where a warp can hold a list.
bool serves_choose_warp(const SelectParams& params);
Status launch_choose_warp(const SelectParams& params, const float* values, bool scores);
/// The kept blocks of every row of scores, ascending.
Status launch_choose(const SelectParams& params, const SelectWorkspace& workspace);

}  // namespace sparse_attn::cuda
