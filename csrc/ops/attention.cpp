// The attention ops: read the stack, check, choose an engine, allocate, run. Each op has three
// forms: functional, into given outputs, and the question which engine would serve the call.
#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "../call_features.h"
#include "../choice.h"
#include "../cuda/hopper/key_split.h"
#include "../cuda/hopper/sections.h"
#include "allocate.h"
#include "checks.h"
#include "dispatch.h"
#include "schema.h"
#include "sequence_arguments.h"

namespace sparse_attn {
namespace {

using torch::stable::detail::from;

void check_engine_name(const Op& op, const CallArguments& args) {
  if (args.engine == "auto") return;
  if (op.is_naive()) {
    if (args.engine != "naive") fail_expected(op.name, "engine auto or naive", args.engine);
    return;
  }
  std::string names = "auto";
  for (const std::string& name : engine_names(args.query->is_cuda())) {
    if (name == args.engine) return;
    names += ", " + name;
  }
  const char* where = args.query->is_cuda() ? "CUDA" : "the CPU";
  fail_expected(op.name, text("engine to be one of ", names, " on ", where), args.engine);
}

/// What a call asks of an engine: one description for the call itself and for who asks about it.
Case case_of(const AttentionParams& params, const Tensor& query) {
  Case c;
  c.cuda = query.is_cuda();
  if (c.cuda) c.sm = backend().compute_capability(query.get_device_index());
  c.problem = params.problem;
  c.packed_keys = params.sequences.packed_keys;
  c.features = params.features;
  c.block_q = params.pattern.list.block_q;
  c.topk = params.pattern.topk;
  // What hopper would do with the call, by its own rules.
  c.may_split = cuda::hopper::may_split(params);
  const bool any = params.problem.batch > 0 && params.problem.heads_kv > 0;
  c.cut_small = any && cuda::hopper::is_cut_small(params);  // no keys have no sections
  return c;
}

std::string requested_engine(const Op& op, const CallArguments& args) {
  return op.is_naive() ? "naive" : args.engine;
}

/// The engine of a call whose features are known; raises where none serves it. A model's layers
/// call alike, so that the last answer is kept.
const Engine& pick_engine(const Op& op, const CallArguments& args, const AttentionParams& params) {
  struct Answer {
    Case asked;
    std::string requested;
    const Engine* engine = nullptr;
  };
  static thread_local Answer last;
  const Case asked = case_of(params, *args.query);
  const std::string requested = requested_engine(op, args);
  if (last.engine != nullptr && last.requested == requested && last.asked == asked) {
    return *last.engine;
  }
  const Choice choice = choose_engine(asked, requested);
  if (!choice.engine.empty()) {
    last = {asked, requested, &backend().engine(choice.engine)};
    return *last.engine;
  }
  std::string reasons;
  for (const std::string& reason : choice.reasons) {
    reasons += (reasons.empty() ? "" : "; ") + reason;
  }
  fail_not_served(op.name, reasons);
}

void set_outputs(const Tensor& out, const MaybeTensor& lse, AttentionParams* params) {
  params->outputs.out = view_of(out);
  if (params->sequences.packed()) params->outputs.out.stride_b = 0;
  if (!lse) return;
  params->outputs.lse = static_cast<float*>(lse->mutable_data_ptr());
  params->outputs.lse_stride_b = lse->stride(0);
  params->outputs.lse_stride_h = lse->stride(1);
  params->outputs.lse_stride_s = lse->stride(2);
  if (params->sequences.packed()) params->outputs.lse_stride_b = 0;
}

/// Whether these strides place the elements in one piece of memory, in any order of dimensions.
bool has_no_gaps(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  std::vector<std::pair<int64_t, int64_t>> axes;  // stride, size
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] != 1) axes.push_back({strides[d], sizes[d]});
  }
  std::sort(axes.begin(), axes.end());
  int64_t extent = 1;
  for (const auto& [stride, size] : axes) {
    if (stride != extent) return false;
    extent *= size;
  }
  return true;
}

/// An empty tensor of query's dtype and order of strides, with value's head dim.
Tensor empty_output(const Tensor& query, const Tensor& value) {
  const int64_t last = query.dim() - 1, columns = value.size(value.dim() - 1);
  std::vector<int64_t> sizes(query.sizes().begin(), query.sizes().end());
  std::vector<int64_t> strides(query.strides().begin(), query.strides().end());
  if (columns == query.size(last)) {
    if (query.is_contiguous() || has_no_gaps(sizes, strides)) {
      return empty_strided(query, query.scalar_type(), sizes, strides);
    }
    Tensor out = torch::stable::empty_like(query);
    if (out.stride(last) == 1) return out;  // not so where rows overlap, a step of 1 apart
  }
  sizes[last] = columns;
  std::vector<int64_t> order(last);  // dimensions, those of large strides first
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return query.stride(a) > query.stride(b); });
  strides[last] = 1;
  int64_t extent = std::max<int64_t>(columns, 1);
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    strides[*d] = extent;
    extent *= std::max<int64_t>(sizes[*d], 1);
  }
  return empty_strided(query, query.scalar_type(), sizes, strides);
}

/// Reads an op's arguments from the stack.
template <int kIndex, OpForm kForm>
CallArguments read_arguments(StableIValue* stack) {
  static const std::vector<const Argument*> kArguments = arguments_of(op_at(kIndex), kForm);
  CallArguments args;
  for (size_t i = 0; i < kArguments.size(); ++i) kArguments[i]->read(args, stack[i]);
  return args;
}

/// A checked call, and the selection that makes its list in block top-k.
struct PreparedCall {
  CheckedCall call;
  CheckedSelection selection;
};

PreparedCall prepare(const Op& op, const CallArguments& args) {
  PreparedCall prepared = {check_call(op.name, op.kind, args), {}};
  if (op.kind == PatternKind::kBlockTopK) {
    prepared.selection = check_selection(op.name, args);
    BlockList& list = prepared.call.params.pattern.list;
    list.block_q = prepared.selection.params.block_q;
    list.block_kv = prepared.selection.params.block_kv;
  }
  check_engine_name(op, args);
  return prepared;
}

/// The list of a call, as its selection wrote it.
BlockList list_of(const SelectParams& selection, const Tensor& counts, const Tensor& indices) {
  BlockList list;
  list.counts = static_cast<const int32_t*>(counts.const_data_ptr());
  list.indices = static_cast<const int32_t*>(indices.const_data_ptr());
  list.count_stride_b = counts.stride(0);
  list.count_stride_h = counts.stride(1);
  list.index_stride_b = indices.stride(0);
  list.index_stride_h = indices.stride(1);
  list.index_stride_q = indices.stride(2);
  list.block_q = selection.block_q;
  list.block_kv = selection.block_kv;
  list.num_q = selection.num_q;
  list.num_kv = selection.num_kv;
  list.max_count = selection.num_kv;
  list.heads_per_list = selection.heads_per_list();
  list.expected = selection.expected_blocks();
  return list;
}

/// Runs a prepared call into `out` and, when given, `lse`.
void run(const Op& op, const CallArguments& args, PreparedCall prepared, Tensor out,
         MaybeTensor lse) {
  AttentionParams& params = prepared.call.params;
  // Where only rows past the sequences are, or no sequence is, nothing is written.
  if (out.numel() == 0 || params.problem.seq_q == 0 || params.problem.batch == 0) return;
  const bool has_keys = params.problem.seq_kv > 0;
  if (!has_keys && !params.sequences.packed()) {
    torch::stable::zero_(out);
    if (lse) torch::stable::fill_(*lse, -std::numeric_limits<double>::infinity());
    return;
  }
  set_outputs(out, lse, &params);
  // Engines alone know which packed rows are of a sequence. Without keys all patterns are alike,
  // and of CUDA's engines naive takes such a call.
  const bool without_keys = !has_keys && args.query->is_cuda();
  if (without_keys) {
    params.pattern = {};
    params.global_tokens = nullptr;
    params.num_global_tokens = 0;
  }
  params.features = features_of(params);
  params.device = args.query->get_device_index();
  params.stream = backend().stream(params.device);
  const Engine& engine = without_keys ? backend().engine("naive") : pick_engine(op, args, params);

  std::tuple<MaybeTensor, MaybeTensor> chosen;  // the lists' memory
  if (op.kind == PatternKind::kBlockTopK && !without_keys) {
    const SelectParams& selection = prepared.selection.params;
    chosen = run_selection(op.name, selection, *args.query);
    params.pattern.list = list_of(selection, *std::get<0>(chosen), *std::get<1>(chosen));
  }
  Scratch scratch = allocate_scratch(engine.workspace_bytes(params), *args.query);
  params.workspace = scratch.address;
  check_status(op.name, engine.run(params));
}

template <int kIndex>
void functional(StableIValue* stack, uint64_t, uint64_t) {
  const Op& op = op_at(kIndex);
  CallArguments args = read_arguments<kIndex, OpForm::kFunctional>(stack);
  const Tensor query = *args.query;
  auto guard = backend().enter(query.get_device_index());
  view_sequences(op.name, op.holding, &args);
  PreparedCall prepared = prepare(op, args);
  const bool packed = prepared.call.params.sequences.packed();
  Tensor out = empty_output(query, *args.value);
  std::vector<int64_t> sizes = {0};
  if (args.return_lse && packed) sizes = {query.size(1), query.size(0)};
  if (args.return_lse && !packed) sizes = {query.size(0), query.size(1), query.size(2)};
  Tensor lse = empty(query, ScalarType::Float, sizes);
  MaybeTensor wanted_lse;
  if (args.return_lse) wanted_lse = view_of_output(packed, lse);
  run(op, args, std::move(prepared), view_of_output(packed, out), wanted_lse);
  stack[0] = from(out);
  stack[1] = from(lse);
}

template <int kIndex>
void with_outputs(StableIValue* stack, uint64_t, uint64_t) {
  const Op& op = op_at(kIndex);
  CallArguments args = read_arguments<kIndex, OpForm::kOut>(stack);
  auto guard = backend().enter(args.query->get_device_index());
  view_sequences(op.name, op.holding, &args);
  PreparedCall prepared = prepare(op, args);
  check_outputs(op.name, args);
  run(op, args, std::move(prepared), *args.out, args.lse);
}

/// Answers which engine would serve the call: its name, empty for none, then the reasons, a line
/// each.
template <int kIndex>
void engine_question(StableIValue* stack, uint64_t, uint64_t) {
  const Op& op = op_at(kIndex);
  CallArguments args = read_arguments<kIndex, OpForm::kEngine>(stack);
  auto guard = backend().enter(args.query->get_device_index());
  view_sequences(op.name, op.holding, &args);
  AttentionParams params = prepare(op, args).call.params;
  if (args.out) {
    check_outputs(op.name, args);
    set_outputs(*args.out, {}, &params);
  }
  params.features = features_of(params);
  const Choice choice = choose_engine(case_of(params, *args.query), requested_engine(op, args));
  std::string answer = choice.engine;
  for (const std::string& reason : choice.reasons) answer += "\n" + reason;
  stack[0] = from(answer);
}

template <int... kIndex>
BoxedKernel kernel_at(int index, OpForm form, std::integer_sequence<int, kIndex...>) {
  static constexpr BoxedKernel kFunctional[] = {functional<kIndex>...};
  static constexpr BoxedKernel kOut[] = {with_outputs<kIndex>...};
  static constexpr BoxedKernel kEngine[] = {engine_question<kIndex>...};
  return (form == OpForm::kFunctional ? kFunctional : form == OpForm::kOut ? kOut : kEngine)[index];
}

}  // namespace

BoxedKernel boxed_attention(int index, OpForm form) {
  return kernel_at(index, form, std::make_integer_sequence<int, kNumOps>());
}

}  // namespace sparse_attn
