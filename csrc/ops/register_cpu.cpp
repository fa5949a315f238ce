// CPU kernels of all ops.
#include <stdexcept>

#include "../cpu/engines.h"
#include "dispatch.h"
#include "namespace.h"

namespace sparse_attn {
namespace {

class CpuBackend : public Backend {
 public:
  const Engine& engine(const std::string& name) const override {
    for (const Engine* engine : {&cpu::kTiled, &cpu::kNaive}) {
      if (name == engine->name) return *engine;
    }
    throw std::logic_error("no engine " + name);  // capability.cpp lists one that is not here
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
