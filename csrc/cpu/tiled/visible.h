// Which columns of a chunk a row sees, by pattern.h: one span, with -inf written over the scores
// inside it that the row does not see.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "cpu/tiled/chunks.h"
#include "cpu/vector/vector_math.h"

namespace sparse_attn::cpu {

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
    for (int32_t column = span_.end; column < begin; ++column) scores_[column] = kMinusInfinity;
    span_.end = imax(span_.end, end);
  }
  void add(Interval x, int32_t shift) { add(x.begin - shift, x.end - shift); }
  Span span() const { return span_; }

 private:
  float* scores_;
  Span span_;
};

/// The first key from `k` on whose bit is `set`, or `end` where none is before it.
inline int32_t next_key(const uint32_t* words, bool set, int32_t k, int32_t end) {
  while (k < end) {
    const uint32_t word = (set ? words[k / 32] : ~words[k / 32]) >> k % 32;
    if (word != 0) return imin(k + __builtin_ctz(word), end);
    k = (k / 32 + 1) * 32;
  }
  return end;
}

/// The row's columns of a chunk, whose scores are `scores`.
class RowView {
 public:
  RowView(const Pattern& pattern, const Tile& tile, const Chunk& chunk)
      : pattern_(pattern), tile_(tile), chunk_(chunk) {}

  /// `block_row` is the row of a listed block that the row is.
  Span columns(const Row& row, int32_t block_row, float* scores) const {
    SpanBuilder span(scores);
    Interval first = chunk_.runs[0].interval();
    if (chunk_.axis == Axis::kLead) {
      add_seen(seen_lead(pattern_, tile_.slice, row), first, first.begin, &span);
    } else if (chunk_.axis == Axis::kGlobal) {
      add_globals(row, first, &span);
    } else {
      Seen seen = seen_main(pattern_, row);
      int32_t column = 0;
      for (int32_t i = 0; i < chunk_.num_runs; ++i) {
        const ChunkRun& run = chunk_.runs[i];
        add_run(seen, run, block_row, run.begin - column, &span);
        column += run.length;
      }
    }
    return span.span();
  }

 private:
  /// What `seen` has of a run, of a partial block what its bits have too.
  void add_run(const Seen& seen, const ChunkRun& run, int32_t block_row, int32_t shift,
               SpanBuilder* span) const {
    if (!run.bits.present()) {
      add_seen(seen, run.interval(), shift, span);
      return;
    }
    const uint32_t* words = run.bits.row(block_row);
    const int32_t end = run.begin + run.length - run.block;
    for (int32_t k = run.begin - run.block; k < end;) {
      const int32_t first = next_key(words, true, k, end);
      k = next_key(words, false, first, end);
      add_seen(seen, {run.block + first, run.block + k}, shift, span);
    }
  }

  /// The global tokens outside the lead and main tiles, a column each.
  void add_globals(const Row& row, Interval tokens, SpanBuilder* span) const {
    for (int32_t g = tokens.begin; g < tokens.end; ++g) {
      int32_t key = pattern_.global_tiles[g];
      bool elsewhere = row.keys.contains(key) || row.lead.contains(key);
      if (row.limit.contains(key) && !elsewhere) {
        span->add(g - tokens.begin, g + 1 - tokens.begin);
      }
    }
  }

  /// What `seen` has of a run whose element x is column x - shift.
  void add_seen(const Seen& seen, Interval run, int32_t shift, SpanBuilder* span) const {
    Interval marked = globals_inside(pattern_, intersect(seen.marked, run));
    Interval first = intersect(seen.first, run), second = intersect(seen.second, run);
    if (second.empty() && marked.empty()) {
      add_uncounted(seen, first, shift, span);
      return;
    }
    if (second.begin < first.begin) std::swap(first, second);  // spans grow in ascending order
    for (int32_t g = marked.begin; g < marked.end; ++g) {
      int32_t key = pattern_.global_tiles[g];
      for (Interval* x : {&first, &second}) {
        if (key < x->begin) continue;
        span->add(*x, shift);
        *x = {kUnlimited, kUnlimited};
      }
      span->add(key - shift, key + 1 - shift);
    }
    span->add(first, shift);
    span->add(second, shift);
  }

  /// The interval but for what counts elsewhere, which is looked at one by one.
  void add_uncounted(const Seen& seen, Interval x, int32_t shift, SpanBuilder* span) const {
    Interval counted = intersect(x, seen.counted);
    if (counted.empty()) {
      span->add(x, shift);
      return;
    }
    span->add({x.begin, counted.begin}, shift);
    for (int32_t u = counted.begin; u < counted.end; ++u) {
      if (!in_class(pattern_, tile_.slice, u)) span->add(u - shift, u + 1 - shift);
    }
    span->add({counted.end, x.end}, shift);
  }

  const Pattern& pattern_;
  const Tile& tile_;
  const Chunk& chunk_;
};

}  // namespace sparse_attn::cpu
