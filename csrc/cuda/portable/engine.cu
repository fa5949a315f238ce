// The portable engine: any GPU from sm_75. Chooses kernel and tile by the case and by the device's
// opt-in shared memory, lays out the workspace (bits of global tokens, thresholds of top-k), and
// launches.
#include <array>
#include <cstdlib>
#include <iterator>
#include <utility>

#include "../common/launch.cuh"
#include "../common/plain_scores.h"
#include "../common/radix_select.cuh"
#include "../decode/decode.h"
#include "../engines.h"
#include "../select/global_tokens.h"
#include "launch.h"

namespace sparse_attn::cuda {
namespace {

using portable::KernelKind;
using portable::kTiles;
using portable::LaunchChoice;

constexpr int64_t kAlignment = 16;  // bytes

bool is_aligned(const TensorView& tensor, int64_t element_bytes) {
  int64_t strides = tensor.stride_b | tensor.stride_h | tensor.stride_s;
  return reinterpret_cast<uintptr_t>(tensor.data) % kAlignment == 0 &&
         strides * element_bytes % kAlignment == 0;
}

bool all_aligned(const AttentionParams& params) {
  int64_t bytes = size_of(params.dtype);
  return is_aligned(params.query, bytes) && is_aligned(params.key, bytes) &&
         is_aligned(params.value, bytes) && is_aligned(params.out, bytes);
}

/// The kernel that the call's pattern and features ask for.
KernelKind wanted_kernel(const AttentionParams& params, bool aligned) {
  const Pattern& pattern = params.pattern;
  if (!aligned || !has_plain_scores(params) || pattern.topk > 0) return KernelKind::kGeneral;
  if (!pattern.list.present()) return KernelKind::kDense;
  int32_t block_q = imin(pattern.list.block_q, params.seq_q);
  return portable::kernel_for_blocks(block_q, pattern.list.block_kv, params.head_dim);
}

/// Top-k among plain ranges of keys.
bool is_plain_topk(const AttentionParams& params, bool aligned) {
  const Pattern& pattern = params.pattern;
  return pattern.topk > 0 && params.dtype != Dtype::kFloat32 && aligned &&
         has_plain_scores(params) && !pattern.list.present() && pattern.lead.length == 0 &&
         params.num_global_tokens == 0;
}

__global__ void code_probe() {}

/// The device's limit, or the smaller one that a test sets in SPARSE_ATTN_SMEM_LIMIT. Code older
/// than sm_80 has no dense kernels and is held to what its own devices have.
int32_t smem_limit(int32_t device) {
  constexpr int32_t kTuringLimit = 64 << 10;
  int limit = 0;
  cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cudaFuncAttributes code;
  if (cudaFuncGetAttributes(&code, code_probe) == cudaSuccess && code.ptxVersion < 80) {
    limit = imin(limit, kTuringLimit);
  }
  const char* override_limit = std::getenv("SPARSE_ATTN_SMEM_LIMIT");
  return override_limit == nullptr ? limit : imin(limit, std::atoi(override_limit));
}

LaunchChoice choose(const AttentionParams& params) {
  LaunchChoice choice;
  choice.aligned = all_aligned(params);
  choice.smem_limit = smem_limit(params.device);
  choice.kind = portable::choose_kernel(params.dtype, wanted_kernel(params, choice.aligned),
                                        params.head_dim, choice.smem_limit);
  if (is_plain_topk(params, choice.aligned) &&
      portable::topk_fits(params.head_dim, choice.smem_limit)) {
    choice.kind = KernelKind::kTop;
  }
  return choice;
}

int32_t key_tile(const AttentionParams& params, const LaunchChoice& choice) {
  return tile_shape(choice.kind, params.head_dim).block_kv;
}

using Launch = Status (*)(const AttentionParams&, const LaunchChoice&);

template <KernelKind kKind, int HEAD_DIM>
constexpr Launch launcher() {
  if constexpr (kKind == KernelKind::kTop) {
    return portable::launch_topk<HEAD_DIM>;
  } else if constexpr (kKind == KernelKind::kRank) {
    return nullptr;  // launched with kTop
  } else {
    return portable::launch<kKind, HEAD_DIM>;
  }
}

/// The launchers of the kernels in kTiles.
template <std::size_t... kTile>
constexpr std::array<Launch, sizeof...(kTile)> launchers(std::index_sequence<kTile...>) {
  return {launcher<kTiles[kTile].kind, kTiles[kTile].shape.head_dim>()...};
}

int64_t threshold_bytes(const AttentionParams& params) {
  if (params.pattern.topk == 0) return 0;
  int64_t rows = int64_t{params.batch} * params.heads_q * params.seq_q;
  return aligned_bytes(rows * static_cast<int64_t>(sizeof(Threshold)));
}

int64_t workspace_bytes(const AttentionParams& params) {
  if (decode::serves(params)) return decode::workspace_bytes(params);
  return threshold_bytes(params) + global_token_bytes(params, key_tile(params, choose(params)));
}

Status run(const AttentionParams& given) {
  if (decode::serves(given)) return decode::run(given, all_aligned(given));
  AttentionParams params = given;
  LaunchChoice choice = choose(params);
  char* memory = static_cast<char*>(params.workspace);
  if (params.pattern.topk > 0) choice.thresholds = memory;
  Status status =
      mark_global_tokens(&params, key_tile(params, choice), memory + threshold_bytes(params));
  if (!status.ok()) return status;
  constexpr auto kLaunchers = launchers(std::make_index_sequence<std::size(kTiles)>());
  return kLaunchers[tile_index(choice.kind, params.head_dim)](params, choice);
}

}  // namespace

const Engine kPortable = {"portable", workspace_bytes, run};

}  // namespace sparse_attn::cuda
