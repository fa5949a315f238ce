// The split kernels of head dim 128.
#include "launch.cuh"

namespace sparse_attn::cuda::decode {

template Status launch<__half, 128>(const AttentionParams&, const LaunchPlan&);
template Status launch<__nv_bfloat16, 128>(const AttentionParams&, const LaunchPlan&);

}  // namespace sparse_attn::cuda::decode
