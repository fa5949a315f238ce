// Schemas of all ops, and their CPU kernels.
#include "../cpu/engines.h"
#include "dispatch.h"
#include "error.h"
#include "schema.h"

namespace sparse_attn {
namespace {

class CpuBackend : public Backend {
 public:
  const Engine& engine(const std::string& name) const override {
    return name == cpu::kNaive.name ? cpu::kNaive : cpu::kTiled;
  }
  const Tools& tools() const override { return cpu::kTools; }
  std::shared_ptr<void> enter(int32_t) const override { return nullptr; }
  void* stream(int32_t) const override { return nullptr; }
  int32_t compute_capability(int32_t) const override { return 0; }
};

}  // namespace

const Backend& backend() {
  static const CpuBackend kBackend;
  return kBackend;
}

}  // namespace sparse_attn

STABLE_TORCH_LIBRARY(sparse_attn, library) {
  using namespace sparse_attn;
  for (int index = 0; index < kNumOps; ++index) {
    library.def(schema_of(op_at(index), false).c_str());
    library.def(schema_of(op_at(index), true).c_str());
  }
  library.def(selection_schema().c_str());
  library.def("list_from_mask(Tensor mask) -> (Tensor counts, Tensor indices)");
  library.def(
      "merge_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor out, "
      "Tensor lse)");
  library.def(
      "merge_states_out(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, *, Tensor(a!) "
      "out, Tensor(b!) lse) -> ()");
  library.def(
      "append_to_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor slot_mapping, Tensor? key_scale=None, Tensor? value_scale=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sparse_attn, CPU, library) { sparse_attn::register_kernels(library); }
