// Ranges and lists of large blocks at head dims compiled at 64.
#include "launch.cuh"

namespace sparse_attn::cuda::portable {

template Status launch<KernelKind::kDense, 64>(const AttentionParams&, const LaunchChoice&);

}  // namespace sparse_attn::cuda::portable
