// The split kernels of bfloat16, by the head dims that are compiled.
#include "launch.cuh"

namespace sparse_attn::cuda::decode {

template Status launch<__nv_bfloat16, 64>(const AttentionParams&, const LaunchPlan&);
template Status launch<__nv_bfloat16, 128>(const AttentionParams&, const LaunchPlan&);
template Status launch<__nv_bfloat16, 256>(const AttentionParams&, const LaunchPlan&);

}  // namespace sparse_attn::cuda::decode
