// The choice among the compiled instruction sets, made once.
#include <cstdlib>
#include <cstring>

#include "vector_math.h"

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

namespace {

const VectorMath& choose() {
#ifdef SPARSE_ATTN_X86
  const char* forced = std::getenv("SPARSE_ATTN_CPU_ISA");
  auto wanted = [&](const char* isa) { return forced == nullptr || std::strcmp(forced, isa) == 0; };
  bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("f16c");
  bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                    __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512dq");
  if (has_avx512 && wanted("avx512")) return avx512::kVectorMath;
  if (has_avx2 && (wanted("avx2") || wanted("avx512"))) return avx2::kVectorMath;
#endif
  return plain::kVectorMath;
}

}  // namespace

const VectorMath& vector_math() {
  static const VectorMath& chosen = choose();
  return chosen;
}

}  // namespace sparse_attn::cpu
