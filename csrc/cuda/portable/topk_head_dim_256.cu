// Plain token top-k for head dims compiled at 256.
#include "topk_launch.cuh"

namespace sparse_attn::cuda::portable {

template Status launch_topk<256>(const AttentionParams&, const LaunchChoice&);

}  // namespace sparse_attn::cuda::portable
