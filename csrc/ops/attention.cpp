// The attention ops: read the stack, check, choose an engine, allocate, run.
#include <array>
#include <limits>
#include <utility>

#include "checks.h"
#include "dispatch.h"
#include "schema.h"

namespace sparse_attn {
namespace {

using torch::stable::detail::from;

void check_engine_name(const Op& op, const CallArguments& args, const Case& c) {
  if (args.engine == "auto") return;
  if (op.kind == PatternKind::kAny) {
    if (args.engine != "naive") fail_expected(op.name, "engine auto or naive", args.engine);
    return;
  }
  std::string names = "auto";
  for (const std::string& name : engine_names(c.cuda)) {
    if (name == args.engine) return;
    names += ", " + name;
  }
  fail_expected(op.name, text("engine to be one of ", names), args.engine);
}

const Engine& pick_engine(const Op& op, const CallArguments& args, const Case& c) {
  Choice choice = choose_engine(c, op.kind == PatternKind::kAny ? "naive" : args.engine);
  if (choice.engine.empty()) {
    std::string reasons;
    for (const std::string& reason : choice.reasons) {
      reasons += (reasons.empty() ? "" : "; ") + reason;
    }
    fail_not_served(op.name, reasons);
  }
  return backend().engine(choice.engine);
}

void set_outputs(const Tensor& out, const MaybeTensor& lse, AttentionParams* params) {
  params->out = view_of(out);
  if (!lse) return;
  params->lse = static_cast<float*>(lse->mutable_data_ptr());
  params->lse_stride_b = lse->stride(0);
  params->lse_stride_h = lse->stride(1);
  params->lse_stride_s = lse->stride(2);
}

/// Runs a checked call into `out` and, when given, `lse`.
void run(const Op& op, const CallArguments& args, CheckedCall call, Tensor out, MaybeTensor lse) {
  AttentionParams& params = call.params;
  if (out.numel() == 0) return;
  if (params.seq_kv == 0) {
    torch::stable::zero_(out);
    if (lse) torch::stable::fill_(*lse, -std::numeric_limits<double>::infinity());
    return;
  }
  set_outputs(out, lse, &params);
  params.device = args.query->get_device_index();
  params.stream = backend().stream(params.device);

  std::tuple<MaybeTensor, MaybeTensor> list;
  if (op.kind == PatternKind::kBlockTopK) {
    CheckedSelection checked = check_selection(op.name, args);
    const SelectParams& selection = checked.params;
    BlockList& blocks = params.pattern.list;
    list = run_selection(op.name, selection, *args.query);
    const Tensor& counts = *std::get<0>(list);
    const Tensor& indices = *std::get<1>(list);
    blocks = {static_cast<const int32_t*>(counts.const_data_ptr()),
              static_cast<const int32_t*>(indices.const_data_ptr()),
              counts.stride(0),
              counts.stride(1),
              indices.stride(0),
              indices.stride(1),
              indices.stride(2),
              selection.block_q,
              selection.block_kv,
              selection.num_q,
              selection.num_kv,
              selection.num_kv,
              selection.heads_per_list()};
    call.engine_case.block_q = selection.block_q;
    call.engine_case.block_kv = selection.block_kv;
  }
  const Engine& engine = pick_engine(op, args, call.engine_case);
  Scratch scratch = allocate_scratch(engine.workspace_bytes(params), *args.query);
  params.workspace = scratch.address;
  check_status(op.name, engine.run(params));
}

template <int kIndex, bool kOutputs>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  static const std::vector<const Argument*> kArguments = arguments_of(op_at(kIndex), kOutputs);
  const Op& op = op_at(kIndex);
  CallArguments args;
  for (size_t i = 0; i < kArguments.size(); ++i) kArguments[i]->read(args, stack[i]);
  const Tensor& query = *args.query;
  auto guard = backend().enter(query.get_device_index());

  CheckedCall call = check_call(op.name, op.kind, args);
  if (op.kind == PatternKind::kBlockTopK) check_selection(op.name, args);
  if (call.engine_case.cuda) {
    call.engine_case.sm = backend().compute_capability(query.get_device_index());
  }
  check_engine_name(op, args, call.engine_case);
  if (kOutputs) {
    check_outputs(op.name, args);
    run(op, args, std::move(call), *args.out, args.lse);
    return;
  }
  Tensor out = torch::stable::empty_like(query);
  std::vector<int64_t> sizes = {0};
  if (args.return_lse) sizes = {query.size(0), query.size(1), query.size(2)};
  Tensor lse = torch::stable::new_empty(query, sizes, ScalarType::Float);
  run(op, args, std::move(call), out, args.return_lse ? MaybeTensor(lse) : MaybeTensor());
  stack[0] = from(out);
  stack[1] = from(lse);
}

template <bool kOutputs, int... kIndex>
constexpr std::array<BoxedKernel, kNumOps> kernels(std::integer_sequence<int, kIndex...>) {
  return {boxed<kIndex, kOutputs>...};
}

}  // namespace

BoxedKernel attention_kernel(int index, bool outputs) {
  constexpr auto kSequence = std::make_integer_sequence<int, kNumOps>();
  static constexpr auto kFunctional = kernels<false>(kSequence);
  static constexpr auto kOut = kernels<true>(kSequence);
  return (outputs ? kOut : kFunctional)[index];
}

}  // namespace sparse_attn
