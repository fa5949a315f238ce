// The naive engine: softmax(scale * Q K^T + mask) V with the scores in global memory, float32
// throughout. The baseline that shows what fusion buys, and the oracle on the GPU. Heads are taken
// in chunks where their scores together would not fit.
#include "../../arena.h"
#include "../engines.h"
#include "../select/global_tokens.h"
#include "scored_heads.cuh"

namespace sparse_attn::cuda {
namespace {

constexpr int64_t kScoreBytes = int64_t{8} << 30;  // of all heads of a chunk, where one head fits
constexpr int64_t kMostTiles = int64_t{1} << 30;   // of a grid
constexpr int64_t kSmallestTile = 16;

int64_t scores_per_head(const AttentionParams& params) {
  return int64_t{params.problem.seq_q} * params.problem.seq_kv;
}

/// (batch, head) pairs of a chunk.
int64_t heads_at_once(const AttentionParams& params) {
  int64_t all = int64_t{params.problem.batch} * params.problem.heads_q;
  int64_t tiles = ceil_div64(params.problem.seq_q, kSmallestTile) *
                  ceil_div64(params.problem.seq_kv, kSmallestTile);
  int64_t by_rows = kMostTiles / (tiles + params.problem.seq_q + 1);
  int64_t by_bytes =
      kScoreBytes / (scores_per_head(params) * static_cast<int64_t>(sizeof(float)) + 1);
  int64_t heads = by_rows < by_bytes ? by_rows : by_bytes;
  if (heads > all) heads = all;
  return heads < 1 ? 1 : heads;
}

struct Workspace {
  float* scores;        // of heads_at_once
  char* global_tokens;  // scattered ones
};

Workspace lay_out(const AttentionParams& params, Arena* arena) {
  return {arena->take<float>(heads_at_once(params) * scores_per_head(params)),
          arena->take<char>(global_token_bytes(params, kAnyTile))};
}

int64_t workspace_bytes(const AttentionParams& params) {
  Arena arena(nullptr);
  lay_out(params, &arena);
  return arena.used();
}

Status run(const AttentionParams& given) {
  naive::ScoredHeads scored;
  scored.params = given;
  AttentionParams& params = scored.params;
  const int64_t step = heads_at_once(params);
  Arena arena(params.workspace);
  const Workspace workspace = lay_out(params, &arena);
  scored.scores = workspace.scores;
  Status status = mark_global_tokens(&params, kAnyTile, workspace.global_tokens);

  int64_t all = int64_t{params.problem.batch} * params.problem.heads_q;
  for (scored.first = 0; scored.first < all && status.ok(); scored.first += step) {
    scored.heads = step < all - scored.first ? step : all - scored.first;
    status = naive::launch_scores(scored);
    if (status.ok()) status = naive::launch_softmax(scored);
    if (status.ok()) status = naive::launch_output(scored);
  }
  return status;
}

}  // namespace

const Engine kNaive = {"naive", workspace_bytes, run};

}  // namespace sparse_attn::cuda
