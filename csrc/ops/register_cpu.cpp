// CPU kernels of all ops.
#include "../cpu/engines.h"
#include "dispatch.h"
#include "namespace.h"

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

SPARSE_ATTN_KERNELS(CPU, library) { sparse_attn::register_kernels(library); }
