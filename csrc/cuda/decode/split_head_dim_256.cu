// The split kernels of head dim 256.
#include "launch.cuh"

namespace sparse_attn::cuda::decode {

template Status launch<__half, 256>(const AttentionParams&, const LaunchPlan&);
template Status launch<__nv_bfloat16, 256>(const AttentionParams&, const LaunchPlan&);

}  // namespace sparse_attn::cuda::decode
