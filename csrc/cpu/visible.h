// Which columns of a chunk a row sees, by pattern.h: one span, with -inf written over the scores
// inside it that the row does not see.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "chunks.h"
#include "vector_math.h"

namespace sparse_attn::cpu {

constexpr float kHidden = -std::numeric_limits<float>::infinity();

/// Grows a span by intervals in ascending order and hides the gaps.
class SpanBuilder {
 public:
  explicit SpanBuilder(float* scores) : scores_(scores) {}
  void add(int32_t begin, int32_t end) {
    if (begin >= end) return;
    if (span_.begin == span_.end) {
      span_ = {begin, end};
      return;
    }
    for (int32_t column = span_.end; column < begin; ++column) scores_[column] = kHidden;
    span_.end = imax(span_.end, end);
  }
  void add(Interval x, int32_t shift) { add(x.begin - shift, x.end - shift); }
  Span span() const { return span_; }

 private:
  float* scores_;
  Span span_;
};

/// The row's columns of a chunk, whose scores are `scores`.
class RowView {
 public:
  RowView(const Pattern& pattern, const Tile& tile, const Chunk& chunk)
      : pattern_(pattern), tile_(tile), chunk_(chunk) {}

  Span columns(const Row& row, float* scores) const {
    SpanBuilder span(scores);
    Interval first = chunk_.runs[0].interval();
    if (chunk_.axis == Axis::kLead) {
      add_lead(row, first, &span);
    } else if (chunk_.axis == Axis::kGlobal) {
      for (int32_t g = first.begin; g < first.end; ++g) {
        if (sees_global(row, pattern_.global_tiles[g]))
          span.add(g - first.begin, g + 1 - first.begin);
      }
    } else if (pattern_.shared_axis() && chunk_.num_runs == 1) {
      add_main(row, first, &span);
    } else {
      int32_t column = 0;
      for (int32_t i = 0; i < chunk_.num_runs; ++i) {
        Interval run = chunk_.runs[i].interval();
        span.add(intersect(row.keys, run), run.begin - column);
        column += run.size();
      }
    }
    return span.span();
  }

 private:
  /// A global token outside the lead and main tiles.
  bool sees_global(const Row& row, int32_t key) const {
    return row.limit.contains(key) && !row.keys.contains(key) && !row.lead.contains(key);
  }

  /// What allows_main says, interval by interval: leading keys, the window, global tokens.
  void add_main(const Row& row, Interval run, SpanBuilder* span) const {
    Interval keys = intersect(row.keys, run);
    Interval globals = {0, 0};
    if (pattern_.num_global_tiles != nullptr) {
      globals = globals_inside(pattern_, intersect(row.limit, run));
    }
    int32_t g = globals.begin;
    span->add(intersect(row.lead, run), run.begin);
    for (; g < globals.end && pattern_.global_tiles[g] < keys.begin; ++g) {
      span->add(pattern_.global_tiles[g] - run.begin, pattern_.global_tiles[g] + 1 - run.begin);
    }
    span->add(keys, run.begin);
    for (; g < globals.end; ++g) {
      span->add(pattern_.global_tiles[g] - run.begin, pattern_.global_tiles[g] + 1 - run.begin);
    }
  }

  /// Leading keys that the row's window does not have; one by one only where the window lies.
  void add_lead(const Row& row, Interval run, SpanBuilder* span) const {
    Interval seen = intersect(row.lead, run);
    if (seen.empty()) return;
    Interval window = {seen.end, seen.end};
    if (!row.keys.empty()) {
      const View& keys = tile_.slice.keys;
      window = pattern_.lead.inside({keys.at(row.keys.begin), keys.at(row.keys.end - 1) + 1});
      window = {imax(seen.begin, imin(window.begin, seen.end)), imin(window.end, seen.end)};
      window.end = imax(window.begin, window.end);
    }
    span->add({seen.begin, window.begin}, run.begin);
    for (int32_t u = window.begin; u < window.end; ++u) {
      if (allows_lead(pattern_, tile_.slice, row, u)) span->add(u - run.begin, u + 1 - run.begin);
    }
    span->add({window.end, seen.end}, run.begin);
  }

  const Pattern& pattern_;
  const Tile& tile_;
  const Chunk& chunk_;
};

}  // namespace sparse_attn::cpu
