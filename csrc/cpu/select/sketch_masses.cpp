// Masses by a key sketch: 2^(log2 e (s - m)) summed over 16 keys, with m the highest score of the
// run, which add_shares takes relative to that of the row.
#include "cpu/select/sketch_masses.h"

#include <algorithm>
#include <cmath>

#include "cpu/tensor_rows.h"

namespace sparse_attn::cpu {

SketchMasses::SketchMasses(const SelectParams& params, int64_t workers, Arena* arena)
    : params_(params),
      sketch_(params.sketch),
      runs_(ceil_div(params.problem.seq_kv, kRunKeys)),
      units_(ceil_div(params.problem.seq_kv, kMassKeys)) {
  if (params.selector != Selector::kSketch) {
    runs_ = units_ = 0;
    workers = 0;
  } else if (!sketch_.present()) {
    sketch_.rows = static_cast<int32_t>(round_up(int64_t{params.problem.seq_kv}, kSketchGroup));
    const int64_t rows = int64_t{params.problem.batch} * params.problem.heads_kv * sketch_.rows;
    sketch_.codes = arena->take<uint32_t>(rows * sketch_.row_words());
    sketch_.ranges = arena->take<float>(rows / sketch_.group * 2 * params.problem.head_dim);
  }
  const int64_t rows =
      int64_t{params.problem.batch} * params.problem.heads_q * params.problem.seq_q;
  queries_ = arena->take<float>(workers * kRows * kMaxHeadDim);
  scores_ = arena->take<float>(workers * kRows * kScoreStride);
  masses_ = arena->take<float>(rows * units_);
  highest_ = arena->take<float>(rows * runs_);
  totals_ = arena->take<double>(rows * runs_);
}

int64_t SketchMasses::num_runs() const {
  return int64_t{params_.problem.batch} * params_.problem.heads_kv * runs_;
}

SketchMasses::Run SketchMasses::run_at(int64_t run) const {
  const int64_t head = run / runs_;
  const int32_t begin = static_cast<int32_t>(run % runs_) * kRunKeys;
  return {head / params_.problem.heads_kv,
          head % params_.problem.heads_kv,
          {begin, imin(begin + kRunKeys, params_.problem.seq_kv)}};
}

SketchMasses::QueryRow SketchMasses::row_of(const Run& run, int32_t row) const {
  const int64_t head_q = run.head * params_.problem.group() + row / params_.problem.seq_q;
  const int32_t index = row % params_.problem.seq_q;
  return {head_q, index,
          (run.batch * params_.problem.heads_q + head_q) * params_.problem.seq_q + index};
}

void SketchMasses::make_sketch(int64_t at) const {
  const Run run = run_at(at);
  const Interval keys = intersect(params_.keys_of_entry(run.batch), run.keys);
  const Dtype dtype = params_.problem.dtype;
  const KeyRow key = [&](int32_t row) {
    const char* data = static_cast<const char*>(params_.keys.key.data);
    return data + params_.key_at(run.batch, run.head, row) * size_of(dtype);
  };
  for_each_group(sketch_, keys, [&](Interval group) {
    sketch_group(sketch_, dtype, run.batch, run.head, group.begin, group.end, key);
  });
}

void SketchMasses::score(int32_t worker, int64_t at) const {
  Run run = run_at(at);
  run.keys.end = imin(run.keys.end, params_.held_keys(run.batch));
  if (run.keys.empty()) return;
  const int32_t rows = params_.problem.group() * params_.problem.seq_q;
  for (int32_t first = 0; first < rows; first += kRows) {
    score_rows(run, {first, imin(first + kRows, rows)},
               queries_ + int64_t{worker} * kRows * kMaxHeadDim,
               scores_ + int64_t{worker} * kRows * kScoreStride);
  }
}

void SketchMasses::score_rows(const Run& run, Interval rows, float* queries, float* scores) const {
  Interval seen[kRows], all = {run.keys.end, run.keys.begin};
  std::fill(queries, queries + rows.size() * kMaxHeadDim, 0.0f);
  for (int32_t r = 0; r < rows.size(); ++r) {
    const QueryRow row = row_of(run, rows.begin + r);
    seen[r] = intersect(params_.keys_of_row(run.batch, row.head_q, row.index), run.keys);
    if (!seen[r].empty()) all = {imin(all.begin, seen[r].begin), imax(all.end, seen[r].end)};
    const Rows query = rows_of(params_.query, params_.problem.dtype, run.batch, row.head_q);
    vector_math().to_float(query.element, strided(query, row.index, 1).data,
                           queries + r * kMaxHeadDim, params_.problem.head_dim);
  }
  const Interval whole = {all.begin / kMassKeys * kMassKeys,
                          static_cast<int32_t>(round_up(int64_t{all.end}, kMassKeys))};
  for_each_group(sketch_, whole, [&](Interval group) {
    const int32_t j = group.begin;
    sketch_scores(sketch_, params_.problem.dtype, params_.sketch_entry(sketch_, run.batch, j),
                  run.head, SelectParams::sketch_row(sketch_, j), group.size(),
                  {queries, rows.size()}, scores + j - run.keys.begin, kScoreStride);
  });
  for (int32_t r = 0; r < rows.size(); ++r) {
    if (seen[r].empty()) continue;
    add_masses(run, row_of(run, rows.begin + r), seen[r],
               scores + r * kScoreStride - run.keys.begin);
  }
}

/// Hides the keys of pages that the caller's sketch does not hold; whether it holds some.
bool SketchMasses::hide_not_held(const Run& run, Interval seen, float* scores) const {
  if (!params_.sketch.paged) return true;  // runs end where batch entries do
  bool some = false;
  for_each_group(sketch_, seen, [&](Interval group) {
    const int32_t end = params_.held_end(run.batch, group.begin);
    const int32_t held = imin(imax(end, group.begin), group.end);
    std::fill(scores + held, scores + group.end, kMinusInfinity);
    some |= held > group.begin;
  });
  return some;
}

/// Masses of the keys that a row sees of a run; scores[j] is that of key j.
void SketchMasses::add_masses(const Run& run, const QueryRow& row, Interval seen,
                              float* scores) const {
  const VectorMath& math = vector_math();
  const Interval units = SelectParams::blocks_of(seen, kMassKeys);
  math.transform(scores + seen.begin, seen.size(), params_.scores.scale, params_.scores.softcap,
                 nullptr);
  std::fill(scores + units.begin * kMassKeys, scores + seen.begin, kMinusInfinity);
  std::fill(scores + seen.end, scores + units.end * kMassKeys, kMinusInfinity);
  float* masses = masses_ + row.number * units_ + units.begin;
  const int64_t at = row.number * runs_ + run.keys.begin / kRunKeys;
  if (!hide_not_held(run, seen, scores)) {
    highest_[at] = kMinusInfinity;
    totals_[at] = 0;
    std::fill(masses, masses + units.size(), 0.0f);
    return;
  }
  highest_[at] = math.sketch.masses(scores + units.begin * kMassKeys, units.size(), kLog2E, masses);
  double total = 0;
  for (int32_t unit = 0; unit < units.size(); ++unit) total += masses[unit];
  totals_[at] = total;
}

void SketchMasses::add_shares(int64_t batch, int64_t head_q, int32_t index, double* share) const {
  Interval keys = params_.keys_of_row(batch, head_q, index);
  keys.end = imin(keys.end, params_.held_keys(batch));
  if (keys.empty()) return;
  const int64_t row = (batch * params_.problem.heads_q + head_q) * params_.problem.seq_q + index;
  const float* highest = highest_ + row * runs_;
  const float* masses = masses_ + row * units_;
  const Interval runs = SelectParams::blocks_of(keys, kRunKeys);
  const float most = *std::max_element(highest + runs.begin, highest + runs.end);
  // NaN where a score is, where the highest is infinite and where all are -infinity: then all of
  // the row's blocks are kept.
  double total = 0;
  for (int32_t run = runs.begin; run < runs.end; ++run) {
    total += std::exp(double{highest[run]} - most) * totals_[row * runs_ + run];
  }
  const int32_t of_block = params_.block_kv / kMassKeys;
  for (int32_t run = runs.begin; run < runs.end; ++run) {
    const double weight = std::exp(double{highest[run]} - most) / total;
    const Interval own = intersect(keys, {run * kRunKeys, (run + 1) * kRunKeys});
    const Interval units = SelectParams::blocks_of(own, kMassKeys);
    int32_t block = units.begin / of_block;
    for (int32_t unit = units.begin; unit < units.end; ++block) {
      const int32_t end = imin((block + 1) * of_block, units.end);
      double mass = 0;
      for (; unit < end; ++unit) mass += masses[unit];
      share[block] += weight * mass;
    }
  }
}

}  // namespace sparse_attn::cpu
