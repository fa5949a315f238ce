// The naive engine: the whole score matrix of a head in memory, a softmax over it, a second
// product; out = softmax(mask(scale q k^T)) v in three passes. The baseline of the benchmarks and
// the oracle of the other CPU engine; every pattern, nothing skipped.
#include <atomic>
#include <cstring>

#include "cpu/engines.h"
#include "cpu/global_tokens.h"
#include "cpu/naive/naive_row.h"
#include "cpu/sequences.h"
#include "cpu/tensor_rows.h"
#include "cpu/torch_host.h"
#include "visited_tiles.h"

namespace sparse_attn::cpu {
namespace {

constexpr int32_t kRowBlock = 64;  // rows of a product, and of a thread's turn, at most

struct Workspace {
  GlobalTokens globals;
  float* query = nullptr;    // [Sq, D] of one head
  float* key = nullptr;      // [Skv, D]
  float* value = nullptr;    // [Skv, value_dim]
  float* scores = nullptr;   // [Sq, Skv]
  float* out = nullptr;      // [Sq, value_dim]
  NaiveRow* rows = nullptr;  // [num_workers]

  Workspace(const AttentionParams& params, int32_t num_workers, Arena* arena) {
    int64_t seq_q = params.problem.seq_q, seq_kv = params.problem.seq_kv,
            head_dim = params.problem.head_dim, value_dim = params.problem.value_dim;
    globals.take(params, arena);
    query = arena->take<float>(seq_q * head_dim);
    key = arena->take<float>(seq_kv * head_dim);
    value = arena->take<float>(seq_kv * value_dim);
    scores = arena->take<float>(seq_q * seq_kv);
    out = arena->take<float>(seq_q * value_dim);
    rows = arena->take<NaiveRow>(num_workers);
    for (int32_t worker = 0; worker < num_workers; ++worker) {
      NaiveRow row(params, arena);
      if (rows != nullptr) rows[worker] = row;
    }
  }
};

int64_t plain_workspace_bytes(const AttentionParams& params) {
  Arena arena(nullptr);
  Workspace(params, num_workers(), &arena);
  return arena.used();
}

/// One head after another; threads share the rows of each pass.
class NaiveHead {
 public:
  NaiveHead(const AttentionParams& params, const Pattern& pattern, const Workspace& workspace,
            int32_t workers, int32_t batch, int32_t head)
      : params_(params),
        pattern_(pattern),
        workspace_(workspace),
        workers_(workers),
        batch_(batch),
        head_(head) {}

  bool run() const {
    const VectorMath& math = vector_math();
    int32_t head_kv = head_ / params_.problem.group(), head_dim = params_.problem.head_dim;
    copy_rows(math, rows_of(params_.query, params_.problem.dtype, batch_, head_),
              params_.problem.seq_q, head_dim, workspace_.query);
    copy_keys(rows_of(params_.keys.key, params_.problem.dtype, batch_, head_kv), head_dim,
              workspace_.key);
    copy_keys(rows_of(params_.keys.value, params_.problem.dtype, batch_, head_kv),
              params_.problem.value_dim, workspace_.value);
    return score() && normalise() && weigh();
  }

 private:
  /// Keys outside every row's bounds, or past every row under causal, may hold anything, so they
  /// are read as zeros.
  void copy_keys(const Rows& source, int32_t columns, float* target) const {
    Bounds bounds = no_rows(params_.problem.seq_kv);
    for (int32_t i = 0; i < params_.problem.seq_q; ++i) {
      bounds.add(params_.scores.bounds.row(batch_, head_, i, params_.problem.seq_kv));
    }
    bounds.cut(params_.num_keys(params_.sequences.of(batch_)));
    Interval keys = bounds.any;
    std::memset(target, 0, sizeof(float) * params_.problem.seq_kv * columns);
    if (keys.empty()) return;
    copy_rows(vector_math(), strided(source, keys.begin, 1), keys.size(), columns,
              target + int64_t{keys.begin} * columns);
  }

  float* scores_of(int64_t row) const { return workspace_.scores + row * params_.problem.seq_kv; }

  template <class Work>
  bool for_each_block(const Work& work) const {
    int32_t blocks = ceil_div(params_.problem.seq_q, kRowBlock);
    int32_t rows =
        ceil_div(params_.problem.seq_q, blocks);  // even blocks: none of one row, which is a gemv
    return for_each_item(workers_, blocks, [&](int32_t worker, int64_t block) {
      int32_t begin = static_cast<int32_t>(block) * rows;
      int32_t end = imin(begin + rows, params_.problem.seq_q);
      if (begin < end) work(worker, begin, end);
    });
  }

  /// scores = q k^T
  bool score() const {
    int64_t head_dim = params_.problem.head_dim;
    std::atomic<bool> ok{true};
    bool ran = for_each_block([&](int32_t, int32_t begin, int32_t end) {
      Matrix query(workspace_.query + begin * head_dim, end - begin, head_dim, head_dim);
      Matrix scores(scores_of(begin), end - begin, params_.problem.seq_kv, params_.problem.seq_kv);
      if (!multiply(query,
                    Matrix::transposed(workspace_.key, params_.problem.seq_kv, head_dim, head_dim),
                    scores, false)) {
        ok.store(false);
      }
    });
    return ran && ok.load();
  }

  /// scores = softmax of what each row sees; lse
  bool normalise() const {
    return for_each_block([&](int32_t worker, int32_t begin, int32_t end) {
      for (int32_t i = begin; i < end; ++i) {
        float lse =
            workspace_.rows[worker].softmax(params_, pattern_, batch_, head_, i, scores_of(i));
        if (params_.outputs.lse == nullptr) continue;
        params_.outputs
            .lse[batch_ * params_.outputs.lse_stride_b + head_ * params_.outputs.lse_stride_h +
                 i * params_.outputs.lse_stride_s] = lse;
      }
    });
  }

  /// out = scores v
  bool weigh() const {
    int64_t value_dim = params_.problem.value_dim;
    const VectorMath& math = vector_math();
    Rows target = rows_of(params_.outputs.out, params_.problem.dtype, batch_, head_);
    const float value_scale = params_.value_scale(batch_, head_);
    std::atomic<bool> ok{true};
    bool ran = for_each_block([&](int32_t, int32_t begin, int32_t end) {
      float* out = workspace_.out + begin * value_dim;
      Matrix weights(scores_of(begin), end - begin, params_.problem.seq_kv, params_.problem.seq_kv);
      Matrix value(workspace_.value, params_.problem.seq_kv, value_dim, value_dim);
      if (!multiply(weights, value, Matrix(out, end - begin, value_dim, value_dim), false)) {
        ok.store(false);
      }
      for (int32_t i = begin; i < end; ++i) {
        math.from_float(target.element, out + (i - begin) * value_dim, value_scale,
                        const_cast<void*>(strided(target, i, 1).data), value_dim);
      }
    });
    return ran && ok.load();
  }

  const AttentionParams& params_;
  const Pattern& pattern_;
  const Workspace& workspace_;
  int32_t workers_, batch_, head_;
};

Status run_plain(const AttentionParams& params) {
  int32_t workers = num_workers();
  Arena arena(params.workspace);
  Workspace workspace(params, workers, &arena);
  const Pattern pattern = workspace.globals.marked_pattern(params);
  for (int32_t batch = 0; batch < params.problem.batch; ++batch) {
    for (int32_t head = 0; head < params.problem.heads_q; ++head) {
      if (!NaiveHead(params, pattern, workspace, workers, batch, head).run()) {
        return {1, "a matrix product or the thread pool failed"};
      }
    }
  }
  return {};
}

constexpr PlainEngine kPlain = {plain_workspace_bytes, run_plain};

}  // namespace

const Engine kNaive = engine_of_sequences<kPlain>("naive");

}  // namespace sparse_attn::cpu
