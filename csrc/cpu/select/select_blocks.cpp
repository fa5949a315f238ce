// Block selection on the CPU: each list holds its forced blocks and the best of the rest by the
// estimate, until their share or the budget is reached. Threads share lists.
#include "cpu/select/select_blocks.h"

#include <algorithm>
#include <cmath>

#include "cpu/select/select_estimate.h"
#include "cpu/sequences.h"
#include "cpu/torch_host.h"
#include "visited_tiles.h"

namespace sparse_attn::cpu {
namespace {

struct Candidate {
  double rank, share;
  int32_t block;
  /// Whether the other one is taken first: ties go to the lower block.
  bool operator<(const Candidate& other) const {
    return rank != other.rank ? rank < other.rank : block > other.block;
  }
};

class BlockSelection {
 public:
  BlockSelection(const SelectParams& params, int64_t workers, Arena* arena)
      : params_(params), estimator_(params, workers, arena) {
    int64_t entries = workers * params.num_kv;
    share_ = arena->take<double>(entries);
    rank_ = arena->take<double>(entries);
    best_ = arena->take<double>(entries);
    candidates_ = arena->take<Candidate>(entries);
    kept_ = arena->take<uint8_t>(entries);
  }
  const BlockEstimator& estimator() const { return estimator_; }

  /// Writes the list of one query block; `list` counts batch entries and their lists.
  void select(int32_t worker, int64_t list, int32_t query_block) const {
    QueryBlock block = {worker, list / params_.lists(),
                        list % params_.lists() * params_.heads_per_list(), query_block};
    int64_t scratch = int64_t{worker} * params_.num_kv;
    double* share = share_ + scratch;
    double* rank = rank_ + scratch;
    uint8_t* kept = kept_ + scratch;
    Interval visible = visible_to(block);
    if (params_.by_group) {
      estimate_group(block, visible, share, rank);
    } else {
      estimator_.estimate(block, visible, share, rank);
    }
    choose(block, visible, share, rank, kept);

    int64_t row = list * params_.num_q + query_block;
    int32_t* indices = params_.indices + row * params_.num_kv;
    int32_t count = 0;
    for (int32_t j = visible.begin; j < visible.end; ++j) {
      if (kept[j]) indices[count++] = j;
    }
    params_.counts[row] = count;
    std::fill(indices + count, indices + params_.num_kv, 0);
  }

 private:
  Interval visible_to(const QueryBlock& block, int32_t heads) const {
    Interval rows = params_.rows_of_block(block.batch, block.index);
    Bounds keys = no_rows(params_.problem.seq_kv);
    for (int32_t head = 0; head < heads; ++head) {
      keys.add(params_.keys_of_rows(block.batch, block.head_q + head, rows));
    }
    return SelectParams::blocks_of(keys.any, params_.block_kv);
  }
  Interval visible_to(const QueryBlock& block) const {
    return visible_to(block, params_.heads_per_list());
  }

  /// The maximum of the heads' shares, each divided by its sum.
  void estimate_group(QueryBlock block, Interval visible, double* share, double* rank) const {
    double* best = best_ + int64_t{block.worker} * params_.num_kv;
    std::fill(best + visible.begin, best + visible.end, 0.0);
    for (int32_t head = 0; head < params_.problem.group(); ++head, ++block.head_q) {
      Interval own = visible_to(block, 1);
      estimator_.estimate(block, own, share, rank);
      double total = 0;
      for (int32_t j = own.begin; j < own.end; ++j) total += std::isnan(share[j]) ? 0 : share[j];
      for (int32_t j = own.begin; j < own.end; ++j) {
        double x = total > 0 ? share[j] / total : share[j];
        if (!(x <= best[j]) && !std::isnan(best[j])) best[j] = x;
      }
    }
    std::copy(best + visible.begin, best + visible.end, share + visible.begin);
    std::copy(best + visible.begin, best + visible.end, rank + visible.begin);
  }

  void choose(const QueryBlock& block, Interval visible, const double* share, const double* rank,
              uint8_t* kept) const {
    Interval diagonal = params_.diagonal(block.batch, block.index);
    Candidate* candidates = candidates_ + int64_t{block.worker} * params_.num_kv;
    int32_t count = 0, waiting = 0;
    double reached = 0, total = 0;
    for (int32_t j = visible.begin; j < visible.end; ++j) {
      const bool is_nan = std::isnan(rank[j]);  // a score is no number: keep the block
      kept[j] = is_nan || params_.sinks(block.batch).contains(j) || diagonal.contains(j);
      const double own = is_nan ? 0.0 : share[j];
      total += own;
      if (kept[j]) {
        ++count;
        reached += own;
      } else {
        candidates[waiting++] = {rank[j], own, j};
      }
    }
    const int32_t most = imax(count, params_.budget(visible.size()));
    // Estimates of 0 alone say nothing, but those that the caller gives do.
    const bool known = total > 0 || params_.selector == Selector::kScores;
    const bool by_mass = params_.mass > 0 && params_.mass < 1 && known;
    std::make_heap(candidates, candidates + waiting);
    while (count < most && waiting > 0 && !(by_mass && reached >= params_.mass * total)) {
      std::pop_heap(candidates, candidates + waiting);
      const Candidate& next = candidates[--waiting];
      kept[next.block] = 1;
      reached += next.share;
      ++count;
    }
  }

  const SelectParams& params_;
  BlockEstimator estimator_;
  double* share_;  // [workers, num_kv], like the rest
  double* rank_;
  double* best_;
  Candidate* candidates_;
  uint8_t* kept_;
};

int64_t plain_workspace_bytes(const SelectParams& params) {
  Arena arena(nullptr);
  BlockSelection(params, num_workers(), &arena);
  return arena.used();
}

Status select_plain(const SelectParams& params) {
  int32_t workers = num_workers();
  Arena arena(params.workspace);
  BlockSelection selection(params, workers, &arena);
  const BlockEstimator& estimator = selection.estimator();
  int64_t key_blocks = int64_t{params.problem.batch} * params.problem.heads_kv * params.num_kv;
  int64_t heads = int64_t{params.problem.batch} * params.problem.heads_q;
  int64_t lists = int64_t{params.problem.batch} * params.lists();
  bool ran = true;
  if (params.selector == Selector::kSketch) {
    const SketchMasses& masses = estimator.sketch_masses();
    ran = params.sketch.present() ||
          for_each_item(workers, masses.num_runs(),
                        [&](int32_t, int64_t run) { masses.make_sketch(run); });
    ran = ran && for_each_item(workers, masses.num_runs(),
                               [&](int32_t worker, int64_t run) { masses.score(worker, run); });
  } else {
    ran = for_each_item(workers, params.problem.batch,
                        [&](int32_t, int64_t batch) { estimator.find_keys(batch); });
    ran = ran && for_each_item(workers, key_blocks, [&](int32_t, int64_t item) {
            int64_t head = item / params.num_kv;
            estimator.pool_keys(head / params.problem.heads_kv, head % params.problem.heads_kv,
                                static_cast<int32_t>(item % params.num_kv));
          });
  }
  if (params.selector == Selector::kVerticalSlash) {
    ran = ran && for_each_item(workers, heads, [&](int32_t worker, int64_t head) {
            estimator.find_lines(worker, head / params.problem.heads_q,
                                 head % params.problem.heads_q);
          });
  }
  ran = ran && for_each_item(workers, lists * params.num_q, [&](int32_t worker, int64_t item) {
          selection.select(worker, item / params.num_q, static_cast<int32_t>(item % params.num_q));
        });
  if (!ran) return {1, "the thread pool failed"};
  return {};
}

/// Queries and keys as a call of attention has them, for the functions that read its sequences.
AttentionParams as_call(const SelectParams& params) {
  AttentionParams call;
  call.problem = params.problem;
  call.sequences = params.sequences;
  call.query = params.query;
  call.keys = params.keys;
  call.scores.bounds = params.scores.bounds;
  return call;
}

/// Selector sketch has lengths of its own, and reads keys where they lie if at all.
bool is_plain_selection(const SelectParams& params) {
  if (params.selector == Selector::kSketch) {
    return params.sequences.first_rows == nullptr && !params.reads_codes();
  }
  return params.reads_keys() ? is_plain(as_call(params)) : params.sequences.same_lengths();
}

/// Whether keys are copied for the selection of a sequence.
bool gathers_keys(const SelectParams& params) {
  return params.reads_keys() && is_gathered(as_call(params));
}

/// The selection of sequence b, a call of its own; takes room for its lists, its scratch and, where
/// they are gathered, its keys, for which `one` gets their place.
SelectParams own_selection(const SelectParams& params, bool gathered, int64_t b, Arena* arena,
                           AttentionParams* one) {
  SelectParams own = params;
  if (gathered) place_keys(arena->take<char>(place_keys(nullptr, one)), one);
  own.problem = one->problem;
  own.sequences = one->sequences;
  own.query = one->query;
  own.keys = one->keys;
  own.scores.bounds = one->scores.bounds;
  if (own.given.data != nullptr) own.given.data += b * own.given.stride_b;
  own.num_q = ceil_div(own.problem.seq_q, own.block_q);
  own.num_kv = ceil_div(own.problem.seq_kv, own.block_kv);
  const int64_t rows = int64_t{own.lists()} * own.num_q;
  own.counts = arena->take<int32_t>(rows);
  own.indices = arena->take<int32_t>(rows * own.num_kv);
  own.workspace = arena->take<char>(plain_workspace_bytes(own));
  return own;
}

/// Calls visit(sequence, call, b) for every sequence that has a pair of blocks.
template <class Visit>
void for_each_sequence(const SelectParams& params, const Visit& visit) {
  const AttentionParams call = as_call(params);
  for (int32_t b = 0; b < params.problem.batch; ++b) {
    const Sequence sequence = params.sequences.of(b);
    if (sequence.rows > 0 && sequence.keys > 0) visit(sequence, alone(call, sequence, b), b);
  }
}

/// Copies the lists of sequence b, which count its own blocks, to those of the call.
void copy_lists(const SelectParams& own, int64_t b, const SelectParams& all) {
  for (int64_t row = 0; row < int64_t{own.lists()} * own.num_q; ++row) {
    const int64_t list = b * own.lists() + row / own.num_q;
    const int64_t place = list * all.num_q + row % own.num_q;
    all.counts[place] = own.counts[row];
    const int32_t* indices = own.indices + row * own.num_kv;
    std::copy(indices, indices + own.num_kv, all.indices + place * all.num_kv);
  }
}

}  // namespace

int64_t select_workspace_bytes(const SelectParams& params) {
  if (is_plain_selection(params)) return plain_workspace_bytes(params);
  const bool gathered = gathers_keys(params);
  int64_t most = 0;
  for_each_sequence(params, [&](const Sequence&, AttentionParams one, int64_t b) {
    Arena arena(nullptr);
    own_selection(params, gathered, b, &arena, &one);
    most = std::max(most, arena.used());
  });
  return most;
}

Status select_blocks(const SelectParams& params) {
  if (is_plain_selection(params)) return select_plain(params);
  const AttentionParams call = as_call(params);
  const bool gathered = gathers_keys(params);
  const int64_t rows = int64_t{params.problem.batch} * params.lists() * params.num_q;
  std::fill(params.counts, params.counts + rows, 0);
  std::fill(params.indices, params.indices + rows * params.num_kv, 0);
  Status status;
  for_each_sequence(params, [&](const Sequence& sequence, AttentionParams one, int64_t b) {
    if (!status.ok()) return;
    Arena arena(params.workspace);
    const SelectParams own = own_selection(params, gathered, b, &arena, &one);
    if (gathered) status = gather(call, sequence, b, one, params.reads_codes());
    if (status.ok()) status = select_plain(own);
    if (status.ok()) copy_lists(own, b, params);
  });
  return status;
}

}  // namespace sparse_attn::cpu
