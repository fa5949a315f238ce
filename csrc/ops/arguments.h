// What a call brings (CallArguments, read from the dispatcher's stack by schema.cpp) and the checks
// that turn it into AttentionParams. Tensors are checked here and nowhere else.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

#include "../select_params.h"

namespace sparse_attn {

using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;
using MaybeInt = std::optional<int64_t>;

/// Every argument of every attention op; an op fills those that its schema names.
struct CallArguments {
  MaybeTensor query, key, value;

  MaybeTensor cu_seq_q, cu_seq_k, seqused_k, block_table;
  MaybeInt max_q, max_k;

  MaybeInt left, right;
  int64_t dilation = 1, sinks = 0, num_global = 0;
  MaybeTensor global_tokens;
  MaybeInt local, stride;
  MaybeTensor counts, indices, partial, bits;
  int64_t block_q = 0, block_kv = 0, num_kv_blocks = 0;
  MaybeInt k;
  int64_t block_size = 64;
  MaybeInt block_rows;
  MaybeInt budget_count;
  std::optional<double> budget_share, mass;
  std::string selector = "mixed", group = "q";
  MaybeInt groups;
  int64_t row_step = 16;
  MaybeTensor scores;
  MaybeTensor sketch_codes, sketch_ranges, sketch_lengths;
  int64_t sink_blocks = 1, local_blocks = 1;

  MaybeTensor attn_mask;
  bool is_causal = false;
  std::optional<double> scale;
  MaybeTensor key_bounds;
  MaybeInt query_offset;
  MaybeTensor query_offsets, key_origin;
  double softcap = 0;
  MaybeTensor sink_logits, alibi_slopes, key_scale, value_scale;
  bool return_lse = false;
  std::string engine = "auto";

  MaybeTensor out, lse;
};

/// How the tensors of an op hold its sequences.
enum class Holding {
  kTensors,  // (batch, heads, length, head_dim)
  kPacked,   // (tokens, heads, head_dim), one sequence after the other
  kPages,    // caches (pages, page_size, heads, head_dim); queries as in either of the above
};

/// Which kind of pattern an op brings; `kAny` (naive) takes what is given.
enum class PatternKind { kFull, kBand, kDilated, kStrided, kBlockSparse, kTopK, kBlockTopK, kAny };

/// A checked call: parameters and the tensors that own what they point to.
struct CheckedCall {
  AttentionParams params;
  MaybeTensor sink_logits, alibi_slopes, global_tokens;  // converted copies
  MaybeTensor indices, partial, bits;  // of a list, contiguous where the caller's are not alike
  MaybeTensor query_offsets;           // of an int where lengths are on the device
};

/// The same for a selection.
struct CheckedSelection {
  SelectParams params;
  MaybeTensor scores;         // float32 copy
  MaybeTensor query_offsets;  // of an int where lengths are on the device
};

/// Shape as "(2, 3)".
std::string shape_of(const Tensor& tensor);
std::string dtype_of(const Tensor& tensor);

/// Checks everything but `out` and `lse`, and fills the parameters but for them and the features.
/// For block top-k the pattern stays full: its list is made when the call runs.
CheckedCall check_call(const std::string& op, PatternKind kind, const CallArguments& args);

/// Checks block top-k's own arguments and fills the selection's, but for its outputs.
CheckedSelection check_selection(const std::string& op, const CallArguments& args);

/// Checks out= and lse= of an `_out` op against the call.
void check_outputs(const std::string& op, const CallArguments& args);

TensorView view_of(const Tensor& tensor);

}  // namespace sparse_attn
