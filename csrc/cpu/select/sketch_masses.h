// The softmax mass of each row in every 16 keys, by a key sketch. Keys are scored in runs of a
// fixed length, so that a row's masses depend on no thread; the rows of a key head share the codes.
#pragma once

#include "arena.h"
#include "cpu/select/sketch.h"
#include "select_params.h"

namespace sparse_attn::cpu {

class SketchMasses {
 public:
  /// Takes its memory from the arena, which only counts where it has no base; none for selectors
  /// that read no sketch.
  SketchMasses(const SelectParams& params, int64_t workers, Arena* arena);

  /// Runs of keys of all batch entries and key heads, which threads share.
  int64_t num_runs() const;
  /// Sketches the keys of a run that some row may see; for calls without a sketch of the caller.
  void make_sketch(int64_t run) const;
  /// Scores every row against a run of a sketch that is there.
  void score(int32_t worker, int64_t run) const;

  /// Adds to each block's share the mass that a row has in it, of the keys that are held.
  void add_shares(int64_t batch, int64_t head_q, int32_t row, double* share) const;

 private:
  /// Rows that are scored together, and keys of a run.
  static constexpr int32_t kRows = 16, kRunKeys = 1024;
  /// From one row of scores to the next: not a power of 2, which would share few sets of L1.
  static constexpr int32_t kScoreStride = kRunKeys + 16;

  struct Run {
    int64_t batch, head;
    Interval keys;
  };
  struct QueryRow {
    int64_t head_q;
    int32_t index;
    int64_t number;  // of all rows
  };

  Run run_at(int64_t run) const;
  QueryRow row_of(const Run& run, int32_t row) const;
  void score_rows(const Run& run, Interval rows, float* queries, float* scores) const;
  bool hide_not_held(const Run& run, Interval seen, float* scores) const;
  void add_masses(const Run& run, const QueryRow& row, Interval seen, float* scores) const;

  const SelectParams& params_;
  SketchView sketch_;     // the caller's, or one for the call
  int32_t runs_, units_;  // of a batch entry
  float* queries_;        // [workers, kRows, kMaxHeadDim]
  float* scores_;         // [workers, kRows, kScoreStride]
  float* masses_;         // [B, Hq, Sq, units], relative to e^highest of the run
  float* highest_;        // [B, Hq, Sq, runs]
  double* totals_;        // [B, Hq, Sq, runs]
};

}  // namespace sparse_attn::cpu
