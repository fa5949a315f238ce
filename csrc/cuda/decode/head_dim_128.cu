// The split kernels of head dims up to 128.
#include "launch.cuh"

namespace sparse_attn::cuda::decode {

template Status launch<128>(const AttentionParams&, const LaunchPlan&);

}  // namespace sparse_attn::cuda::decode
