// Lists of low query blocks at head dims compiled at 128.
#include "launch.cuh"

namespace sparse_attn::cuda::portable {

template Status launch<KernelKind::kDense64, 128>(const AttentionParams&, const LaunchChoice&);
template Status launch<KernelKind::kDense32, 128>(const AttentionParams&, const LaunchChoice&);
template Status launch<KernelKind::kDense16, 128>(const AttentionParams&, const LaunchChoice&);

}  // namespace sparse_attn::cuda::portable
