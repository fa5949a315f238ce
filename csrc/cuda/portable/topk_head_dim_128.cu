// Plain token top-k for head dims compiled at 128.
#include "topk_launch.cuh"

namespace sparse_attn::cuda::portable {

template Status launch_topk<128>(const AttentionParams&, const LaunchChoice&);

}  // namespace sparse_attn::cuda::portable
