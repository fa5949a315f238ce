// From the arguments of a block selection to SelectParams.
#include "selection_arguments.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "checks.h"
#include "sketch_arguments.h"

namespace sparse_attn {
namespace {

constexpr int32_t kRowsOfGroup = 8;  // of the mixed selector, where `groups` is not given

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

/// The caller's scores of key blocks, as float32: of as many blocks as there can be, or as a larger
/// max_q or max_k would let there be.
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
  auto bounded = [](const MaybeInt& bound, int32_t block, int32_t blocks) {
    if (!bound) return int64_t{blocks};
    return std::max(ceil_div64(std::min<int64_t>(*bound, kMaxLength), block), int64_t{blocks});
  };
  const int64_t num_q = bounded(args.max_q, params.block_q, params.num_q);
  const int64_t num_kv = bounded(args.max_k, params.block_kv, params.num_kv);
  bool fits = scores.dim() == 4 && is_one_of(0, {1, params.problem.batch}) &&
              is_one_of(1, {1, params.problem.heads_kv, params.problem.heads_q}) &&
              is_one_of(2, {params.num_q, num_q}) && is_one_of(3, {params.num_kv, num_kv});
  if (!fits) {
    fail_expected(op,
                  text("scores of shape (", one_or(params.problem.batch), ", ",
                       heads_of_lists(args.query->size(1), args.key->size(1)), ", ", num_q, ", ",
                       num_kv, ")"),
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
  const bool by_codes = params->selector == Selector::kSketch;
  const bool by_ranges = params->selector == Selector::kMinMax;
  if (given && !by_codes && !by_ranges && params->selector != Selector::kMean) {
    fail_expected(op, "selector sketch, minmax or mean with a sketch", args.selector);
  }
  if (by_codes && params->problem.seq_q > kSketchQueries) {
    fail_expected(op, text("up to ", kSketchQueries, " queries with selector sketch"),
                  std::to_string(params->problem.seq_q));
  }
  params->sketch.heads = params->problem.heads_kv;
  params->sketch.head_dim = params->problem.head_dim;
  if (!given) return;
  if (args.cu_seq_k) fail_not_served(op, "a kept sketch with packed keys");
  if (!args.sketch_codes) fail_expected(op, "sketch_codes", "None");
  if (!args.sketch_ranges) fail_expected(op, "sketch_ranges", "None");
  const Tensor& key = *args.key;
  SketchShape shape = {params->problem.batch, params->problem.heads_kv, params->problem.head_dim};
  if (!args.sketch_lengths) fail_expected(op, "sketch_lengths", "None");
  if (args.block_table.has_value() != (args.sketch_lengths->dim() == 2)) {
    const char* paged = "a paged sketch";
    const char* plain = "a sketch that is not paged";
    fail_expected(op, args.block_table ? paged : plain, args.block_table ? plain : paged);
  }
  if (args.block_table) {
    shape.entries = key.size(0);
    shape.page_size = key.size(2);
  }
  params->sketch = check_sketch(op, shape, *args.sketch_codes, *args.sketch_ranges, key, "key");
  if (dtype_code(*args.sketch_ranges) != params->problem.dtype) {  // beside keys of 8 bits
    fail_expected(op, text("a sketch of query's dtype ", dtype_of(*args.query)),
                  dtype_of(*args.sketch_ranges));
  }
  params->sketch.lengths =
      check_sketch_lengths(op, params->sketch, shape.entries, *args.sketch_lengths, key, "key");
  if (by_ranges && params->block_kv % params->sketch.group != 0) {
    fail_expected(op,
                  text("a block_size of keys that is a multiple of ", params->sketch.group,
                       ", the tokens of a group of the sketch"),
                  std::to_string(params->block_kv));
  }
}

}  // namespace

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
