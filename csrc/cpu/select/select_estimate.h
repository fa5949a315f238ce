// What share of a query block's probability each key block has, estimated on the CPU: a short
// function for each selector (docs/design.md, "Block top-k"). Called by select_blocks.cpp: the
// preparations once for every batch entry, key block and head, then estimate for query blocks.
#pragma once

#include <cstdint>

#include "cpu/select/sketch_masses.h"
#include "cpu/vector/vector_math.h"
#include "select_params.h"

namespace sparse_attn::cpu {

/// One query block of one head, and the worker whose scratch serves it.
struct QueryBlock {
  int32_t worker = 0;
  int64_t batch = 0, head_q = 0;
  int32_t index = 0;
};

/// Each of two estimates divided by its sum over `blocks`, added into `share`.
void join_halves(Interval blocks, double* share, double* half);

class BlockEstimator {
 public:
  /// Takes its memory from the arena, which only counts where it has no base.
  BlockEstimator(const SelectParams& params, int64_t workers, Arena* arena);

  /// Marks the keys of a batch entry that some row may see, of those that a given sketch holds.
  void find_keys(int64_t batch) const;
  /// Means of the groups of a key block, or its extremes.
  void pool_keys(int64_t batch, int64_t head_kv, int32_t block) const;
  /// Scores by the key sketch, of selector sketch.
  const SketchMasses& sketch_masses() const { return sketch_masses_; }
  /// Columns and diagonals of the last rows of a query head.
  void find_lines(int32_t worker, int64_t batch, int64_t head_q) const;

  /// For each key block in `visible`: its share of the query block's probability, up to a factor
  /// that they have in common, and by what it ranks. NaN stands for a block to keep.
  void estimate(const QueryBlock& block, Interval visible, double* share, double* rank) const;

 private:
  /// Vectors that queries are multiplied with, and which of them stand for keys that exist.
  struct KeyVectors {
    const float* data;
    const uint8_t* present;
  };
  /// One worker's scratch.
  struct Scratch {
    float* scores;    // of every key, or key vector
    float* products;  // the same
    double* half;     // [num_kv]
    double* slashes;  // by difference of row and key
  };

  int32_t sum_keys(int64_t batch, int64_t head_kv, Interval keys, float* sum) const;
  void pool_extremes(int64_t batch, int64_t head_kv, Interval keys, float* extremes) const;
  void add_groups(const QueryBlock& block, double* share) const;
  void add_sampled_rows(const QueryBlock& block, double* share) const;
  void add_antidiagonals(const QueryBlock& block, double* share) const;
  void add_bounds(const QueryBlock& block, double* share) const;
  void add_sketched_rows(const QueryBlock& block, double* share) const;
  void keep_not_held(const QueryBlock& block, double* values) const;
  void add_lines(const QueryBlock& block, Interval visible, double* share) const;
  void score_means(const QueryBlock& block, Interval visible, double* rank) const;

  void add_softmax(float* scores, Interval seen, const uint8_t* present, int32_t per_block,
                   double* share) const;
  Interval score_keys(const QueryBlock& block, int32_t row, float* scores) const;
  void mean_query(const QueryBlock& block, Interval rows, float* mean) const;
  KeyVectors vectors(int64_t batch, int64_t head_q) const;
  Scratch scratch(int32_t worker) const;
  int64_t difference(int32_t query_block, int32_t key_block) const;

  const SelectParams& params_;
  const VectorMath& math_;
  int32_t width_;        // of a key vector: the head dim, or twice that for extremes
  int32_t groups_;       // key vectors of a block
  int32_t slash_step_;   // block_q and block_kv are multiples of it
  int64_t num_slashes_;  // differences of a block's first row and a block's first key, in steps

  SketchMasses sketch_masses_;
  uint8_t* exists_;      // [B, Skv]
  uint8_t* present_;     // [B, num_kv * groups]
  float* vectors_;       // [B, Hkv, num_kv * groups, width]
  double* columns_;      // [B, Hq, num_kv]
  double* slashes_;      // [B, Hq, num_slashes]
  float* scores_;        // [workers, 2, Skv + num_kv * groups]
  double* half_;         // [workers, num_kv]
  double* differences_;  // [workers, Skv + kLastRows]
};

}  // namespace sparse_attn::cpu
