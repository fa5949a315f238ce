// From an op's pattern arguments to Pattern: one short function a kind.
#include "pattern_arguments.h"

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>

#include "../capability.h"
#include "allocate.h"
#include "checks.h"
#include "sequence_contents.h"

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
    return torch::stable::fill_(empty(positions, ScalarType::Long, {1}), value);
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
  params.pattern.lead = {0, 1, std::max(sinks, globals)};
  params.pattern.global_count = globals;
  if (!args.global_tokens) return;
  const Tensor& tokens = *args.global_tokens;
  if (globals > 0) fail_expected(op, "global_tokens as an int or as a tensor", "both");
  if (tokens.dim() != 1) fail_expected(op, "global_tokens of shape (tokens)", shape_of(tokens));
  if (tokens.scalar_type() != ScalarType::Int && tokens.scalar_type() != ScalarType::Long) {
    fail_expected(op, "global_tokens of dtype int32 or int64", dtype_of(tokens));
  }
  if (tokens.numel() > kMaxLength) {
    fail_expected(op, text("global_tokens of up to ", kMaxLength, " positions"),
                  std::to_string(tokens.numel()));
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
  params->pattern.lead = {stride - 1, stride, kUnlimited};
}

/// Rows of a list's query blocks: of few queries each may have a list of its own.
int32_t check_list_rows(const std::string& op, int64_t block_q, int32_t seq_q) {
  if (block_q != 1) return check_block(op, "block_q", block_q);
  if (seq_q > kFewQueries) {
    fail_expected(op, text("block_q of 1 for up to ", kFewQueries, " queries"),
                  text(seq_q, " queries"));
  }
  return 1;
}

void check_list_tensor(const std::string& op, const char* name, const MaybeTensor& tensor,
                       const Tensor& query, const Problem& problem, int64_t dims, int64_t num_q) {
  if (!tensor) fail_expected(op, name, "None");
  check_same_device(op, name, *tensor, query);
  check_dtype(op, name, *tensor, ScalarType::Int, "int32");
  const Tensor& t = *tensor;
  bool fits = t.dim() == dims && (t.size(0) == 1 || t.size(0) == problem.batch) &&
              (t.size(1) == 1 || t.size(1) == problem.heads_kv || t.size(1) == problem.heads_q) &&
              t.size(2) == num_q;
  if (!fits) {
    fail_expected(op,
                  text(name, " of shape (", one_or(problem.batch), ", ",
                       heads_of_lists(problem.heads_q, problem.heads_kv), ", ", num_q,
                       dims == 4 ? ", max)" : ")"),
                  shape_of(t));
  }
  check_last_contiguous(op, name, t);
}

/// Whether elements of two tensors of one shape lie at the same offsets.
bool lie_alike(const Tensor& a, const Tensor& b) {
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

/// The bits of partial blocks, if there are some.
void fill_bits(const std::string& op, const CallArguments& args, CheckedCall* call) {
  if (!args.partial && !args.bits) return;
  if (!args.partial) fail_expected(op, "partial beside bits", "None");
  if (!args.bits) fail_expected(op, "bits beside partial", "None");
  const Tensor& indices = *args.indices;
  const Tensor& partial = *args.partial;
  const Tensor& bits = *args.bits;
  BlockList& list = call->params.pattern.list;
  check_same_device(op, "partial", partial, *args.query);
  check_dtype(op, "partial", partial, ScalarType::Int, "int32");
  check_shape(op, "partial", partial,
              {indices.size(0), indices.size(1), indices.size(2), indices.size(3)});
  check_same_device(op, "bits", bits, *args.query);
  check_dtype(op, "bits", bits, ScalarType::Int, "int32");
  const int64_t words = ceil_div(list.block_kv, 32);
  if (bits.dim() != 3 || bits.size(1) != list.block_q || bits.size(2) != words) {
    fail_expected(op, text("bits of shape (rows, ", list.block_q, ", ", words, ")"),
                  shape_of(bits));
  }
  call->indices = indices;
  call->partial = partial;
  call->bits = torch::stable::contiguous(bits);
  if (!lie_alike(indices, partial)) {
    call->indices = torch::stable::contiguous(indices);
    call->partial = torch::stable::contiguous(partial);
  }
  list.partial = static_cast<const int32_t*>(call->partial->const_data_ptr());
  list.bits = static_cast<const uint32_t*>(call->bits->const_data_ptr());
  list.num_bits = static_cast<int32_t>(std::min<int64_t>(bits.size(0), kMaxLength));
}

void fill_list(const std::string& op, const CallArguments& args, CheckedCall* call) {
  AttentionParams* params = &call->params;
  BlockList& list = params->pattern.list;
  list.block_q = check_list_rows(op, args.block_q, params->problem.seq_q);
  list.block_kv = check_block(op, "block_kv", args.block_kv);
  list.num_q = ceil_div(params->problem.seq_q, list.block_q);
  list.num_kv = ceil_div(params->problem.seq_kv, list.block_kv);
  if (!params->sequences.same_lengths()) {
    // Of sequences that differ in length, each sees what the layout has of its blocks: all of them,
    // where the host can tell.
    list.num_kv = imin(check_at_least(op, "num_kv_blocks", args.num_kv_blocks, 0), list.num_kv);
    if (args.counts && args.counts->dim() == 3) {
      list.num_q = static_cast<int32_t>(std::min<int64_t>(args.counts->size(2), kMaxLength));
    }
    check_blocks_on_host(op, params->problem, params->sequences, list, args);
  } else if (args.num_kv_blocks != list.num_kv) {
    std::string got = std::to_string(args.num_kv_blocks);
    if (args.num_kv_blocks == params->problem.seq_kv) {
      got += "; BlockLayout.from_token_mask takes a mask of tokens";
    }
    fail_expected(op,
                  text("a layout of ", list.num_kv, " key blocks for ", params->problem.seq_kv,
                       " keys in blocks of ", list.block_kv),
                  got);
  } else if (args.counts && args.counts->dim() == 3 && args.counts->size(2) != list.num_q) {
    fail_expected(op,
                  text("a layout of ", list.num_q, " query blocks for ", params->problem.seq_q,
                       " queries in blocks of ", list.block_q),
                  std::to_string(args.counts->size(2)));
  }
  check_list_tensor(op, "counts", args.counts, *args.query, params->problem, 3, list.num_q);
  check_list_tensor(op, "indices", args.indices, *args.query, params->problem, 4, list.num_q);
  fill_bits(op, args, call);
  const Tensor& counts = *args.counts;
  const Tensor& indices = call->indices ? *call->indices : *args.indices;
  if (counts.size(1) != indices.size(1) && counts.size(1) != 1 && indices.size(1) != 1) {
    fail_expected(op, text("indices of counts' ", counts.size(1), " heads"), shape_of(indices));
  }
  int64_t lists = std::max(counts.size(1), indices.size(1));
  if (list.block_q == 1 && lists > 1 && lists != params->problem.heads_kv) {
    fail_expected(op, text("a list a query for ", one_or(params->problem.heads_kv), " heads"),
                  std::to_string(lists));
  }
  if (lists > 0 && lists == params->problem.heads_kv) list.heads_per_list = params->problem.group();
  list.counts = static_cast<const int32_t*>(counts.const_data_ptr());
  list.count_stride_b = counts.size(0) == 1 ? 0 : counts.stride(0);
  list.count_stride_h = counts.size(1) == 1 ? 0 : counts.stride(1);
  list.indices = static_cast<const int32_t*>(indices.const_data_ptr());
  list.index_stride_b = indices.size(0) == 1 ? 0 : indices.stride(0);
  list.index_stride_h = indices.size(1) == 1 ? 0 : indices.stride(1);
  list.index_stride_q = indices.stride(2);
  // So that int32 numbers the keys of lists that name blocks many times.
  const int64_t most = kUnlimited / list.block_kv;
  list.max_count = static_cast<int32_t>(std::min(indices.size(3), most));
}

void fill_topk(const std::string& op, const CallArguments& args, Pattern* pattern) {
  if (!args.k) fail_expected(op, "k", "None");
  pattern->topk = check_at_least(op, "k", *args.k, 1);
}

bool has_list(const CallArguments& args) {
  return args.counts || args.indices || args.partial || args.bits;
}

/// `naive` takes the arguments of every kind, of one kind a call; top-k may rank the keys of a
/// list.
void check_one_kind(const std::string& op, const CallArguments& args) {
  bool lead = args.sinks > 0 || args.num_global > 0 || args.global_tokens;
  bool window = args.left || args.right || args.dilation != 1 || lead;
  bool strided = args.local || args.stride;
  bool ranked = has_list(args) || args.k;
  if (window + strided + ranked > 1) {
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
  const bool topk = kind == PatternKind::kTopK || (any && args.k);
  if (kind == PatternKind::kBlockSparse || ((any || topk) && has_list(args))) {
    fill_list(op, args, call);
  }
  if (topk) fill_topk(op, args, &params.pattern);
}

}  // namespace sparse_attn
