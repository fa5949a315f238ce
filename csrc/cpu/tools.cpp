// The CPU's tools around attention: lists from block masks and the merge of partial results
// (o = sum w_i o_i / sum w_i with w_i = exp(lse_i - max lse)). Block selection is in select_blocks.
#include <cmath>
#include <utility>

#include "append_to_cache.h"
#include "cpu/select/select_blocks.h"
#include "cpu/select/sketch.h"
#include "cpu/vector/vector_math.h"
#include "engines.h"
#include "rows.h"

namespace sparse_attn::cpu {
namespace {

constexpr int32_t kPiece = 256;  // elements of a row merged at a time

Status list_from_mask(const ListParams& params) {
  return for_each_row(params.rows, [&](int64_t row) {
    const uint8_t* mask = params.mask + row * params.num_kv;
    int32_t* indices = params.indices + row * params.num_kv;
    int32_t count = 0;
    for (int32_t block = 0; block < params.num_kv; ++block) {
      if (mask[block]) indices[count++] = block;
    }
    params.counts[row] = count;
    for (int32_t entry = count; entry < params.num_kv; ++entry) indices[entry] = 0;
  });
}

/// One row: a part with lse -inf has weight 0, whatever its output holds.
void merge_row(const MergeParams& params, const VectorMath& math, int64_t row) {
  float lse_a = params.lse_a[row], lse_b = params.lse_b[row];
  float max = lse_a > lse_b || lse_a != lse_a ? lse_a : lse_b;
  auto element = static_cast<Element>(params.dtype);
  double sum = 0;
  if (max != kMinusInfinity) sum = std::exp(double{lse_a} - max) + std::exp(double{lse_b} - max);
  for (int32_t start = 0; start < params.head_dim; start += kPiece) {
    int32_t size = imin(kPiece, params.head_dim - start);
    int64_t offset = (row * params.head_dim + start) * size_of(params.dtype);
    float out[kPiece] = {}, part[kPiece];
    for (auto [data, lse] : {std::pair(params.out_a, lse_a), std::pair(params.out_b, lse_b)}) {
      if (lse == kMinusInfinity) continue;
      float weight = static_cast<float>(std::exp(double{lse} - max) / sum);
      math.to_float(element, static_cast<const char*>(data) + offset, part, size);
      for (int32_t d = 0; d < size; ++d) out[d] += weight * part[d];
    }
    math.from_float(element, out, 1.0f, static_cast<char*>(params.out) + offset, size);
  }
  params.lse[row] =
      max == kMinusInfinity ? kMinusInfinity : static_cast<float>(max + std::log(sum));
}

Status merge_states(const MergeParams& params) {
  const VectorMath& math = vector_math();
  return for_each_row(params.rows, [&](int64_t row) { merge_row(params, math, row); });
}

}  // namespace

const Tools kTools = {select_workspace_bytes, select_blocks,    list_from_mask, merge_states,
                      append_to_cache,        append_to_sketch, sketch_pages};

}  // namespace sparse_attn::cpu
