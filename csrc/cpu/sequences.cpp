// One plain call after another, each with the threads of all. Pages, and keys of 8 bits, are copied
// to rows that lie together in query's dtype, which holds each number of float8 exactly.
#include "sequences.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "arena.h"
#include "call_features.h"
#include "cpu/float8_numbers.h"
#include "cpu/vector/vector_math.h"
#include "part.h"
#include "torch_host.h"

namespace sparse_attn::cpu {
namespace {

constexpr int32_t kRowsPerTurn = 256;  // that a thread copies

/// Copies rows [begin, end) of a key head's keys or values to rows of `columns` elements.
class Gatherer {
 public:
  Gatherer(const AttentionParams& params, const Sequence& sequence, int64_t b)
      : params_(params), sequence_(sequence), b_(b) {
    if (params.keys.dtype == Dtype::kFloat8) unscaled_.emplace(params.problem.dtype, 1.0f);
  }

  void copy(const TensorView& tensor, int32_t columns, int32_t head, Interval rows,
            char* target) const {
    copy(tensor, columns, head, rows, unscaled_ ? &*unscaled_ : nullptr, target);
  }
  void copy_scaled_keys(int32_t head, Interval rows, char* target) const {
    const float scale = params_.keys.key_scale.at(b_, head);
    const Float8Numbers scaled(params_.problem.dtype, scale);
    copy(params_.keys.key, params_.problem.head_dim, head, rows, &scaled, target);
  }

 private:
  void copy(const TensorView& tensor, int32_t columns, int32_t head, Interval rows,
            const Float8Numbers* numbers, char* target) const {
    const int64_t size = sparse_attn::size_of(params_.keys.dtype);
    for (int32_t j = rows.begin; j < rows.end; ++j) {
      const char* row = static_cast<const char*>(tensor.data) +
                        params_.keys.locate(tensor, sequence_, b_, head, j) * size;
      if (numbers != nullptr) {
        numbers->write(row, columns, target);
        target += columns * sizeof(uint16_t);
      } else {
        std::memcpy(target, row, columns * size);
        target += columns * size;
      }
    }
  }

  const AttentionParams& params_;
  const Sequence& sequence_;
  int64_t b_;
  std::optional<Float8Numbers> unscaled_;  // of keys of 8 bits
};

/// Rows that see no keys are zero, with lse -inf.
void write_empty(const AttentionParams& one) {
  const Problem& problem = one.problem;
  const int64_t size = sparse_attn::size_of(problem.dtype);
  const TensorView& out = one.outputs.out;
  for (int32_t head = 0; head < problem.heads_q; ++head) {
    for (int32_t i = 0; i < problem.seq_q; ++i) {
      std::memset(moved(out.data, head * out.stride_h + i * out.stride_s, size), 0,
                  problem.value_dim * size);
      if (one.outputs.lse == nullptr) continue;
      one.outputs.lse[head * one.outputs.lse_stride_h + i * one.outputs.lse_stride_s] =
          kMinusInfinity;
    }
  }
}

/// Calls visit(sequence, call, b) for every sequence that has rows.
template <class Visit>
void for_each_sequence(const AttentionParams& params, const Visit& visit) {
  for (int32_t b = 0; b < params.problem.batch; ++b) {
    const Sequence sequence = params.sequences.of(b);
    if (sequence.rows > 0) visit(sequence, alone(params, sequence, b), b);
  }
}

}  // namespace

bool is_plain(const AttentionParams& params) {
  return params.sequences.same_lengths() && !params.keys.paged() &&
         params.keys.dtype == params.problem.dtype;
}

bool is_gathered(const AttentionParams& params) {
  return params.keys.paged() || params.keys.dtype != params.problem.dtype;
}

int64_t place_keys(void* workspace, AttentionParams* one) {
  const Problem& problem = one->problem;
  const int64_t size = sparse_attn::size_of(problem.dtype), keys = problem.seq_kv;
  Arena arena(workspace);
  for (auto [view, columns] : {std::pair(&one->keys.key, problem.head_dim),
                               std::pair(&one->keys.value, problem.value_dim)}) {
    *view = {arena.take<char>(problem.heads_kv * keys * columns * size), 0, keys * columns,
             columns};
  }
  one->keys.dtype = problem.dtype;
  one->keys.table = nullptr;
  return arena.used();
}

AttentionParams alone(const AttentionParams& params, const Sequence& sequence, int64_t b) {
  const auto entry = static_cast<int32_t>(b);
  AttentionParams one = part_of(params, {entry, entry + 1}, {0, params.problem.heads_kv});
  one.problem.seq_q = sequence.rows;
  one.problem.seq_kv = sequence.keys;
  const int32_t* origins = one.sequences.key_origins;
  one.sequences = {};
  one.sequences.rows = sequence.rows;
  one.sequences.keys = sequence.keys;
  one.sequences.query_offset = sequence.offset;
  one.sequences.key_origins = origins;
  const int64_t size = sparse_attn::size_of(params.problem.dtype);
  auto skip = [&](TensorView* view, int32_t rows) {
    view->data = moved(view->data, rows * view->stride_s, size);
  };
  skip(&one.query, sequence.first_row);
  skip(&one.outputs.out, sequence.first_row);
  if (one.outputs.lse != nullptr) {
    one.outputs.lse += sequence.first_row * one.outputs.lse_stride_s;
  }
  if (!is_gathered(params)) {
    skip(&one.keys.key, sequence.first_key);
    skip(&one.keys.value, sequence.first_key);
  }
  return one;
}

Status gather(const AttentionParams& params, const Sequence& sequence, int64_t b,
              const AttentionParams& one, bool scaled) {
  const Problem& problem = one.problem;
  const int64_t size = sparse_attn::size_of(problem.dtype);
  const Gatherer gatherer(params, sequence, b);
  const int32_t turns = ceil_div(problem.seq_kv, kRowsPerTurn);
  const bool ran =
      for_each_item(num_workers(), int64_t{problem.heads_kv} * turns, [&](int32_t, int64_t item) {
        int32_t head = static_cast<int32_t>(item / turns);
        int32_t first = static_cast<int32_t>(item % turns) * kRowsPerTurn;
        Interval rows = {first, imin(first + kRowsPerTurn, problem.seq_kv)};
        auto target = [&](const TensorView& view) {
          int64_t place = head * view.stride_h + first * view.stride_s;
          return static_cast<char*>(moved(view.data, place, size));
        };
        if (scaled) return gatherer.copy_scaled_keys(head, rows, target(one.keys.key));
        gatherer.copy(params.keys.key, problem.head_dim, head, rows, target(one.keys.key));
        if (problem.value_dim == 0) return;
        gatherer.copy(params.keys.value, problem.value_dim, head, rows, target(one.keys.value));
      });
  return ran ? Status{} : Status{1, "the thread pool failed"};
}

int64_t sequences_workspace_bytes(const PlainEngine& engine, const AttentionParams& params) {
  if (is_plain(params)) return engine.workspace_bytes(params);
  int64_t most = 0;
  for_each_sequence(params, [&](const Sequence&, AttentionParams one, int64_t) {
    if (one.problem.seq_kv == 0) return;
    const int64_t bytes = is_gathered(params) ? place_keys(nullptr, &one) : 0;
    most = std::max(most, bytes + engine.workspace_bytes(one));
  });
  return most;
}

Status run_sequences(const PlainEngine& engine, const AttentionParams& params) {
  if (is_plain(params)) return engine.run(params);
  Status status;
  for_each_sequence(params, [&](const Sequence& sequence, AttentionParams one, int64_t b) {
    if (!status.ok()) return;
    if (one.problem.seq_kv == 0) return write_empty(one);
    if (is_gathered(params)) {
      one.workspace = moved(params.workspace, place_keys(params.workspace, &one), 1);
      status = gather(params, sequence, b, one);
    }
    one.features = features_of(one);
    if (status.ok()) status = engine.run(one);
  });
  return status;
}

}  // namespace sparse_attn::cpu
