// Launchers of each kind and head dim, instantiated by the files that name them: the attention
// kernel, and before it the threshold pass where the pattern has a top-k.
#pragma once

#include "../../params.h"
#include "../common/partial_rows.cuh"
#include "tile.h"

namespace sparse_attn::cuda::portable {

/// What the engine decided for a call.
struct LaunchChoice {
  KernelKind kind = KernelKind::kGeneral;
  bool aligned = true;         // the call has no kUnaligned
  int32_t smem_limit = 0;      // bytes of shared memory a thread block may have
  void* thresholds = nullptr;  // [B, Hq, Sq] of Threshold, with top-k
  PartialRows partials;        // of float32; max_chunks is 1 where no keys are shared out
};

/// Runs a call by the kernel of tile.h's table that is compiled for HEAD_DIM.
template <KernelKind kKind, int HEAD_DIM>
Status launch(const AttentionParams& params, const LaunchChoice& choice);

/// Joins the chunks that thread blocks have left in the workspace, and stores the rows' results.
Status join_chunks(const AttentionParams& params, const PartialRows& partials);

/// The same for kind kTop: both kernels of a plain token top-k.
template <int HEAD_DIM>
Status launch_topk(const AttentionParams& params, const LaunchChoice& choice);

}  // namespace sparse_attn::cuda::portable
