// The portable kernels of head dims up to 64.
#include "launch.cuh"

namespace sparse_attn::cuda::portable {

template Status launch<64>(const AttentionParams&, const LaunchChoice&);

}  // namespace sparse_attn::cuda::portable
