// The one argument struct of every engine: pointers, 64-bit strides in elements, and the pattern.
// Filled by ops/, which has checked everything; engines trust it, allocate nothing and throw
// nothing.
#pragma once

#include <cstdint>

#include "pattern.h"

namespace sparse_attn {

enum class Dtype : int32_t { kFloat32, kFloat16, kBFloat16 };

SPARSE_ATTN_HD constexpr int32_t size_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

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

struct AttentionParams {
  TensorView query;      // [B, Hq, Sq, D]
  TensorView key;        // [B, Hkv, Skv, D]
  TensorView value;      // [B, Hkv, Skv, D]
  TensorView out;        // [B, Hq, Sq, D]
  float* lse = nullptr;  // [B, Hq, Sq], natural logarithm; null when not asked for
  int64_t lse_stride_b = 0, lse_stride_h = 0, lse_stride_s = 0;

  int32_t batch = 0, heads_q = 0, heads_kv = 0, seq_q = 0, seq_kv = 0, head_dim = 0;
  Dtype dtype = Dtype::kFloat32;

  float scale = 1.0f;                  // scores are scale * q.k
  float softcap = 0.0f;                // s = softcap * tanh(s / softcap) before the mask; 0 is off
  const float* sink_logits = nullptr;  // [Hq], joins the softmax denominator only
  MaskView mask;
  BoundsView bounds;
  int32_t query_offset = 0;                // key position of query 0 ...
  const int32_t* query_offsets = nullptr;  // [B], ... or one for each batch entry

  Pattern pattern;
  const int32_t* global_tokens = nullptr;  // [num_global_tokens], any order; engines build the bits
  int32_t num_global_tokens = 0;

  void* workspace = nullptr;  // the engine's workspace_bytes(params), 256-byte aligned
  void* stream = nullptr;     // cudaStream_t
  int32_t device = 0;         // CUDA device index

  /// Query heads that share a key head.
  SPARSE_ATTN_HD constexpr int32_t group() const { return heads_q / heads_kv; }
  SPARSE_ATTN_HD int32_t offset(int64_t b) const {
    return query_offsets == nullptr ? query_offset : query_offsets[b];
  }
  /// How many keys there are for a batch entry: under causal none behind its last query, where the
  /// tail of a cache may hold anything.
  SPARSE_ATTN_HD int32_t num_keys(int64_t b) const {
    if (!pattern.causal) return seq_kv;
    return imax(0, imin(seq_kv, seq_q + imax(-kMaxLength, imin(offset(b), kMaxLength))));
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
