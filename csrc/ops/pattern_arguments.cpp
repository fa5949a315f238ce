// From an op's pattern arguments to Pattern: one short function a kind.
#include "pattern_arguments.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "checks.h"

namespace sparse_attn {
namespace {

int32_t window_side(const std::string& op, const char* name, MaybeInt side) {
  if (!side) return kUnlimited;
  return check_at_least(op, name, *side, 0);
}

void fill_window(const std::string& op, const CallArguments& args, Pattern* pattern) {
  pattern->left = window_side(op, "window's left side", args.left);
  pattern->right = window_side(op, "window's right side", args.right);
  pattern->dilation = check_at_least(op, "dilation", args.dilation, 1);
}

/// int64 positions as int32, those beyond 32 bits as ones that name no key.
Tensor narrowed(const Tensor& positions) {
  auto limit = [&](double value) {
    Tensor one = torch::stable::new_empty(positions, {1}, ScalarType::Long);
    return torch::stable::fill_(one, value);
  };
  std::array<StableIValue, 3> stack = {
      torch::stable::detail::from(positions), torch::stable::detail::from(MaybeTensor(limit(-1))),
      torch::stable::detail::from(MaybeTensor(limit(std::numeric_limits<int32_t>::max())))};
  if (torch_call_dispatcher("aten::clamp", "Tensor", stack.data(), TORCH_ABI_VERSION) != 0) {
    throw std::runtime_error("sparse_attn: clamping global_tokens failed");
  }
  return torch::stable::to(torch::stable::detail::to<Tensor>(stack[0]), ScalarType::Int);
}

/// Sinks and the first global tokens are leading columns; scattered global tokens stay indices.
void fill_leading(const std::string& op, const CallArguments& args, CheckedCall* call) {
  AttentionParams& params = call->params;
  int32_t sinks = check_at_least(op, "sinks", args.sinks, 0);
  int32_t globals = check_at_least(op, "global_tokens", args.num_global, 0);
  params.pattern.lead = {0, 1, std::min(std::max(sinks, globals), params.seq_kv)};
  params.pattern.global_count = globals;
  if (!args.global_tokens) return;
  const Tensor& tokens = *args.global_tokens;
  if (globals > 0) fail_expected(op, "global_tokens as an int or as a tensor", "both");
  if (tokens.dim() != 1) fail_expected(op, "global_tokens of shape (tokens)", shape_of(tokens));
  if (tokens.scalar_type() != ScalarType::Int && tokens.scalar_type() != ScalarType::Long) {
    fail_expected(op, "global_tokens of dtype int32 or int64", dtype_of(tokens));
  }
  check_same_device(op, "global_tokens", tokens, *args.query);
  bool wide = tokens.scalar_type() == ScalarType::Long;
  call->global_tokens = torch::stable::contiguous(wide ? narrowed(tokens) : tokens);
  params.global_tokens = static_cast<const int32_t*>(call->global_tokens->const_data_ptr());
  params.num_global_tokens = static_cast<int32_t>(tokens.numel());
}

void fill_strided(const std::string& op, const CallArguments& args, AttentionParams* params) {
  if (!args.local) fail_expected(op, "local", "None");
  if (!args.stride) fail_expected(op, "stride", "None");
  int32_t local = check_at_least(op, "local", *args.local, 1);
  int32_t stride = check_at_least(op, "stride", *args.stride, 1);
  params->pattern.left = local - 1;
  params->pattern.right = 0;
  params->pattern.causal = true;
  params->pattern.lead = residue_class(stride - 1, stride, params->seq_kv);
}

int32_t check_block(const std::string& op, const char* name, int64_t block) {
  if (block < 16 || block % 16 != 0 || block >= kUnlimited) {
    fail_expected(op, text(name, " that is a multiple of 16"), std::to_string(block));
  }
  return static_cast<int32_t>(block);
}

/// The sizes that broadcast to `size`.
std::string one_or(int64_t size) { return size == 1 ? "1" : text("1 or ", size); }

void check_list_tensor(const std::string& op, const char* name, const MaybeTensor& tensor,
                       const Tensor& query, int64_t dims, int64_t num_q) {
  if (!tensor) fail_expected(op, name, "None");
  check_same_device(op, name, *tensor, query);
  check_dtype(op, name, *tensor, ScalarType::Int, "int32");
  const Tensor& t = *tensor;
  bool fits = t.dim() == dims && (t.size(0) == 1 || t.size(0) == query.size(0)) &&
              (t.size(1) == 1 || t.size(1) == query.size(1)) && t.size(2) == num_q;
  if (!fits) {
    fail_expected(op,
                  text(name, " of shape (", one_or(query.size(0)), ", ", one_or(query.size(1)),
                       ", ", num_q, dims == 4 ? ", max)" : ")"),
                  shape_of(t));
  }
  if (t.numel() > 0 && t.size(dims - 1) > 1 && t.stride(dims - 1) != 1) {
    fail_expected(op, text(name, " with a contiguous last dimension"),
                  text("stride ", t.stride(dims - 1)));
  }
}

void fill_list(const std::string& op, const CallArguments& args, AttentionParams* params) {
  BlockList& list = params->pattern.list;
  list.block_q = check_block(op, "block_q", args.block_q);
  list.block_kv = check_block(op, "block_kv", args.block_kv);
  list.num_q = ceil_div(params->seq_q, list.block_q);
  list.num_kv = ceil_div(params->seq_kv, list.block_kv);
  if (args.num_kv_blocks != list.num_kv) {
    fail_expected(op,
                  text("a layout of ", list.num_kv, " key blocks for ", params->seq_kv,
                       " keys in blocks of ", list.block_kv),
                  std::to_string(args.num_kv_blocks));
  }
  check_list_tensor(op, "counts", args.counts, *args.query, 3, list.num_q);
  check_list_tensor(op, "indices", args.indices, *args.query, 4, list.num_q);
  const Tensor& counts = *args.counts;
  const Tensor& indices = *args.indices;
  list.counts = static_cast<const int32_t*>(counts.const_data_ptr());
  list.count_stride_b = counts.size(0) == 1 ? 0 : counts.stride(0);
  list.count_stride_h = counts.size(1) == 1 ? 0 : counts.stride(1);
  list.indices = static_cast<const int32_t*>(indices.const_data_ptr());
  list.index_stride_b = indices.size(0) == 1 ? 0 : indices.stride(0);
  list.index_stride_h = indices.size(1) == 1 ? 0 : indices.stride(1);
  list.index_stride_q = indices.stride(2);
  list.max_count = static_cast<int32_t>(indices.size(3));
}

void fill_topk(const std::string& op, const CallArguments& args, Pattern* pattern) {
  if (!args.k) fail_expected(op, "k", "None");
  pattern->topk = check_at_least(op, "k", *args.k, 1);
}

/// `naive` takes the arguments of every kind, of one kind a call.
void check_one_kind(const std::string& op, const CallArguments& args) {
  bool lead = args.sinks > 0 || args.num_global > 0 || args.global_tokens;
  bool window = args.left || args.right || args.dilation != 1 || lead;
  bool strided = args.local || args.stride;
  bool list = args.counts || args.indices;
  if (window + strided + list + args.k.has_value() > 1) {
    fail_expected(op, "the arguments of one pattern", "those of several");
  }
  if (args.dilation > 1 && (args.num_global > 0 || args.global_tokens)) {
    fail_expected(op, "global_tokens without dilation", text("dilation ", args.dilation));
  }
}

}  // namespace

void fill_pattern(const std::string& op, PatternKind kind, const CallArguments& args,
                  CheckedCall* call) {
  AttentionParams& params = call->params;
  params.pattern.causal = args.is_causal;
  bool any = kind == PatternKind::kAny;
  if (any) check_one_kind(op, args);
  if (kind == PatternKind::kBand || kind == PatternKind::kDilated || any) {
    fill_window(op, args, &params.pattern);
    fill_leading(op, args, call);
  }
  if (kind == PatternKind::kStrided || (any && (args.local || args.stride))) {
    fill_strided(op, args, &params);
  }
  if (kind == PatternKind::kBlockSparse || (any && (args.counts || args.indices))) {
    fill_list(op, args, &params);
  }
  if (kind == PatternKind::kTopK || (any && args.k)) fill_topk(op, args, &params.pattern);
}

void fill_budget(const std::string& op, const CallArguments& args, SelectParams* params) {
  params->block = check_block(op, "block_size", args.block_size);
  params->num_q = ceil_div(params->seq_q, params->block);
  params->num_kv = ceil_div(params->seq_kv, params->block);
  params->sink_blocks = check_at_least(op, "sink_blocks", args.sink_blocks, 0);
  params->local_blocks = check_at_least(op, "local_blocks", args.local_blocks, 0);
  const std::string& selector = args.selector;
  if (selector != "mean" && selector != "antidiagonal" && selector != "minmax" &&
      selector != "vertical_slash") {
    fail_expected(op, "selector mean, antidiagonal, minmax or vertical_slash", selector);
  }
  if (args.group != "q" && args.group != "kv") {
    fail_expected(op, "group q or kv", args.group);
  }
  if (selector != "mean") fail_not_served(op, text("the selector ", selector));
  if (args.group != "q") fail_not_served(op, "one list for a group of heads, group=kv");
  if (args.mass) fail_not_served(op, "selection by mass");
  if (args.budget_count.has_value() == args.budget_share.has_value()) {
    fail_expected(op, "budget as a count or as a share", args.budget_count ? "both" : "neither");
  }
  if (args.budget_count) {
    params->budget_count = check_at_least(op, "budget", *args.budget_count, 1);
    return;
  }
  double share = *args.budget_share;
  if (!(share > 0 && share <= 1)) {
    fail_expected(op, "budget above 0 and up to 1", std::to_string(share));
  }
  params->budget_share = share;
}

}  // namespace sparse_attn
