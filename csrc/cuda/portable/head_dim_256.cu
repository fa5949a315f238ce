// The portable kernels of head dims up to 256.
#include "launch.cuh"

namespace sparse_attn::cuda::portable {

template Status launch<256>(const AttentionParams&, const LaunchChoice&);

}  // namespace sparse_attn::cuda::portable
