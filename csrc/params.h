// What engines read, in parts with one job each: pointers, 64-bit strides in elements, the pattern.
// Filled by ops/, which has checked everything; engines trust it, allocate nothing and throw
// nothing. Which parts an engine serves is a matter of feature_set.h.
#pragma once

#include <cstdint>

#include "feature_set.h"
#include "pattern.h"
#include "sequence.h"

namespace sparse_attn {

enum class Dtype : int32_t { kFloat32, kFloat16, kBFloat16, kFloat8 };

SPARSE_ATTN_HD constexpr int32_t size_of(Dtype dtype) {
  return dtype == Dtype::kFloat32 ? 4 : dtype == Dtype::kFloat8 ? 1 : 2;
}

/// What an engine returns: 0, or a code and a static sentence that says what failed.
struct Status {
  int32_t code = 0;  // cudaError_t or CUresult on CUDA
  const char* message = nullptr;
  constexpr bool ok() const { return code == 0; }
};

/// A [batch, heads, rows, head_dim] tensor whose last dimension is contiguous.
struct TensorView {
  void* data = nullptr;
  int64_t stride_b = 0, stride_h = 0, stride_s = 0;
};

enum class MaskKind : int32_t { kNone, kBool, kFloat32, kFloat16, kBFloat16 };

/// attn_mask broadcast to [B, Hq, Sq, Skv]: strides of broadcast dimensions are 0.
struct MaskView {
  MaskKind kind = MaskKind::kNone;  // bool: true is allowed; else added to the scaled scores
  const void* data = nullptr;
  int64_t stride_b = 0, stride_h = 0, stride_q = 0, stride_k = 0;
};

/// key_bounds int32 [B, 1|Hq, Sq, 2]: row i sees keys [lo, hi) only.
struct BoundsView {
  const int32_t* data = nullptr;
  int64_t stride_b = 0, stride_h = 0, stride_q = 0, stride_side = 1;

  /// The keys that exist for a row, of `seq_kv`.
  SPARSE_ATTN_HD Interval row(int64_t batch, int64_t head, int64_t i, int32_t seq_kv) const {
    if (data == nullptr) return {0, seq_kv};
    const int32_t* side = data + batch * stride_b + head * stride_h + i * stride_q;
    return intersect({side[0], side[stride_side]}, {0, seq_kv});
  }
};

/// What ALiBi adds to the score of key j in the row at position p, after scale and softcap.
SPARSE_ATTN_HD float alibi_bias(float slope, int32_t p, int32_t j) {
  return -slope * static_cast<float>(p < j ? j - p : p - j);
}

/// alibi_slopes float32 [B|1, Hq] (Press et al. 2021).
struct AlibiView {
  const float* slopes = nullptr;
  int64_t stride_b = 0, stride_h = 0;

  SPARSE_ATTN_HD float slope(int64_t batch, int64_t head) const {
    return slopes[batch * stride_b + head * stride_h];
  }
  SPARSE_ATTN_HD float bias(int64_t batch, int64_t head, int32_t p, int32_t j) const {
    return slopes == nullptr ? 0.0f : alibi_bias(slope(batch, head), p, j);
  }
};

constexpr int32_t kMaxHeadDim = 256;

/// Sizes of a call. Sequences may be shorter than the lengths here.
struct Problem {
  int32_t batch = 0, heads_q = 0, heads_kv = 0;
  int32_t seq_q = 0, seq_kv = 0;        // of the longest sequence, at most
  int32_t head_dim = 0, value_dim = 0;  // of query and key; of value and output
  Dtype dtype = Dtype::kFloat32;        // of query and output

  /// Query heads that share a key head.
  SPARSE_ATTN_HD constexpr int32_t group() const { return heads_q / heads_kv; }
  /// The head dim of a kernel that is compiled for one: the columns that a tensor lacks are zeros.
  SPARSE_ATTN_HD constexpr int32_t widest_dim() const { return imax(head_dim, value_dim); }
};

/// What keys or values of 8 bits are multiplied by: float32 [B|1, Hkv|1].
struct ScaleView {
  const float* data = nullptr;
  int64_t stride_b = 0, stride_h = 0;

  /// The factor of a key head, 1 where none is given.
  SPARSE_ATTN_HD float at(int64_t b, int64_t key_head) const {
    return data == nullptr ? 1.0f : data[b * stride_b + key_head * stride_h];
  }
};

/// Keys and values: tensors, or pages that a table lists for each sequence.
struct KeySource {
  TensorView key;    // [B, Hkv, Skv, D]; [1, Hkv, T, D] where packed; [pages, Hkv, page_size, D]
  TensorView value;  // the same with value_dim columns
  Dtype dtype = Dtype::kFloat32;

  ScaleView key_scale, value_scale;

  // The keys that Pattern::lead_keys lists, gathered: [B, Hkv, Pattern::lead.length, D].
  TensorView lead_key, lead_value;

  // Key j of sequence b lies in row j % page_size of page table[b, j / page_size].
  const int32_t* table = nullptr;  // [B, table_pages]
  int64_t table_stride = 0;
  int32_t table_pages = 0, page_size = 0, num_pages = 0;

  SPARSE_ATTN_HD constexpr bool paged() const { return table != nullptr; }
  /// The page of key j of a sequence, inside the cache whatever the table says.
  SPARSE_ATTN_HD int32_t page_of(int64_t b, int32_t j) const {
    return existing_page(entry_of(b, j / page_size));
  }
  /// What the table says of the i-th page of a sequence, and the page that this is taken for.
  SPARSE_ATTN_HD int32_t entry_of(int64_t b, int32_t i) const {
    return table[b * table_stride + imax(0, imin(i, table_pages - 1))];
  }
  SPARSE_ATTN_HD int32_t existing_page(int32_t entry) const {
    return imax(0, imin(entry, num_pages - 1));
  }
  /// Elements from the start of `tensor` (key or value) to key j of a sequence and key head.
  SPARSE_ATTN_HD int64_t locate(const TensorView& tensor, const Sequence& sequence, int64_t b,
                                int64_t head, int32_t j) const {
    if (!paged()) {
      return b * tensor.stride_b + head * tensor.stride_h +
             (int64_t{sequence.first_key} + j) * tensor.stride_s;
    }
    return page_of(b, j) * tensor.stride_b + head * tensor.stride_h +
           j % page_size * tensor.stride_s;
  }
};

/// What happens to q.k before the softmax, and which keys exist for a row.
struct Scores {
  float scale = 1.0f;                  // scores are scale * q.k
  float softcap = 0.0f;                // s = softcap * tanh(s / softcap) before the mask; 0 is off
  const float* sink_logits = nullptr;  // [Hq], joins the softmax denominator only
  AlibiView alibi;
  MaskView mask;
  BoundsView bounds;
};

struct Outputs {
  TensorView out;        // [B, Hq, Sq, value_dim]; [1, Hq, T, value_dim] where packed
  float* lse = nullptr;  // [B, Hq, Sq], natural logarithm; null when not asked for
  int64_t lse_stride_b = 0, lse_stride_h = 0, lse_stride_s = 0;

  // [B, Sq], where queries were gathered: the row of `out` and `lse` of each one; -1 for none.
  const int32_t* rows = nullptr;
};

struct AttentionParams {
  Problem problem;
  Sequences sequences;
  TensorView query;  // [B, Hq, Sq, D]; [1, Hq, T, D] where packed
  KeySource keys;
  Scores scores;
  Pattern pattern;
  Outputs outputs;
  Features features;  // features_of the rest

  const int32_t* global_tokens = nullptr;  // [num_global_tokens], any order; engines build the bits
  int32_t num_global_tokens = 0;

  void* workspace = nullptr;  // the engine's workspace_bytes(params), 256-byte aligned
  void* stream = nullptr;     // cudaStream_t
  int32_t device = 0;         // CUDA device index

  /// The factor of a query head's products q.k, and that of its output.
  SPARSE_ATTN_HD float score_scale(int64_t b, int32_t head) const {
    return scores.scale * keys.key_scale.at(b, head / problem.group());
  }
  SPARSE_ATTN_HD float value_scale(int64_t b, int32_t head) const {
    return keys.value_scale.at(b, head / problem.group());
  }
  /// How many keys of a sequence may be read.
  SPARSE_ATTN_HD int32_t num_keys(const Sequence& sequence) const {
    return readable_keys(pattern.causal, sequence);
  }
  /// Whether the query heads of a key head see the same keys, but for those that attn_mask hides.
  bool heads_see_alike() const {
    return features.within(kKeysOfAllHeads) && scores.bounds.stride_h == 0 &&
           pattern.list.is_shared_by(problem.group());
  }
};

/// Arguments of list building: the true entries of a block mask, row by row.
struct ListParams {
  const uint8_t* mask = nullptr;  // bool [rows, num_kv], contiguous
  int64_t rows = 0;
  int32_t num_kv = 0;
  int32_t* counts = nullptr;   // [rows]
  int32_t* indices = nullptr;  // [rows, num_kv], ascending; entries past the count are 0
  void* stream = nullptr;
  int32_t device = 0;
};

/// merge_states on contiguous rows: out = weighted mean of two partial results.
struct MergeParams {
  const void* out_a = nullptr;   // [rows, D]
  const void* out_b = nullptr;   // [rows, D]
  const float* lse_a = nullptr;  // [rows]
  const float* lse_b = nullptr;  // [rows]
  void* out = nullptr;           // [rows, D]
  float* lse = nullptr;          // [rows]
  int64_t rows = 0;
  int32_t head_dim = 0;
  Dtype dtype = Dtype::kFloat32;
  void* stream = nullptr;
  int32_t device = 0;
};

}  // namespace sparse_attn
