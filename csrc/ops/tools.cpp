// Block selection, list building and merging as ops; scratch and registration for all.
#include "allocate.h"
#include "checks.h"
#include "dispatch.h"
#include "overlap.h"
#include "schema.h"
#include "sequence_arguments.h"

namespace sparse_attn {
namespace {

constexpr int64_t kScratchAlignment = 256;

void check_states(const std::string& op, const Tensor& out_a, const Tensor& lse_a,
                  const Tensor& out_b, const Tensor& lse_b) {
  if (out_a.dim() != 4) {
    fail_expected(op, "out_a of shape (batch, heads, length, head_dim)", shape_of(out_a));
  }
  if (!is_attention_dtype(out_a)) {
    fail_expected(op, "out_a of dtype float32, float16 or bfloat16", dtype_of(out_a));
  }
  check_shape(op, "out_b", out_b, {out_a.size(0), out_a.size(1), out_a.size(2), out_a.size(3)});
  if (out_b.scalar_type() != out_a.scalar_type()) {
    fail_expected(op, text("out_b of out_a's dtype ", dtype_of(out_a)), dtype_of(out_b));
  }
  check_same_device(op, "out_b", out_b, out_a, "out_a");
  for (const auto& lse : {std::make_pair("lse_a", &lse_a), std::make_pair("lse_b", &lse_b)}) {
    check_shape(op, lse.first, *lse.second, {out_a.size(0), out_a.size(1), out_a.size(2)});
    check_dtype(op, lse.first, *lse.second, ScalarType::Float, "float32");
    check_same_device(op, lse.first, *lse.second, out_a, "out_a");
  }
}

void check_merged(const std::string& op, const Tensor& out_a, const Tensor& out, const Tensor& lse,
                  const std::vector<NamedTensor>& states) {
  check_shape(op, "out", out, {out_a.size(0), out_a.size(1), out_a.size(2), out_a.size(3)});
  if (out.scalar_type() != out_a.scalar_type()) {
    fail_expected(op, text("out of out_a's dtype ", dtype_of(out_a)), dtype_of(out));
  }
  check_shape(op, "lse", lse, {out_a.size(0), out_a.size(1), out_a.size(2)});
  check_dtype(op, "lse", lse, ScalarType::Float, "float32");
  for (const auto& [name, tensor] : {NamedTensor("out", &out), NamedTensor("lse", &lse)}) {
    check_same_device(op, name, *tensor, out_a, "out_a");
    check_no_overlap(op, name, *tensor, states);
  }
  check_no_overlap(op, "out", out, {{"lse", &lse}});
}

std::tuple<Tensor, Tensor> merge_checked(const std::string& op, const Tensor& out_a,
                                         const Tensor& lse_a, const Tensor& out_b,
                                         const Tensor& lse_b) {
  auto guard = backend().enter(out_a.get_device_index());
  Tensor rows[4] = {torch::stable::contiguous(out_a), torch::stable::contiguous(out_b),
                    torch::stable::contiguous(lse_a), torch::stable::contiguous(lse_b)};
  Tensor out = torch::stable::empty_like(rows[0]);
  Tensor lse = torch::stable::empty_like(rows[2]);
  if (lse.numel() == 0) return {out, lse};
  MergeParams params;
  params.out_a = rows[0].const_data_ptr();
  params.out_b = rows[1].const_data_ptr();
  params.lse_a = static_cast<const float*>(rows[2].const_data_ptr());
  params.lse_b = static_cast<const float*>(rows[3].const_data_ptr());
  params.out = out.mutable_data_ptr();
  params.lse = static_cast<float*>(lse.mutable_data_ptr());
  params.rows = lse.numel();
  params.head_dim = static_cast<int32_t>(out.size(3));
  params.dtype = dtype_code(out);
  params.device = out.get_device_index();
  params.stream = backend().stream(params.device);
  check_status(op, backend().tools().merge_states(params));
  return {out, lse};
}

}  // namespace

Scratch allocate_scratch(int64_t bytes, const Tensor& like) {
  Scratch scratch;
  if (bytes <= 0) return scratch;
  scratch.owner = empty(like, ScalarType::Byte, {bytes + kScratchAlignment});
  auto address = reinterpret_cast<uintptr_t>(scratch.owner->mutable_data_ptr());
  address = (address + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
  scratch.address = reinterpret_cast<void*>(address);
  return scratch;
}

Tensor empty_int32(std::initializer_list<int64_t> sizes, const Tensor& like) {
  return empty(like, ScalarType::Int, sizes);
}

void check_status(const std::string& op, const Status& status) {
  if (status.ok()) return;
  throw std::runtime_error(text("sparse_attn::", op, ": the engine failed: ", status.message,
                                " (code ", status.code, ")"));
}

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
  for (const auto& [name, bound, there] :
       {std::tuple("max_q", args.max_q, args.cu_seq_q.has_value()),
        std::tuple("max_k", args.max_k, packed_keys)}) {
    if (bound && !there) fail_expected(op, text(name, " with packed sequences alone"), "others");
  }
  return packed_keys ? Holding::kPacked : paged ? Holding::kPages : Holding::kTensors;
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

std::tuple<Tensor, Tensor> merge_states(const Tensor& out_a, const Tensor& lse_a,
                                        const Tensor& out_b, const Tensor& lse_b) {
  check_states("merge_states", out_a, lse_a, out_b, lse_b);
  return merge_checked("merge_states", out_a, lse_a, out_b, lse_b);
}

void merge_states_out(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                      const Tensor& lse_b, Tensor out, Tensor lse) {
  const std::string op = "merge_states";
  check_states(op, out_a, lse_a, out_b, lse_b);
  check_merged(op, out_a, out, lse,
               {{"out_a", &out_a}, {"lse_a", &lse_a}, {"out_b", &out_b}, {"lse_b", &lse_b}});
  auto [merged, merged_lse] = merge_checked(op, out_a, lse_a, out_b, lse_b);
  torch::stable::copy_(out, merged);
  torch::stable::copy_(lse, merged_lse);
}

void register_kernels(torch::stable::detail::StableLibrary& library) {
  for (int index = 0; index < kNumOps; ++index) {
    for (OpForm form : kOpForms) {
      library.impl(name_of(op_at(index), form).c_str(), attention_kernel(index, form));
    }
  }
  library.impl("select_blocks", select_blocks_kernel);
  library.impl("list_from_mask", TORCH_BOX(&list_from_mask));
  library.impl("merge_states", TORCH_BOX(&merge_states));
  library.impl("merge_states_out", TORCH_BOX(&merge_states_out));
  library.impl("append_to_cache", TORCH_BOX(&append_to_cache));
  library.impl("append_to_sketch", TORCH_BOX(&append_to_sketch));
  library.impl("sketch_pages", TORCH_BOX(&sketch_pages));
}

}  // namespace sparse_attn
