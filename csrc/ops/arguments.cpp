// The checks of the common arguments: query, key, value, masks, bounds, offsets, outputs.
// Patterns are checked in pattern_arguments.cpp, what chooses blocks in selection_arguments.cpp.
#include "arguments.h"

#include <cmath>

#include "../capability.h"
#include "../select_features.h"
#include "checks.h"
#include "overlap.h"
#include "pattern_arguments.h"
#include "selection_arguments.h"
#include "sequence_arguments.h"

namespace sparse_attn {
namespace {

constexpr double kMaxScale = 2.3e38;  // engines take it in units of log2, 1.44 times as large

enum class Role { kQuery, kKeys };  // keys, or values, which may have 8 bits

void check_tensor(const std::string& op, Role role, const char* name, const Tensor& tensor) {
  const bool is_query = role == Role::kQuery;
  if (tensor.dim() != 4) {
    std::string got = shape_of(tensor);
    if (is_query && tensor.dim() == 3 && op == "paged") {
      got += "; packed queries (tokens, heads, head_dim) come with cu_seq_q and max_q";
    }
    fail_expected(op, text(name, " of shape (batch, heads, length, head_dim)"), got);
  }
  if (!is_attention_dtype(tensor) && (is_query || !is_float8(tensor))) {
    std::string got = dtype_of(tensor);
    if (!is_query && tensor.scalar_type() == ScalarType::Byte) {
      got += "; a cache of 8 bits goes in as cache.view(torch.float8_e4m3fn)";
    }
    const char* kinds =
        is_query ? "float32, float16 or bfloat16" : "float32, float16, bfloat16 or float8_e4m3fn";
    fail_expected(op, text(name, " of dtype ", kinds), got);
  }
  check_last_contiguous(op, name, tensor, true);
  if (tensor.size(2) > kMaxLength) {
    fail_expected(op, text(name, " of length up to ", kMaxLength), std::to_string(tensor.size(2)));
  }
}

void check_like_query(const std::string& op, const char* name, const Tensor& tensor,
                      const Tensor& query) {
  check_same_device(op, name, tensor, query);
  if (tensor.scalar_type() != query.scalar_type()) {
    fail_expected(op, text(name, " of query's dtype ", dtype_of(query)), dtype_of(tensor));
  }
}

/// query and key alone: block selection has no value. Keys of 8 bits go with queries of 16.
void check_query_key(const std::string& op, const CallArguments& args) {
  const Tensor& query = *args.query;
  const Tensor& key = *args.key;
  const char* key_name = args.block_table ? "key_cache" : "key";
  check_tensor(op, Role::kQuery, "query", query);
  check_tensor(op, Role::kKeys, key_name, key);
  if (is_float8(key)) {
    check_same_device(op, key_name, key, query);
    if (dtype_code(query) == Dtype::kFloat32) {
      fail_expected(op, "query of dtype float16 or bfloat16 beside keys of float8_e4m3fn",
                    dtype_of(query));
    }
  } else {
    check_like_query(op, key_name, key, query);
  }
  const int64_t head_dim = query.size(3);
  check_head_dim(op, "query", head_dim);
  if ((key.size(0) != query.size(0) && !args.block_table) || key.size(3) != head_dim) {
    fail_expected(op,
                  text(key_name, " of shape (", query.size(0), ", heads, length, ", head_dim,
                       ") as query has it"),
                  shape_of(key));
  }
  int64_t heads_q = query.size(1), heads_kv = key.size(1);
  if (heads_kv == 0 ? heads_q != 0 : heads_q % heads_kv != 0) {
    const int64_t rows = query.size(2), keys = key.size(2);  // heads of tensors (B, S, H, D)
    const bool turned = heads_q > rows && keys > 0 && rows % keys == 0;
    fail_expected(op, text("query heads that are a multiple of the ", heads_kv, " key heads"),
                  text(heads_q, turned ? "; tensors (B, S, H, D) go in as .transpose(1, 2)" : ""));
  }
}

/// What to write for a mask as others have it: a row of keys or a matrix for each batch entry.
std::string advice_for_mask(const Tensor& mask, const int64_t target[4]) {
  const int64_t dims = mask.dim();
  const bool entries = dims == 2 || dims == 3 ? mask.size(0) == target[0] : false;
  if (!entries || mask.size(dims - 1) != target[3]) return "";
  if (dims == 2) return "; a mask (B, Skv) of keys goes in as mask[:, None, None, :]";
  if (mask.size(1) != 1 && mask.size(1) != target[2]) return "";
  return "; a mask (B, Sq, Skv) goes in as mask[:, None]";
}

MaskView check_mask(const std::string& op, const CallArguments& args) {
  MaskView view;
  if (!args.attn_mask) return view;
  const Tensor& mask = *args.attn_mask;
  const Tensor& query = *args.query;
  check_same_device(op, "attn_mask", mask, query);
  if (mask.scalar_type() == ScalarType::Bool) {
    view.kind = MaskKind::kBool;
  } else if (mask.scalar_type() == ScalarType::Float) {
    view.kind = MaskKind::kFloat32;
  } else if (mask.scalar_type() == query.scalar_type()) {
    view.kind = dtype_code(mask) == Dtype::kFloat16 ? MaskKind::kFloat16 : MaskKind::kBFloat16;
  } else {
    const bool whole = mask.scalar_type() == ScalarType::Long ||
                       mask.scalar_type() == ScalarType::Int ||
                       mask.scalar_type() == ScalarType::Byte;
    const bool single = dtype_code(query) == Dtype::kFloat32;
    fail_expected(op,
                  single ? "attn_mask of dtype bool or float32"
                         : text("attn_mask of dtype bool, float32 or query's ", dtype_of(query)),
                  text(dtype_of(mask), whole ? "; a mask of 0 and 1 goes in as mask.bool()" : ""));
  }
  const int64_t target[4] = {query.size(0), query.size(1), query.size(2), args.key->size(2)};
  int64_t* strides[4] = {&view.stride_b, &view.stride_h, &view.stride_q, &view.stride_k};
  bool fits = mask.dim() <= 4;
  for (int64_t d = 0; fits && d < mask.dim(); ++d) {
    int64_t axis = 4 - mask.dim() + d;
    fits = mask.size(d) == target[axis] || mask.size(d) == 1;
    if (fits && mask.size(d) != 1) *strides[axis] = mask.stride(d);
  }
  if (!fits) {
    fail_expected(op,
                  text("attn_mask that broadcasts to ",
                       shape_text({target[0], target[1], target[2], target[3]})),
                  shape_of(mask) + advice_for_mask(mask, target));
  }
  view.data = mask.const_data_ptr();
  return view;
}

BoundsView check_bounds(const std::string& op, const MaybeTensor& bounds, const Tensor& query) {
  BoundsView view;
  if (!bounds) return view;
  check_same_device(op, "key_bounds", *bounds, query);
  check_dtype(op, "key_bounds", *bounds, ScalarType::Int, "int32");
  bool per_head = bounds->dim() == 4 && bounds->size(1) != 1;
  check_shape(op, "key_bounds", *bounds,
              {query.size(0), per_head ? query.size(1) : 1, query.size(2), 2});
  view.data = static_cast<const int32_t*>(bounds->const_data_ptr());
  view.stride_b = bounds->stride(0);
  view.stride_h = per_head ? bounds->stride(1) : 0;
  view.stride_q = bounds->stride(2);
  view.stride_side = bounds->stride(3);
  return view;
}

/// (Hq,) or (B, Hq), of any dtype that sink_logits has.
AlibiView check_alibi(const std::string& op, const CallArguments& args, CheckedCall* call) {
  const Tensor& slopes = *args.alibi_slopes;
  const Tensor& query = *args.query;
  check_same_device(op, "alibi_slopes", slopes, query);
  if (!is_attention_dtype(slopes)) {
    fail_expected(op, "alibi_slopes of dtype float32, float16 or bfloat16", dtype_of(slopes));
  }
  if (!has_shape(slopes, {query.size(1)}) &&
      !has_shape(slopes, {call->params.problem.batch, query.size(1)})) {
    fail_expected(op,
                  text("alibi_slopes of shape ", shape_text({query.size(1)}), " or ",
                       shape_text({call->params.problem.batch, query.size(1)})),
                  shape_of(slopes));
  }
  call->alibi_slopes = torch::stable::contiguous(torch::stable::to(slopes, ScalarType::Float));
  const int64_t heads = query.size(1);
  return {static_cast<const float*>(call->alibi_slopes->const_data_ptr()),
          slopes.dim() == 2 ? heads : 0, 1};
}

float check_softcap(const std::string& op, double softcap) {
  float checked = static_cast<float>(softcap);
  if (softcap != 0 && !(std::isnormal(checked) && checked > 0)) {
    fail_expected(op, "softcap that is 0 or a positive, finite, normal float32", text(softcap));
  }
  return checked;
}

float check_scale(const std::string& op, const CallArguments& args) {
  const double scale =
      args.scale.value_or(1.0 / std::sqrt(static_cast<double>(args.query->size(3))));
  if (!std::isfinite(static_cast<float>(scale))) {
    fail_expected(op, "scale that is a finite float32", text(scale));
  }
  if (std::fabs(scale) > kMaxScale) {
    fail_expected(op, text("scale of at most ", kMaxScale, " in size"), text(scale));
  }
  return static_cast<float>(scale);
}

}  // namespace

std::string shape_of(const Tensor& tensor) {
  std::string result = "shape (";
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    result += (d ? ", " : "") + std::to_string(tensor.size(d));
  }
  return result + ")";
}

std::string dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::ComplexHalf:
      return "complex32";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    default:
      return torch::headeronly::toString(tensor.scalar_type());
  }
}

TensorView view_of(const Tensor& tensor) {
  return {const_cast<void*>(tensor.const_data_ptr()), tensor.stride(0), tensor.stride(1),
          tensor.stride(2)};
}

CheckedCall check_call(const std::string& op, PatternKind kind, const CallArguments& args) {
  const Tensor& query = *args.query;
  const Tensor& key = *args.key;
  const Tensor& value = *args.value;
  check_query_key(op, args);
  const char* name = args.block_table ? "value_cache" : "value";
  check_tensor(op, Role::kKeys, name, value);
  check_same_device(op, name, value, query);
  if (value.scalar_type() != key.scalar_type()) {
    const char* owner = args.block_table ? "key_cache's" : "key's";
    fail_expected(op, text(name, " of ", owner, " dtype ", dtype_of(key)), dtype_of(value));
  }
  check_shape(op, name, value, {key.size(0), key.size(1), key.size(2), value.size(3)});
  check_head_dim(op, name, value.size(3));

  CheckedCall call;
  AttentionParams& params = call.params;
  params.problem = problem_of(op, args);
  params.sequences = check_sequences(op, params.problem, args, &call.query_offsets);
  params.query = view_of(query);
  if (args.cu_seq_q) params.query.stride_b = 0;
  params.keys = check_keys(op, params.problem, args);
  Scores& scores = params.scores;
  scores.scale = check_scale(op, args);
  scores.bounds = check_bounds(op, args.key_bounds, query);
  scores.softcap = check_softcap(op, args.softcap);
  scores.mask = check_mask(op, args);
  if (args.sink_logits) {
    check_same_device(op, "sink_logits", *args.sink_logits, query);
    if (!is_attention_dtype(*args.sink_logits)) {
      fail_expected(op, "sink_logits of dtype float32, float16 or bfloat16",
                    dtype_of(*args.sink_logits));
    }
    check_shape(op, "sink_logits", *args.sink_logits, {query.size(1)});
    call.sink_logits =
        torch::stable::contiguous(torch::stable::to(*args.sink_logits, ScalarType::Float));
    scores.sink_logits = static_cast<const float*>(call.sink_logits->const_data_ptr());
  }
  if (args.alibi_slopes) scores.alibi = check_alibi(op, args, &call);
  fill_pattern(op, kind, args, &call);
  return call;
}

CheckedSelection check_selection(const std::string& op, const CallArguments& args) {
  check_query_key(op, args);
  CheckedSelection selection;
  SelectParams& params = selection.params;
  params.problem = problem_of(op, args);
  params.problem.value_dim = 0;  // no values are read
  params.sequences = check_sequences(op, params.problem, args, &selection.query_offsets);
  params.query = view_of(*args.query);
  params.keys = check_keys(op, params.problem, args);
  params.scores.scale = check_scale(op, args);
  params.scores.softcap = check_softcap(op, args.softcap);
  params.scores.bounds = check_bounds(op, args.key_bounds, *args.query);
  params.causal = args.is_causal;
  if (args.cu_seq_q) params.query.stride_b = 0;
  fill_selection(op, args, &selection);
  const std::string words = unlisted(features_of(params), kSelections);
  if (!words.empty()) fail_not_served(op, "block selection takes no " + words);
  return selection;
}

void check_outputs(const std::string& op, const CallArguments& args) {
  const Tensor& query = *args.query;
  const Tensor& out = *args.out;
  check_like_query(op, "out", out, query);
  check_shape(op, "out", out, {query.size(0), query.size(1), query.size(2), args.value->size(3)});
  check_last_contiguous(op, "out", out);
  check_no_overlap(op, "out", out, args);
  if (!args.lse) return;
  check_same_device(op, "lse", *args.lse, query);
  check_dtype(op, "lse", *args.lse, ScalarType::Float, "float32");
  check_shape(op, "lse", *args.lse, {query.size(0), query.size(1), query.size(2)});
  check_no_overlap(op, "lse", *args.lse, args);
}

}  // namespace sparse_attn
