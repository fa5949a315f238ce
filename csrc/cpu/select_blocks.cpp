// Pools queries and keys to block means, scores every visible pair of blocks by scale
// mean(Q).mean(K) in float32, and keeps forced blocks and the best of the rest. Threads share heads
// and query blocks.
#include "select_blocks.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "keys.h"
#include "torch_host.h"

namespace sparse_attn::cpu {
namespace {

constexpr float kNoKeys = -std::numeric_limits<float>::infinity();

struct Candidate {
  float score;
  int32_t block;
};

struct Workspace {
  float* query = nullptr;           // [B, Hq, num_q, D], means
  float* key = nullptr;             // [B, Hkv, num_kv, D]
  uint8_t* exists = nullptr;        // [B, Skv], keys that some row of the batch entry has
  uint8_t* has_keys = nullptr;      // [B, num_kv]
  float* scores = nullptr;          // [num_workers, num_kv]
  Candidate* candidates = nullptr;  // [num_workers, num_kv]
  uint8_t* kept = nullptr;          // [num_workers, num_kv]

  Workspace(const SelectParams& params, int64_t workers, Arena* arena) {
    int64_t head_dim = params.head_dim;
    query = arena->take<float>(int64_t{params.batch} * params.heads_q * params.num_q * head_dim);
    key = arena->take<float>(int64_t{params.batch} * params.heads_kv * params.num_kv * head_dim);
    exists = arena->take<uint8_t>(int64_t{params.batch} * params.seq_kv);
    has_keys = arena->take<uint8_t>(int64_t{params.batch} * params.num_kv);
    scores = arena->take<float>(workers * params.num_kv);
    candidates = arena->take<Candidate>(workers * params.num_kv);
    kept = arena->take<uint8_t>(workers * params.num_kv);
  }
};

class BlockSelection {
 public:
  BlockSelection(const SelectParams& params, const Workspace& workspace)
      : params_(params), workspace_(workspace), math_(vector_math()) {}

  /// Marks the keys of a batch entry that some row has.
  void find_keys(int32_t batch) const {
    uint8_t* exists = workspace_.exists + int64_t{batch} * params_.seq_kv;
    std::memset(exists, 0, params_.seq_kv);
    int32_t heads = params_.bounds.stride_h == 0 ? 1 : params_.heads_q;
    int32_t rows = params_.bounds.data == nullptr ? 1 : params_.seq_q;
    Interval marked = {0, 0};
    for (int32_t head = 0; head < heads; ++head) {
      for (int32_t i = 0; i < rows; ++i) {
        Interval keys = params_.bounds.row(batch, head, i, params_.seq_kv);
        if (keys.empty() || (marked.begin <= keys.begin && keys.end <= marked.end)) continue;
        std::memset(exists + keys.begin, 1, keys.size());
        marked = keys;
      }
    }
    for (int32_t block = 0; block < params_.num_kv; ++block) {
      Interval keys = block_of(block, params_.seq_kv);
      workspace_.has_keys[int64_t{batch} * params_.num_kv + block] =
          std::find(exists + keys.begin, exists + keys.end, 1) != exists + keys.end;
    }
  }

  void pool_query(int64_t head, int32_t block) const {
    Rows rows =
        rows_of(params_.query, params_.dtype, head / params_.heads_q, head % params_.heads_q);
    pool(rows, block_of(block, params_.seq_q), nullptr,
         workspace_.query + (head * params_.num_q + block) * params_.head_dim);
  }

  void pool_key(int64_t head, int32_t block) const {
    int64_t batch = head / params_.heads_kv;
    Rows rows = rows_of(params_.key, params_.dtype, batch, head % params_.heads_kv);
    pool(rows, block_of(block, params_.seq_kv), workspace_.exists + batch * params_.seq_kv,
         workspace_.key + (head * params_.num_kv + block) * params_.head_dim);
  }

  /// The list of one query block.
  void select(int32_t worker, int64_t head, int32_t block) const {
    int32_t batch = static_cast<int32_t>(head / params_.heads_q);
    uint8_t* kept = workspace_.kept + int64_t{worker} * params_.num_kv;
    std::memset(kept, 0, params_.num_kv);
    Interval visible = visible_to(batch, head % params_.heads_q, block);
    int32_t forced = force(batch, block, visible, kept);
    int32_t rest = params_.kept(visible.size(), forced) - forced;
    if (rest > 0) fill(worker, head, block, visible, rest, kept);

    int64_t row = head * params_.num_q + block;
    int32_t* indices = params_.indices + row * params_.num_kv;
    int32_t count = 0;
    for (int32_t j = 0; j < params_.num_kv; ++j) {
      if (kept[j]) indices[count++] = j;
    }
    params_.counts[row] = count;
    for (int32_t entry = count; entry < params_.num_kv; ++entry) indices[entry] = 0;
  }

 private:
  Interval block_of(int32_t block, int32_t length) const {
    return {block * params_.block, imin((block + 1) * params_.block, length)};
  }

  /// The mean of the rows that exist.
  void pool(const Rows& rows, Interval range, const uint8_t* exists, float* mean) const {
    float row[256];
    int32_t count = 0;
    std::memset(mean, 0, sizeof(float) * params_.head_dim);
    for (int32_t i = range.begin; i < range.end; ++i) {
      if (exists != nullptr && !exists[i]) continue;
      math_.to_float(rows.element, strided(rows, i, 1).data, row, params_.head_dim);
      for (int32_t d = 0; d < params_.head_dim; ++d) mean[d] += row[d];
      ++count;
    }
    for (int32_t d = 0; d < params_.head_dim && count > 0; ++d) mean[d] /= count;
  }

  /// Key blocks between the first and the last key that a row of the query block may see.
  Interval visible_to(int32_t batch, int64_t head, int32_t block) const {
    Interval rows = block_of(block, params_.seq_q);
    Bounds keys = no_rows(params_.seq_kv);
    for (int32_t i = rows.begin; i < rows.end; ++i) keys.add(params_.keys_of_row(batch, head, i));
    return params_.blocks_of(keys.any);
  }

  /// Marks the forced blocks among the visible ones; returns how many.
  int32_t force(int32_t batch, int32_t block, Interval visible, uint8_t* kept) const {
    Interval rows = block_of(block, params_.seq_q);
    int32_t low = floor_div(params_.position(batch, rows.begin), params_.block);
    int32_t high = floor_div(params_.position(batch, rows.end - 1), params_.block);
    for (Interval range : {Interval{0, params_.sink_blocks}, params_.around_diagonal(low, high)}) {
      range = intersect(range, visible);
      for (int32_t j = range.begin; j < range.end; ++j) kept[j] = 1;
    }
    return static_cast<int32_t>(std::count(kept, kept + params_.num_kv, 1));
  }

  /// Keeps the `rest` best of the visible blocks that are not kept yet, ties to the lower block.
  void fill(int32_t worker, int64_t head, int32_t block, Interval visible, int32_t rest,
            uint8_t* kept) const {
    int64_t batch = head / params_.heads_q;
    int64_t head_kv = head % params_.heads_q / (params_.heads_q / params_.heads_kv);
    const float* query = workspace_.query + (head * params_.num_q + block) * params_.head_dim;
    const float* keys =
        workspace_.key + (batch * params_.heads_kv + head_kv) * params_.num_kv * params_.head_dim;
    float* scores = workspace_.scores + int64_t{worker} * params_.num_kv;
    math_.row_scores(query, {keys, params_.head_dim, Element::kFloat32}, visible.end,
                     params_.head_dim, scores);
    Candidate* candidates = workspace_.candidates + int64_t{worker} * params_.num_kv;
    int32_t count = 0;
    for (int32_t j = visible.begin; j < visible.end; ++j) {
      if (kept[j]) continue;
      bool has_keys = workspace_.has_keys[batch * params_.num_kv + j];
      candidates[count++] = {has_keys ? params_.scale * scores[j] : kNoKeys, j};
    }
    std::nth_element(candidates, candidates + rest - 1, candidates + count,
                     [](const Candidate& a, const Candidate& b) {
                       bool nan_a = a.score != a.score, nan_b = b.score != b.score;
                       if (nan_a || nan_b) return nan_a != nan_b ? nan_b : a.block < b.block;
                       return a.score != b.score ? a.score > b.score : a.block < b.block;
                     });
    for (int32_t i = 0; i < rest; ++i) kept[candidates[i].block] = 1;
  }

  const SelectParams& params_;
  const Workspace& workspace_;
  const VectorMath& math_;
};

}  // namespace

int64_t select_workspace_bytes(const SelectParams& params) {
  Arena arena(nullptr);
  Workspace(params, num_workers(), &arena);
  return arena.used();
}

Status select_blocks(const SelectParams& params) {
  int32_t workers = num_workers();
  Arena arena(params.workspace);
  Workspace workspace(params, workers, &arena);
  BlockSelection selection(params, workspace);
  int64_t queries = int64_t{params.batch} * params.heads_q * params.num_q;
  int64_t keys = int64_t{params.batch} * params.heads_kv * params.num_kv;
  bool ran = for_each_item(workers, params.batch, [&](int32_t, int64_t batch) {
    selection.find_keys(static_cast<int32_t>(batch));
  });
  ran = ran && for_each_item(workers, queries + keys, [&](int32_t, int64_t item) {
          if (item < queries) {
            selection.pool_query(item / params.num_q, static_cast<int32_t>(item % params.num_q));
          } else {
            item -= queries;
            selection.pool_key(item / params.num_kv, static_cast<int32_t>(item % params.num_kv));
          }
        });
  ran = ran && for_each_item(workers, queries, [&](int32_t worker, int64_t item) {
          selection.select(worker, item / params.num_q, static_cast<int32_t>(item % params.num_q));
        });
  if (!ran) return {1, "the thread pool failed"};
  return {};
}

}  // namespace sparse_attn::cpu
