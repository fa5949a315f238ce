// The portable kernels of head dims up to 192.
#include "launch.cuh"

namespace sparse_attn::cuda::portable {

template Status launch<192>(const AttentionParams&, const LaunchChoice&);

}  // namespace sparse_attn::cuda::portable
