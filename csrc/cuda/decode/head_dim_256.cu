// The split kernels of head dims up to 256.
#include "launch.cuh"

namespace sparse_attn::cuda::decode {

template Status launch<256>(const AttentionParams&, const LaunchPlan&);

}  // namespace sparse_attn::cuda::decode
