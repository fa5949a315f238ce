// What a query sees and its softmax, a key at a time.
#include "cpu/naive/naive_row.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "cpu/vector/vector_math.h"

namespace sparse_attn::cpu {
namespace {

/// Integers in the order of the floats; -0 equals 0, NaN stands above everything.
int32_t ordered(float score) {
  if (score != score) return std::numeric_limits<int32_t>::max();
  int32_t bits;
  score += 0.0f;
  std::memcpy(&bits, &score, sizeof(bits));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

/// The term of attn_mask at (b, h, i, j): 0 or -inf from a bool mask.
float mask_term(const MaskView& mask, int64_t b, int64_t h, int64_t i, int64_t j) {
  if (mask.kind == MaskKind::kNone) return 0.0f;
  int64_t at = b * mask.stride_b + h * mask.stride_h + i * mask.stride_q + j * mask.stride_k;
  if (mask.kind == MaskKind::kBool)
    return static_cast<const uint8_t*>(mask.data)[at] ? 0 : kMinusInfinity;
  if (mask.kind == MaskKind::kFloat32) return static_cast<const float*>(mask.data)[at];
  float term;
  vector_math().to_float(mask.kind == MaskKind::kFloat16 ? Element::kFloat16 : Element::kBFloat16,
                         static_cast<const uint16_t*>(mask.data) + at, &term, 1);
  return term;
}

}  // namespace

NaiveRow::NaiveRow(const AttentionParams& params, Arena* arena) {
  seen = arena->take<uint8_t>(params.problem.seq_kv);
  if (params.pattern.topk > 0) ranks = arena->take<int32_t>(params.problem.seq_kv);
}

void NaiveRow::see_listed(const BlockList& list, Interval keys, int32_t batch, int32_t head,
                          int32_t i) {
  ListedRuns runs = list.runs(batch, head, i / list.block_q, list.block_kv);
  for (int32_t r = 0; r < runs.count; ++r) {
    const BlockBits bits = list.bits_at(list.bits_row(runs, r));
    const int32_t begin = runs.keys(r).begin;
    Interval block = intersect(keys, runs.keys(r));
    for (int32_t j = block.begin; j < block.end; ++j) {
      seen[j] = bits.sees(i % list.block_q, j - begin);
    }
  }
}

void NaiveRow::find_seen(const AttentionParams& params, const Pattern& pattern, int32_t batch,
                         int32_t head, int32_t i) {
  std::memset(seen, 0, params.problem.seq_kv);
  Interval bounds = params.scores.bounds.row(batch, head, i, params.problem.seq_kv);
  auto [slice, row] = make_query(pattern, i, params.sequences.of(batch), bounds);
  if (pattern.list.present()) {
    see_listed(pattern.list, row.keys, batch, head, i);
    return;
  }
  Seen main = seen_main(pattern, row), lead = seen_lead(pattern, slice, row);
  for (int32_t v = row.limit.begin; v < row.limit.end; ++v) {
    if (sees(pattern, slice, main, v)) seen[slice.keys.at(v)] = 1;
  }
  for (int32_t u = row.lead.begin; u < row.lead.end; ++u) {
    if (sees(pattern, slice, lead, u)) seen[slice.lead.view.at(u)] = 1;
  }
}

/// Writes -inf over all scores but the k highest, by a plain selection; ties go to the lower key.
void NaiveRow::keep_topk(int32_t k, int32_t n, float* scores) {
  int32_t count = 0;
  for (int32_t j = 0; j < n; ++j) {
    if (scores[j] != kMinusInfinity) ranks[count++] = ordered(scores[j]);
  }
  if (count <= k) return;
  std::nth_element(ranks, ranks + k - 1, ranks + count, std::greater<int32_t>());
  int32_t threshold = ranks[k - 1];
  int32_t room = k - static_cast<int32_t>(std::count_if(
                         ranks, ranks + k, [&](int32_t rank) { return rank > threshold; }));
  for (int32_t j = 0; j < n; ++j) {
    if (scores[j] == kMinusInfinity) continue;
    int32_t rank = ordered(scores[j]);
    bool tie = rank == threshold;
    if (rank < threshold || (tie && room <= 0)) scores[j] = kMinusInfinity;
    room -= tie;
  }
}

float NaiveRow::softmax(const AttentionParams& params, const Pattern& pattern, int32_t batch,
                        int32_t head, int32_t i, float* scores) {
  find_seen(params, pattern, batch, head, i);
  const float scale = params.score_scale(batch, head);
  for (int32_t j = 0; j < params.problem.seq_kv; ++j) {
    float term = mask_term(params.scores.mask, batch, head, i, j);
    scores[j] = seen[j] && term != kMinusInfinity ? scale * scores[j] : kMinusInfinity;
  }
  const int32_t position = i + params.sequences.offset(batch);
  if (pattern.topk > 0) keep_topk(pattern.topk, params.problem.seq_kv, scores);
  float max = kMinusInfinity;
  for (int32_t j = 0; j < params.problem.seq_kv; ++j) {
    if (scores[j] == kMinusInfinity) continue;
    if (params.scores.softcap != 0)
      scores[j] = params.scores.softcap * std::tanh(scores[j] / params.scores.softcap);
    scores[j] += params.scores.alibi.bias(batch, head, position, j);
    scores[j] += mask_term(params.scores.mask, batch, head, i, j);
    if (!(scores[j] <= max)) max = scores[j];
  }
  if (max == kMinusInfinity) {
    std::memset(scores, 0, params.problem.seq_kv * sizeof(float));
    return kMinusInfinity;
  }
  double sum = 0;
  for (int32_t j = 0; j < params.problem.seq_kv; ++j) {
    scores[j] = scores[j] == kMinusInfinity ? 0.0f : std::exp(scores[j] - max);
    sum += scores[j];
  }
  float lse = static_cast<float>(max + std::log(sum));
  if (params.scores.sink_logits != nullptr)
    sum += std::exp(double{params.scores.sink_logits[head]} - max);
  float share = static_cast<float>(1 / sum);
  for (int32_t j = 0; j < params.problem.seq_kv; ++j) scores[j] *= share;
  return lse;
}

}  // namespace sparse_attn::cpu
