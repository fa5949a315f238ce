// The features of a call: the one place that asks which fields are set. Every engine, kernel kind
// and refusal reads the set.
#pragma once

#include <cstdint>

#include "cuda/common/log2_units.h"
#include "params.h"

namespace sparse_attn {

/// Whether every row begins where eight elements may be loaded at once, four of float32; strides of
/// dimensions of size 1 do not count.
inline bool is_aligned(const TensorView& tensor, int64_t batch, int64_t heads, int64_t rows,
                       Dtype dtype) {
  const int64_t bytes = dtype == Dtype::kFloat8 ? 8 : 16;
  const int64_t strides = (batch > 1 ? tensor.stride_b : 0) | (heads > 1 ? tensor.stride_h : 0) |
                          (rows > 1 ? tensor.stride_s : 0);
  return reinterpret_cast<uintptr_t>(tensor.data) % bytes == 0 &&
         strides * size_of(dtype) % bytes == 0;
}

/// Query, key, value and output, where that is there.
inline bool all_aligned(const AttentionParams& params) {
  const Problem& p = params.problem;
  const KeySource& keys = params.keys;
  const int64_t rows = params.sequences.packed() ? params.sequences.packed_rows : p.seq_q;
  const int64_t blocks = keys.paged() ? keys.num_pages : p.batch;
  return is_aligned(params.query, p.batch, p.heads_q, rows, p.dtype) &&
         is_aligned(params.outputs.out, p.batch, p.heads_q, rows, p.dtype) &&
         is_aligned(keys.key, blocks, p.heads_kv, p.seq_kv, keys.dtype) &&
         is_aligned(keys.value, blocks, p.heads_kv, p.seq_kv, keys.dtype);
}

/// Of the parts that attention and selection share.
inline Features features_of(const Problem& problem, const Sequences& sequences,
                            const KeySource& keys, const Scores& scores) {
  Features features;
  features.add(Feature::kFloat32, problem.dtype == Dtype::kFloat32);
  features.add(Feature::kQueryOffsets, sequences.query_offsets != nullptr);
  features.add(Feature::kPacked,
               sequences.first_rows != nullptr || sequences.first_keys != nullptr);
  features.add(Feature::kUsedKeys, sequences.used_keys != nullptr);
  features.add(Feature::kPaged, keys.paged());
  features.add(Feature::kFloat8Keys, keys.dtype == Dtype::kFloat8);
  features.add(Feature::kMask, scores.mask.kind != MaskKind::kNone);
  features.add(Feature::kKeyBounds, scores.bounds.data != nullptr);
  features.add(Feature::kSoftcap, scores.softcap != 0.0f);
  features.add(Feature::kOddScale, !cuda::is_common_scale(scores.scale));
  features.add(Feature::kSinkLogits, scores.sink_logits != nullptr);
  features.add(Feature::kAlibi, scores.alibi.slopes != nullptr);
  return features;
}

/// What a call asks for.
inline Features features_of(const AttentionParams& params) {
  const Problem& problem = params.problem;
  const Pattern& pattern = params.pattern;
  const bool window = pattern.left < kUnlimited || pattern.right < kUnlimited;
  Features features = features_of(problem, params.sequences, params.keys, params.scores);
  features.add(Feature::kUnaligned, !all_aligned(params));
  features.add(Feature::kValueDim, problem.value_dim != problem.head_dim);
  features.add(Feature::kKeyOrigins,
               params.sequences.key_origins != nullptr && pattern.has_origin());
  features.add(Feature::kWindow, window);
  features.add(Feature::kDilation, pattern.dilation > 1);
  features.add(Feature::kLead, pattern.has_lead());
  features.add(Feature::kColumns, pattern.has_lead() && pattern.lead.step > 1);
  features.add(Feature::kGlobalRows, pattern.global_count > 0);
  features.add(Feature::kGlobalIndices, params.num_global_tokens > 0);
  features.add(Feature::kList, pattern.list.block_q > 0);
  features.add(Feature::kPartialBlocks, pattern.list.has_bits());
  features.add(Feature::kTopK, pattern.topk > 0);
  return features;
}

}  // namespace sparse_attn
