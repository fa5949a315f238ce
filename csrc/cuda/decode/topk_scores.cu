// Kernels for the scores of token top-k in decoding.
#include "topk_scores.cuh"

namespace sparse_attn::cuda::decode {

template Status launch_scores<__half, 64>(const AttentionParams&, const SplitGrid&, int32_t,
                                          const ScoreRows&);
template Status launch_scores<__half, 128>(const AttentionParams&, const SplitGrid&, int32_t,
                                           const ScoreRows&);
template Status launch_scores<__half, 256>(const AttentionParams&, const SplitGrid&, int32_t,
                                           const ScoreRows&);
template Status launch_scores<__nv_bfloat16, 64>(const AttentionParams&, const SplitGrid&, int32_t,
                                                 const ScoreRows&);
template Status launch_scores<__nv_bfloat16, 128>(const AttentionParams&, const SplitGrid&, int32_t,
                                                  const ScoreRows&);
template Status launch_scores<__nv_bfloat16, 256>(const AttentionParams&, const SplitGrid&, int32_t,
                                                  const ScoreRows&);

}  // namespace sparse_attn::cuda::decode
