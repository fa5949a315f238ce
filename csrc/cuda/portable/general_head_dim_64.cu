// All of the contract, and float32, at head dims compiled at 64.
#include "launch.cuh"

namespace sparse_attn::cuda::portable {

template Status launch<KernelKind::kGeneral, 64>(const AttentionParams&, const LaunchChoice&);
template Status launch<KernelKind::kFloat, 64>(const AttentionParams&, const LaunchChoice&);
template Status launch<KernelKind::kFloatChunks, 64>(const AttentionParams&, const LaunchChoice&);
template Status launch<KernelKind::kFloatLow, 64>(const AttentionParams&, const LaunchChoice&);

}  // namespace sparse_attn::cuda::portable
