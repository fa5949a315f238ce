// The portable kernels of head dims up to 128.
#include "launch.cuh"

namespace sparse_attn::cuda::portable {

template Status launch<128>(const AttentionParams&, const LaunchChoice&);

}  // namespace sparse_attn::cuda::portable
