// The portable kernels of head dims up to 96.
#include "launch.cuh"

namespace sparse_attn::cuda::portable {

template Status launch<96>(const AttentionParams&, const LaunchChoice&);

}  // namespace sparse_attn::cuda::portable
