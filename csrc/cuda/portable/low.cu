// Lists of low query blocks, by the head dims that are compiled.
#include "launch.cuh"

namespace sparse_attn::cuda::portable {

template Status launch<KernelKind::kDense64, 64>(const AttentionParams&, const LaunchChoice&);
template Status launch<KernelKind::kDense64, 128>(const AttentionParams&, const LaunchChoice&);
template Status launch<KernelKind::kDense32, 64>(const AttentionParams&, const LaunchChoice&);
template Status launch<KernelKind::kDense32, 128>(const AttentionParams&, const LaunchChoice&);
template Status launch<KernelKind::kDense16, 64>(const AttentionParams&, const LaunchChoice&);
template Status launch<KernelKind::kDense16, 128>(const AttentionParams&, const LaunchChoice&);

}  // namespace sparse_attn::cuda::portable
