// Block selection on the CPU: each list holds its forced blocks and the best of the rest by the
// estimate, until their share or the budget is reached. Threads share lists.
#include "cpu/select/select_blocks.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/select/select_estimate.h"
#include "cpu/torch_host.h"

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
    Interval rows = params_.rows_of_block(block.index);
    Bounds keys = no_rows(params_.seq_kv);
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
    for (int32_t head = 0; head < params_.group(); ++head, ++block.head_q) {
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
      bool told = std::isnan(rank[j]);  // by a score that is no number: keep it
      kept[j] = told || params_.sinks(block.batch).contains(j) || diagonal.contains(j);
      double own = told ? 0.0 : share[j];
      total += own;
      if (kept[j]) {
        ++count;
        reached += own;
      } else {
        candidates[waiting++] = {rank[j], own, j};
      }
    }
    const int32_t most = imax(count, params_.budget(visible.size()));
    const bool by_mass = params_.mass > 0 && params_.mass < 1;
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

}  // namespace

int64_t select_workspace_bytes(const SelectParams& params) {
  Arena arena(nullptr);
  BlockSelection(params, num_workers(), &arena);
  return arena.used();
}

Status select_blocks(const SelectParams& params) {
  int32_t workers = num_workers();
  Arena arena(params.workspace);
  BlockSelection selection(params, workers, &arena);
  const BlockEstimator& estimator = selection.estimator();
  int64_t key_blocks = int64_t{params.batch} * params.heads_kv * params.num_kv;
  int64_t heads = int64_t{params.batch} * params.heads_q;
  int64_t lists = int64_t{params.batch} * params.lists();
  bool ran = for_each_item(workers, params.batch,
                           [&](int32_t, int64_t batch) { estimator.find_keys(batch); });
  ran = ran && for_each_item(workers, key_blocks, [&](int32_t, int64_t item) {
          int64_t head = item / params.num_kv;
          estimator.pool_keys(head / params.heads_kv, head % params.heads_kv,
                              static_cast<int32_t>(item % params.num_kv));
        });
  ran = ran &&
        for_each_item(workers, int64_t{params.batch} * params.heads_kv, [&](int32_t, int64_t head) {
          estimator.make_sketch(head / params.heads_kv, head % params.heads_kv);
        });
  if (params.selector == Selector::kVerticalSlash) {
    ran = ran && for_each_item(workers, heads, [&](int32_t worker, int64_t head) {
            estimator.find_lines(worker, head / params.heads_q, head % params.heads_q);
          });
  }
  ran = ran && for_each_item(workers, lists * params.num_q, [&](int32_t worker, int64_t item) {
          selection.select(worker, item / params.num_q, static_cast<int32_t>(item % params.num_q));
        });
  if (!ran) return {1, "the thread pool failed"};
  return {};
}

}  // namespace sparse_attn::cpu
