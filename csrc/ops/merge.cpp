// merge_states: two outputs and their lse, of the same rows over different keys, as one.
#include "allocate.h"
#include "checks.h"
#include "dispatch.h"
#include "overlap.h"

namespace sparse_attn {
namespace {

void check_states(const std::string& op, const Tensor& out_a, const Tensor& lse_a,
                  const Tensor& out_b, const Tensor& lse_b) {
  if (out_a.dim() != 4) {
    fail_expected(op, "out_a of shape (batch, heads, length, head_dim)", shape_of(out_a));
  }
  if (out_a.size(3) > kMaxLength) {
    fail_expected(op, text("out_a of head_dim up to ", kMaxLength), std::to_string(out_a.size(3)));
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

}  // namespace sparse_attn
