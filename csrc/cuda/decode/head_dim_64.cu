// The split kernels of head dims up to 64.
#include "launch.cuh"

namespace sparse_attn::cuda::decode {

template Status launch<64>(const AttentionParams&, const LaunchPlan&);

}  // namespace sparse_attn::cuda::decode
