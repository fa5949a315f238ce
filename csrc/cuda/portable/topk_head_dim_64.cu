// Plain token top-k for head dims compiled at 64.
#include "topk_launch.cuh"

namespace sparse_attn::cuda::portable {

template Status launch_topk<64>(const AttentionParams&, const LaunchChoice&);

}  // namespace sparse_attn::cuda::portable
