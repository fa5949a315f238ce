// From an op's pattern arguments to Pattern: one short function a kind.
#include "pattern_arguments.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "allocate.h"
#include "checks.h"
#include "sketch_arguments.h"

namespace sparse_attn {
namespace {

constexpr int32_t kRowsOfGroup = 8;  // of the mixed selector, where `groups` is not given

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

int32_t check_block(const std::string& op, const char* name, int64_t block) {
  if (block < 16 || block % 16 != 0 || block >= kUnlimited) {
    fail_expected(op, text(name, " that is a multiple of 16"), std::to_string(block));
  }
  return static_cast<int32_t>(block);
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

/// The sizes that broadcast to `size`.
std::string one_or(int64_t size) { return size == 1 ? "1" : text("1 or ", size); }

/// The numbers of lists that a batch entry may have.
std::string heads_of_lists(int64_t heads_q, int64_t heads_kv) {
  if (heads_kv == 1 || heads_kv == heads_q) return one_or(heads_q);
  return text("1, ", heads_kv, " or ", heads_q);
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
    // Of sequences that differ in length, each sees what the layout has of its blocks.
    list.num_kv = imin(check_at_least(op, "num_kv_blocks", args.num_kv_blocks, 0), list.num_kv);
    if (args.counts && args.counts->dim() == 3) {
      list.num_q = static_cast<int32_t>(std::min<int64_t>(args.counts->size(2), kMaxLength));
    }
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
  list.max_count = static_cast<int32_t>(indices.size(3));
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

/// Blocks, and the settings of selectors that cut blocks.
void fill_blocks(const std::string& op, const CallArguments& args, SelectParams* params) {
  params->block_kv = check_block(op, "block_size", args.block_size);
  params->block_q = check_block(op, "block_size", args.block_rows.value_or(args.block_size));
  params->num_q = ceil_div(params->problem.seq_q, params->block_q);
  params->num_kv = ceil_div(params->problem.seq_kv, params->block_kv);
  params->sink_blocks = check_at_least(op, "sink_blocks", args.sink_blocks, 0);
  params->local_blocks = check_at_least(op, "local_blocks", args.local_blocks, 0);
  auto check_divides = [&](const char* name, int32_t number, int32_t block) {
    if (block % number != 0) {
      fail_expected(op, text(name, " that divides blocks of ", block), std::to_string(number));
    }
  };
  if (params->selector == Selector::kMixed) {
    int64_t groups =
        args.groups.value_or(std::gcd(params->block_q, params->block_kv) / kRowsOfGroup);
    params->groups = check_at_least(op, "groups", groups, 1);
    params->row_step = check_at_least(op, "row_step", args.row_step, 1);
    check_divides("groups", params->groups, params->block_q);
    check_divides("groups", params->groups, params->block_kv);
  }
  if (params->selector == Selector::kAntidiagonal) {
    int64_t stride = args.stride.value_or(8);
    if (stride != 8 && stride != 16) fail_expected(op, "stride of 8 or 16", std::to_string(stride));
    params->stride = static_cast<int32_t>(stride);
  }
}

Selector check_selector(const std::string& op, const std::string& name) {
  const std::pair<const char*, Selector> kSelectors[] = {
      {"mixed", Selector::kMixed},
      {"mean", Selector::kMean},
      {"antidiagonal", Selector::kAntidiagonal},
      {"minmax", Selector::kMinMax},
      {"vertical_slash", Selector::kVerticalSlash},
      {"sketch", Selector::kSketch}};
  for (const auto& [known, selector] : kSelectors) {
    if (name == known) return selector;
  }
  fail_expected(op, "selector mixed, mean, antidiagonal, minmax, vertical_slash or sketch", name);
}

/// The caller's scores of key blocks, as float32.
void fill_scores(const std::string& op, const CallArguments& args, CheckedSelection* selection) {
  SelectParams& params = selection->params;
  const Tensor& scores = *args.scores;
  check_same_device(op, "scores", scores, *args.query);
  if (!is_attention_dtype(scores)) {
    fail_expected(op, "scores of dtype float32, float16 or bfloat16", dtype_of(scores));
  }
  auto is_one_of = [&](int64_t d, std::initializer_list<int64_t> sizes) {
    return std::find(sizes.begin(), sizes.end(), scores.size(d)) != sizes.end();
  };
  bool fits = scores.dim() == 4 && is_one_of(0, {1, params.problem.batch}) &&
              is_one_of(1, {1, params.problem.heads_kv, params.problem.heads_q}) &&
              is_one_of(2, {params.num_q}) && is_one_of(3, {params.num_kv});
  if (!fits) {
    fail_expected(op,
                  text("scores of shape (", one_or(params.problem.batch), ", ",
                       heads_of_lists(args.query->size(1), args.key->size(1)), ", ", params.num_q,
                       ", ", params.num_kv, ")"),
                  shape_of(scores));
  }
  selection->scores = torch::stable::to(scores, ScalarType::Float);
  const Tensor& copy = *selection->scores;
  params.given.data = static_cast<const float*>(copy.const_data_ptr());
  params.given.stride_b = copy.size(0) == 1 ? 0 : copy.stride(0);
  params.given.stride_h = copy.size(1) == 1 ? 0 : copy.stride(1);
  params.given.stride_q = copy.stride(2);
  params.given.stride_kv = copy.stride(3);
  if (params.problem.heads_kv > 0 && copy.size(1) == params.problem.heads_kv)
    params.given.heads_per_score = params.problem.group();
}

/// The caller's sketch, or what one made for the call is like.
void fill_sketch(const std::string& op, const CallArguments& args, SelectParams* params) {
  const bool given = args.sketch_codes || args.sketch_ranges || args.sketch_lengths;
  if (params->selector != Selector::kSketch) {
    if (given) fail_expected(op, "selector sketch with a sketch", args.selector);
    return;
  }
  if (params->problem.seq_q > kSketchQueries) {
    fail_expected(op, text("up to ", kSketchQueries, " queries with selector sketch"),
                  std::to_string(params->problem.seq_q));
  }
  if (args.cu_seq_q) fail_not_served(op, "selector sketch with packed queries");
  params->sketch.heads = params->problem.heads_kv;
  params->sketch.head_dim = params->problem.head_dim;
  if (!given) return;
  if (!args.sketch_codes) fail_expected(op, "sketch_codes", "None");
  if (!args.sketch_ranges) fail_expected(op, "sketch_ranges", "None");
  const Tensor& key = *args.key;
  SketchShape shape = {params->problem.batch, params->problem.heads_kv, params->problem.head_dim};
  if (args.block_table.has_value() == args.sketch_lengths.has_value()) {
    const char* paged = "a paged sketch";
    const char* plain = "a sketch that is not paged";
    fail_expected(op, args.block_table ? paged : plain, args.block_table ? plain : paged);
  }
  if (args.block_table) {
    shape.entries = key.size(0);
    shape.page_size = key.size(2);
  }
  params->sketch = check_sketch(op, shape, *args.sketch_codes, *args.sketch_ranges, key, "key");
  if (args.sketch_lengths) {
    params->sketch.lengths =
        check_sketch_lengths(op, params->problem.batch, *args.sketch_lengths, key, "key");
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

void fill_selection(const std::string& op, const CallArguments& args, CheckedSelection* selection) {
  SelectParams& params = selection->params;
  params.selector = args.scores ? Selector::kScores : check_selector(op, args.selector);
  fill_blocks(op, args, &params);
  if (args.group != "q" && args.group != "kv") {
    fail_expected(op, "group q or kv", args.group);
  }
  params.by_group = args.group == "kv";
  if (args.scores) fill_scores(op, args, selection);
  fill_sketch(op, args, &params);

  auto check_share = [&](const char* name, double share) {
    if (!(share > 0 && share <= 1)) {
      fail_expected(op, text(name, " above 0 and up to 1"), std::to_string(share));
    }
    return share;
  };
  if (args.mass) params.mass = check_share("mass", *args.mass);
  if (args.budget_count && args.budget_share) {
    fail_expected(op, "budget_blocks or budget_share", "both");
  }
  if (!args.mass && !args.budget_count && !args.budget_share) {
    fail_expected(op, "mass, budget_blocks or budget_share", "none");
  }
  if (args.budget_count) {
    params.budget_count = check_at_least(op, "budget_blocks", *args.budget_count, 1);
  }
  if (args.budget_share) params.budget_share = check_share("budget_share", *args.budget_share);
}

}  // namespace sparse_attn
