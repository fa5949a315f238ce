// All of the contract, and float32, at head dims compiled at 128.
#include "launch.cuh"

namespace sparse_attn::cuda::portable {

template Status launch<KernelKind::kGeneral, 128>(const AttentionParams&, const LaunchChoice&);
template Status launch<KernelKind::kFloat, 128>(const AttentionParams&, const LaunchChoice&);
template Status launch<KernelKind::kFloatChunks, 128>(const AttentionParams&, const LaunchChoice&);
template Status launch<KernelKind::kFloatLow, 128>(const AttentionParams&, const LaunchChoice&);

}  // namespace sparse_attn::cuda::portable
