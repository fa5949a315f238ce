// The choice among the compiled instruction sets, made once.
#include <cstdlib>
#include <cstring>

#ifdef SPARSE_ATTN_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "cpu/vector/vector_math.h"

namespace sparse_attn::cpu {

namespace plain {
extern const VectorMath kVectorMath;
}
#ifdef SPARSE_ATTN_X86
namespace avx2 {
extern const VectorMath kVectorMath;
}
namespace avx512 {
extern const VectorMath kVectorMath;
}
#endif

#ifdef SPARSE_ATTN_AMX
namespace amx {
extern const BfloatMath kBfloatMath;
}
#endif

namespace {

#ifdef SPARSE_ATTN_X86
/// AVX-512, where BLAS has kernels of it on Intel's processors alone: panels are slower there above
/// this head dim, unless rows are few.
VectorMath avx512_math() {
  constexpr int32_t kWidest = 64;
  VectorMath math = avx512::kVectorMath;
  if (__builtin_cpu_is("intel")) math.panel_head_dim = kWidest;
  return math;
}
#endif

#ifdef SPARSE_ATTN_AMX
/// Linux lends the tile registers to processes that ask (Documentation/arch/x86/xstate.rst).
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
         __builtin_cpu_supports("avx512bf16") &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

VectorMath avx512_with_tiles() {
  VectorMath math = avx512_math();
  math.isa = "amx";
  math.bfloat = &amx::kBfloatMath;
  return math;
}
#endif

VectorMath choose() {
#ifdef SPARSE_ATTN_X86
  const char* forced = std::getenv("SPARSE_ATTN_CPU_ISA");
  auto wanted = [&](const char* isa) { return forced == nullptr || std::strcmp(forced, isa) == 0; };
  bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("f16c");
  bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                    __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512dq");
#ifdef SPARSE_ATTN_AMX
  if (has_avx512 && wanted("amx") && may_use_tiles()) return avx512_with_tiles();
#endif
  bool at_least_avx512 = wanted("avx512") || wanted("amx");
  if (has_avx512 && at_least_avx512) return avx512_math();
  if (has_avx2 && (wanted("avx2") || at_least_avx512)) return avx2::kVectorMath;
#endif
  return plain::kVectorMath;
}

}  // namespace

const VectorMath& vector_math() {
  static const VectorMath chosen = choose();
  return chosen;
}

}  // namespace sparse_attn::cpu
