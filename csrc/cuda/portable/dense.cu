// Ranges and lists of large blocks, by the head dims that are compiled.
#include "launch.cuh"

namespace sparse_attn::cuda::portable {

template Status launch<KernelKind::kDense, 64>(const AttentionParams&, const LaunchChoice&);
template Status launch<KernelKind::kDense, 96>(const AttentionParams&, const LaunchChoice&);
template Status launch<KernelKind::kDense, 128>(const AttentionParams&, const LaunchChoice&);
template Status launch<KernelKind::kDense, 192>(const AttentionParams&, const LaunchChoice&);
template Status launch<KernelKind::kDense, 256>(const AttentionParams&, const LaunchChoice&);

}  // namespace sparse_attn::cuda::portable
