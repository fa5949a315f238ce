// Lists of blocks as ops: select_blocks by the data, list_from_mask by a mask of blocks.
#include "allocate.h"
#include "checks.h"
#include "dispatch.h"
#include "schema.h"
#include "sequence_arguments.h"

namespace sparse_attn {
namespace {

/// How the tensors of a selection hold its sequences, as the arguments that are there say.
Holding holding_of(const std::string& op, const CallArguments& args) {
  const bool packed_keys = args.cu_seq_k.has_value(), paged = args.block_table.has_value();
  if (packed_keys && paged) fail_expected(op, "cu_seq_k or block_table", "both");
  if (paged != args.seqused_k.has_value() && !packed_keys) {
    fail_expected(op, "block_table and seqused_k together", paged ? "block_table" : "seqused_k");
  }
  if (packed_keys && !args.cu_seq_q) fail_expected(op, "cu_seq_q beside cu_seq_k", "None");
  if (args.cu_seq_q && !packed_keys && !paged) {
    fail_expected(op, "cu_seq_k or block_table beside cu_seq_q", "neither");
  }
  if (args.max_q && !args.cu_seq_q) {
    fail_expected(op, "max_q with packed queries only", "queries of one length");
  }
  if (args.max_k && !packed_keys) {
    fail_expected(op, "max_k with packed keys only", paged ? "pages" : "keys of one length");
  }
  return packed_keys ? Holding::kPacked : paged ? Holding::kPages : Holding::kTensors;
}

}  // namespace

std::tuple<Tensor, Tensor> run_selection(const std::string& op, SelectParams params,
                                         const Tensor& query) {
  int64_t lists = params.problem.heads_kv == 0 ? 0 : params.lists();
  Tensor counts = empty_int32({params.problem.batch, lists, params.num_q}, query);
  Tensor indices = empty_int32({params.problem.batch, lists, params.num_q, params.num_kv}, query);
  if (counts.numel() == 0) return {counts, indices};
  if (params.num_kv == 0) {
    torch::stable::zero_(counts);
    return {counts, indices};
  }
  const Tools& tools = backend().tools();
  Scratch scratch = allocate_scratch(tools.select_workspace_bytes(params), query);
  params.workspace = scratch.address;
  params.device = query.get_device_index();
  params.stream = backend().stream(params.device);
  params.counts = static_cast<int32_t*>(counts.mutable_data_ptr());
  params.indices = static_cast<int32_t*>(indices.mutable_data_ptr());
  check_status(op, tools.select_blocks(params));
  return {counts, indices};
}

void select_blocks_kernel(StableIValue* stack, uint64_t, uint64_t) {
  static const std::vector<const Argument*> kArguments = selection_arguments();
  CallArguments args;
  for (size_t i = 0; i < kArguments.size(); ++i) kArguments[i]->read(args, stack[i]);
  auto guard = backend().enter(args.query->get_device_index());
  view_sequences("select_blocks", holding_of("select_blocks", args), &args);
  CheckedSelection selection = check_selection("select_blocks", args);
  auto [counts, indices] = run_selection("select_blocks", selection.params, *args.query);
  stack[0] = torch::stable::detail::from(counts);
  stack[1] = torch::stable::detail::from(indices);
}

std::tuple<Tensor, Tensor> list_from_mask(const Tensor& mask) {
  const std::string op = "list_from_mask";
  check_dtype(op, "mask", mask, ScalarType::Bool, "bool");
  if (mask.dim() < 1) {
    fail_expected(op, "mask of shape (..., key blocks)", shape_of(mask));
  }
  if (mask.size(mask.dim() - 1) > kMaxLength) {
    fail_expected(op, text("mask of up to ", kMaxLength, " key blocks"), shape_of(mask));
  }
  auto guard = backend().enter(mask.get_device_index());
  Tensor rows = torch::stable::contiguous(mask);
  std::vector<int64_t> sizes(mask.sizes().begin(), mask.sizes().end());
  Tensor indices = empty(mask, ScalarType::Int, sizes);
  sizes.pop_back();
  Tensor counts = empty(mask, ScalarType::Int, sizes);
  if (counts.numel() == 0) return {counts, indices};
  ListParams params;
  params.mask = static_cast<const uint8_t*>(rows.const_data_ptr());
  params.rows = counts.numel();
  params.num_kv = static_cast<int32_t>(mask.size(mask.dim() - 1));
  params.counts = static_cast<int32_t*>(counts.mutable_data_ptr());
  params.indices = static_cast<int32_t*>(indices.mutable_data_ptr());
  params.device = mask.get_device_index();
  params.stream = backend().stream(params.device);
  check_status(op, backend().tools().list_from_mask(params));
  return {counts, indices};
}

}  // namespace sparse_attn
