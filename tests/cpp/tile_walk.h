// The walk of an engine over a case, without any arithmetic: every class, every query tile, every
// visited tile of keys. It records how often each (query, key) pair is counted, and checks on the
// way that unmasked tiles are whole, that nothing outside the views is allowed, and that no visited
// tile is idle. Called by pattern_test.cpp with cases that fit a dense matrix.
#pragma once

#include <climits>
#include <string>
#include <vector>

#include "check.h"
#include "dense_case.h"
#include "visited_tiles.h"

class TileWalk {
 public:
  explicit TileWalk(const Case& problem)
      : case_(problem),
        pattern_(problem.pattern()),
        seen_(problem.seq_q * problem.seq_kv, 0),
        strays_(0) {}

  /// Walks everything, then compares with the dense truth.
  void run() {
    int classes = pattern_.classes(case_.seq_q);
    for (int c = 0; c < classes; ++c) {
      slice_ = sparse_attn::make_slice(pattern_, c, case_.sequence());
      for (int r = 0; r < slice_.rows.length; r += case_.tile_q) {
        walk_query_tile({r, sparse_attn::imin(r + case_.tile_q, slice_.rows.length)});
      }
    }
    if (!pattern_.list.present()) ask_key_by_key();
    CHECK(strays_ == 0, case_.text());
    CHECK(wrong_pairs() == 0, case_.text() + ", first at " + first_wrong_);
  }

 private:
  using Interval = sparse_attn::Interval;

  Interval row_bounds(int i) const {
    sparse_attn::BoundsView view;
    view.data = case_.bounds.empty() ? nullptr : case_.bounds.data();
    view.stride_q = 2;
    return view.row(0, 0, i, case_.seq_kv);
  }

  /// The question of engines that look at one key after another.
  void ask_key_by_key() const {
    for (int i = 0; i < case_.seq_q; ++i) {
      sparse_attn::Query query =
          sparse_attn::make_query(pattern_, i, case_.sequence(), row_bounds(i));
      for (int j = 0; j < case_.seq_kv; ++j) {
        CHECK(sparse_attn::sees_key(pattern_, query, j) == case_.allowed(i, j),
              case_.text() + ", query " + std::to_string(i) + ", key " + std::to_string(j));
      }
    }
  }

  void walk_query_tile(Interval rows) {
    rows_.clear();
    query_.clear();
    sparse_attn::Bounds bounds = sparse_attn::no_rows(case_.seq_kv);
    for (int r = rows.begin; r < rows.end; ++r) {
      int i = slice_.rows.at(r);
      Interval keys = row_bounds(i);
      bounds.add(keys);
      query_.push_back(i);
      rows_.push_back(sparse_attn::make_row(pattern_, slice_, r, keys));
    }
    tiles_ = sparse_attn::visited_tiles(pattern_, slice_, rows, bounds, case_.tile_kv);
    globals_ = sparse_attn::global_rows(pattern_, slice_, rows);
    CHECK(tiles_.main.begin <= tiles_.full.begin && tiles_.full.begin <= tiles_.full.end &&
              tiles_.full.end <= tiles_.main.end,
          case_.text() + ", unmasked tiles within the visited ones");
    if (pattern_.list.present()) {
      walk_listed();
      return;
    }
    for (int t = tiles_.main.begin; t < tiles_.main.end; ++t) visit_main(t);
    for (int t = tiles_.lead_left.begin; t < tiles_.lead_left.end; ++t) visit_lead(t);
    for (int t = tiles_.lead_right.begin; t < tiles_.lead_right.end; ++t) visit_lead(t);
    if (pattern_.global_tiles == nullptr) return;
    for (int32_t t : case_.global_tiles) {
      bool visited =
          tiles_.main.contains(t) || tiles_.lead_left.contains(t) || tiles_.lead_right.contains(t);
      if (!visited) visit_lead(t);
    }
  }

  bool sees_main(size_t x, int v) const {
    return sparse_attn::sees(pattern_, slice_, sparse_attn::seen_main(pattern_, rows_[x]), v);
  }
  bool sees_lead(size_t x, int u) const {
    sparse_attn::Seen seen = sparse_attn::seen_lead(pattern_, slice_, rows_[x]);
    return sparse_attn::sees(pattern_, slice_, seen, u);
  }

  void visit_main(int tile) {
    bool unmasked = tiles_.full.contains(tile);
    bool whole = true;  // every row's window holds the whole tile
    bool useful = false;
    for (int v = tile * case_.tile_kv; v < (tile + 1) * case_.tile_kv; ++v) {
      for (size_t x = 0; x < rows_.size(); ++x) {
        bool allowed = sees_main(x, v);
        CHECK(allowed || !unmasked, case_.text() + ", unmasked tile " + std::to_string(tile));
        if (allowed) count(query_[x], v < slice_.keys.length ? slice_.keys.at(v) : INT_MAX);
        useful |= allowed;
        whole &= rows_[x].keys.contains(v);
      }
    }
    if (case_.bounds.empty()) {
      CHECK(useful, case_.text() + ", idle tile " + std::to_string(tile));
    }
    check_sliding({tile * case_.tile_kv, (tile + 1) * case_.tile_kv});
    if (globals_ != sparse_attn::GlobalRows::kSome) {
      CHECK(unmasked == whole, case_.text() + ", needless mask on tile " + std::to_string(tile));
    }
  }

  /// Where rows' windows slide, each row sees of the elements what its place in the tile says.
  void check_sliding(Interval run) const {
    bool scattered = pattern_.global_bits != nullptr;
    bool uneven = !case_.bounds.empty() || scattered || globals_ == sparse_attn::GlobalRows::kSome;
    int first = pattern_.shared_axis() ? slice_.lead.view.length : 0;
    CHECK(uneven || run.begin < first || tiles_.slides(run), case_.text() + ", no sliding");
    if (!tiles_.slides(run)) return;
    for (size_t x = 0; x < rows_.size(); ++x) {
      Interval slid = tiles_.sliding.row(static_cast<int32_t>(x));
      for (int v = run.begin; v < run.end; ++v) {
        CHECK(slid.contains(v) == sees_main(x, v),
              case_.text() + ", row " + std::to_string(x) + " slid to " + std::to_string(v));
      }
    }
  }

  void visit_lead(int tile) {
    Interval run = {tile * case_.tile_kv, (tile + 1) * case_.tile_kv};
    bool unmasked = !tiles_.lead_needs_mask(run);
    bool shared = tiles_.lead_is_shared(run);
    bool whole = true;
    bool useful = false;
    for (int u = run.begin; u < run.end; ++u) {
      for (size_t x = 0; x < rows_.size(); ++x) {
        bool allowed = sees_lead(x, u);
        CHECK(allowed || !unmasked, case_.text() + ", unmasked leading tile");
        CHECK(!shared || allowed == tiles_.full_lead.contains(u),
              case_.text() + ", rows differ on leading key " + std::to_string(u));
        whole &= allowed;
        if (!allowed) continue;
        useful = true;
        count(query_[x], slice_.lead.at(pattern_, u));
      }
    }
    bool exact = pattern_.shared_axis() || (pattern_.dilation == 1 && case_.bounds.empty());
    if (exact && case_.global_token.empty()) {
      CHECK(unmasked == whole, case_.text() + ", needless mask on leading tile");
    }
    // These may idle: a class whose window holds all sinks of a tile, a tile of scattered global
    // tokens beyond the causal end, and one of listed keys that all lie in windows.
    bool may_idle = pattern_.dilation > 1 || !case_.global_token.empty();
    if (case_.bounds.empty() && !may_idle) {
      CHECK(useful, case_.text() + ", idle leading tile " + std::to_string(tile));
    }
  }

  /// The union of the lists of the layout rows that the tile touches, with the layout as mask.
  void walk_listed() {
    const sparse_attn::BlockList& list = pattern_.list;
    int first = query_.front() / list.block_q;
    int last = query_.back() / list.block_q;
    for (int row = first; row <= last; ++row) {
      int length = list.block_kv % case_.tile_kv == 0 ? case_.tile_kv : list.block_kv;
      sparse_attn::ListedRuns runs = list.runs(0, 0, row, length);
      for (int r = 0; r < runs.count; ++r) {
        visit_run(row, sparse_attn::intersect(runs.keys(r), {0, case_.seq_kv}));
      }
    }
  }

  void visit_run(int list_row, Interval run) {
    bool visited = tiles_.visits(run);
    bool masked = tiles_.needs_mask(run);
    bool whole = true;
    bool useful = run.empty();
    for (int v = run.begin; v < run.end; ++v) {
      for (size_t x = 0; x < rows_.size(); ++x) {
        bool allowed = sees_main(x, v);
        whole &= allowed;
        useful |= allowed;
        CHECK(visited || !allowed, case_.text() + ", run outside of the visited keys");
        if (query_[x] / pattern_.list.block_q == list_row && allowed) count(query_[x], v);
      }
    }
    if (run.empty()) return;
    CHECK(masked == !whole, case_.text() + ", mask of the run at " + std::to_string(run.begin));
    check_sliding(run);
    if (case_.bounds.empty()) CHECK(visited == useful, case_.text() + ", idle run");
  }

  void count(int i, int64_t j) {
    if (j < 0 || j >= case_.seq_kv) {
      ++strays_;
    } else {
      ++seen_[i * case_.seq_kv + j];
    }
  }

  int wrong_pairs() {
    int wrong = 0;
    for (int i = 0; i < case_.seq_q; ++i) {
      for (int j = 0; j < case_.seq_kv; ++j) {
        int counted = seen_[i * case_.seq_kv + j];
        if (counted == (case_.allowed(i, j) ? 1 : 0)) continue;
        if (wrong++ == 0) {
          first_wrong_ = "query " + std::to_string(i) + ", key " + std::to_string(j) +
                         ", counted " + std::to_string(counted) + " times";
        }
      }
    }
    return wrong;
  }

  const Case& case_;
  sparse_attn::Pattern pattern_;
  sparse_attn::Slice slice_;
  sparse_attn::Tiles tiles_;
  sparse_attn::GlobalRows globals_;     // of the query tile
  std::vector<sparse_attn::Row> rows_;  // of the query tile
  std::vector<int> query_;              // their query indices
  std::vector<int> seen_;               // [seq_q, seq_kv]
  int strays_;                          // allowed elements outside of the keys
  std::string first_wrong_;
};
