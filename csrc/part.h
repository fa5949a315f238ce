// A part of a call: some of its batch entries, some of its key heads with the query heads that
// share them. The part's engine finds the same data at other addresses.
#pragma once

#include "params.h"

namespace sparse_attn {

/// The address `elements` of `size` bytes further on.
inline void* moved(void* data, int64_t elements, int64_t size) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(data) + elements * size);
}

/// Bytes of an entry of attn_mask.
inline int64_t size_of(MaskKind kind) {
  return kind == MaskKind::kBool ? 1 : kind == MaskKind::kFloat32 ? 4 : 2;
}

/// Names every field of a call, so that one more does not compile until it is named here, has a
/// feature where engines must know of it (call_features.h), and is moved in part_of() where it
/// differs between batch entries or heads.
inline void name_fields(const AttentionParams& params) {
  [[maybe_unused]] const auto& [problem, sequences, query, keys, scores, pattern, outputs, features,
                                global_tokens, num_global_tokens, workspace, stream, device] =
      params;
  [[maybe_unused]] const auto& [rows, most_keys, query_offset, query_offsets, key_origins,
                                first_rows, first_keys, used_keys, packed_rows, packed_keys] =
      sequences;
  [[maybe_unused]] const auto& [key, value, dtype, key_scale, value_scale, lead_key, lead_value,
                                table, table_stride, table_pages, page_size, num_pages] = keys;
  [[maybe_unused]] const auto& [scale, softcap, sink_logits, alibi, mask, bounds] = scores;
  [[maybe_unused]] const auto& [left, right, dilation, causal, lead, lead_keys, num_lead_keys,
                                global_count, global_bits, global_tiles, num_global_tiles, list,
                                topk] = pattern;
  [[maybe_unused]] const auto& [counts, indices, count_stride_b, count_stride_h, index_stride_b,
                                index_stride_h, index_stride_q, block_q, block_kv, num_q, num_kv,
                                max_count, heads_per_list, expected, partial, bits, num_bits] =
      list;
  [[maybe_unused]] const auto& [out, lse, lse_stride_b, lse_stride_h, lse_stride_s, out_rows] =
      outputs;
}

/// The call on batch entries `entries` and key heads `heads` alone. It has no lists yet that an
/// engine makes for itself: gathered keys, bits of global tokens.
inline AttentionParams part_of(const AttentionParams& params, Interval entries, Interval heads) {
  const int32_t group = params.problem.group();
  const int64_t b = entries.begin, head_kv = heads.begin, head = head_kv * group;
  AttentionParams one = params;
  one.problem.batch = entries.size();
  one.problem.heads_kv = heads.size();
  one.problem.heads_q = heads.size() * group;

  for (const int32_t** numbers :
       {&one.sequences.query_offsets, &one.sequences.key_origins, &one.sequences.first_rows,
        &one.sequences.first_keys, &one.sequences.used_keys}) {
    if (*numbers != nullptr) *numbers += b;
  }

  auto move_view = [](TensorView* view, int64_t of_batch, int64_t of_heads, Dtype dtype) {
    const int64_t elements = of_batch * view->stride_b + of_heads * view->stride_h;
    view->data = moved(view->data, elements, size_of(dtype));
  };
  move_view(&one.query, b, head, params.problem.dtype);  // strides of what is packed are 0
  Outputs& outputs = one.outputs;
  move_view(&outputs.out, b, head, params.problem.dtype);
  if (outputs.lse != nullptr) outputs.lse += b * outputs.lse_stride_b + head * outputs.lse_stride_h;
  if (outputs.rows != nullptr) outputs.rows += b * params.problem.seq_q;

  KeySource& keys = one.keys;
  const int64_t key_entry = keys.paged() ? 0 : b;
  move_view(&keys.key, key_entry, head_kv, keys.dtype);
  move_view(&keys.value, key_entry, head_kv, keys.dtype);
  if (keys.paged()) keys.table += b * keys.table_stride;
  for (ScaleView* scale : {&keys.key_scale, &keys.value_scale}) {
    if (scale->data != nullptr) scale->data += b * scale->stride_b + head_kv * scale->stride_h;
  }

  Scores& scores = one.scores;
  if (scores.sink_logits != nullptr) scores.sink_logits += head;
  AlibiView& alibi = scores.alibi;
  if (alibi.slopes != nullptr) alibi.slopes += b * alibi.stride_b + head * alibi.stride_h;
  MaskView& mask = scores.mask;
  if (mask.kind != MaskKind::kNone) {
    mask.data = static_cast<const char*>(mask.data) +
                (b * mask.stride_b + head * mask.stride_h) * size_of(mask.kind);
  }
  BoundsView& bounds = scores.bounds;
  if (bounds.data != nullptr) bounds.data += b * bounds.stride_b + head * bounds.stride_h;

  BlockList& list = one.pattern.list;
  if (list.present()) {
    const int64_t list_head = head / list.heads_per_list;
    const int64_t indices = b * list.index_stride_b + list_head * list.index_stride_h;
    list.counts += b * list.count_stride_b + list_head * list.count_stride_h;
    list.indices += indices;
    if (list.has_bits()) list.partial += indices;
  }
  return one;
}

}  // namespace sparse_attn
