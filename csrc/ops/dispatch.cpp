// What all ops share beside their checks: scratch, the status of an engine, registration.
#include "dispatch.h"

#include "allocate.h"
#include "error.h"

namespace sparse_attn {
namespace {

constexpr int64_t kScratchAlignment = 256;

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

void register_kernels(torch::stable::detail::StableLibrary& library) {
  for (int index = 0; index < kNumOps; ++index) {
    for (OpForm form : kOpForms) {
      library.impl(name_of(op_at(index), form).c_str(), boxed_attention(index, form));
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
