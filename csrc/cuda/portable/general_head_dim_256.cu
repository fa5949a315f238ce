// All of the contract, and float32, at head dims compiled at 256.
#include "launch.cuh"

namespace sparse_attn::cuda::portable {

template Status launch<KernelKind::kGeneral, 256>(const AttentionParams&, const LaunchChoice&);
template Status launch<KernelKind::kFloat, 256>(const AttentionParams&, const LaunchChoice&);
template Status launch<KernelKind::kFloatChunks, 256>(const AttentionParams&, const LaunchChoice&);
template Status launch<KernelKind::kFloatLow, 256>(const AttentionParams&, const LaunchChoice&);

}  // namespace sparse_attn::cuda::portable
