// The limits of each engine, a sentence each. An engine without a limit here serves every case.
#include "capability.h"

#include "cuda/common/log2_units.h"

namespace sparse_attn {
namespace {

/// Why `engine` does not serve the case; empty when it does.
std::string refusal(const std::string& engine, const Case& c) {
  if (engine == "hopper") {
    if (c.sm != 90) {
      return "hopper needs compute capability 9.0, this device has " + std::to_string(c.sm / 10) +
             "." + std::to_string(c.sm % 10);
    }
    if (c.dtype == Dtype::kFloat32) return "hopper takes float16 and bfloat16, not float32";
    if (c.head_dim != 64 && c.head_dim != 96 && c.head_dim != 128 && c.head_dim != 192 &&
        c.head_dim != 256) {
      return "hopper takes head dims 64, 96, 128, 192 and 256, not " + std::to_string(c.head_dim);
    }
    if (!c.aligned) return "hopper needs pointers and strides that are multiples of 16 bytes";
    if (c.dense_mask) return "hopper takes no attn_mask";
    if (c.scattered_globals) return "hopper takes no global_tokens given as indices";
    if (c.topk && c.head_dim != 64 && c.head_dim != 128) {
      return "hopper takes token top-k at head dims 64 and 128, not " + std::to_string(c.head_dim);
    }
    if (c.topk && c.key_bounds) return "hopper takes no key_bounds with token top-k";
    if (c.topk && c.softcap != 0.0f) return "hopper takes no softcap with token top-k";
    if (c.topk && !cuda::is_common_scale(c.scale)) {
      return "hopper takes scales above 0 and below " +
             std::to_string(static_cast<int>(cuda::kLargeScale)) + " with token top-k";
    }
    const int32_t least_rows = c.head_dim > 128 ? 128 : 64;
    if (c.block_q % least_rows != 0) {
      return "hopper takes query blocks that are multiples of " + std::to_string(least_rows) +
             " at head dim " + std::to_string(c.head_dim) + ", not " + std::to_string(c.block_q);
    }
  }
  if (engine == "portable" && c.sm < 75) {
    return "portable needs compute capability 7.5, this device has " + std::to_string(c.sm / 10) +
           "." + std::to_string(c.sm % 10);
  }
  return "";
}

/// Why `engine` stands aside for a slower kind that is faster here; asked for by name it serves.
std::string deferral(const std::string& engine, const Case& c) {
  constexpr int32_t kFewQueries = 16;
  constexpr int32_t kManyKeys = 1024;
  if (engine == "hopper" && !c.topk && c.seq_q <= kFewQueries && c.seq_kv >= kManyKeys) {
    return "hopper leaves up to " + std::to_string(kFewQueries) + " queries on " +
           std::to_string(kManyKeys) + " keys or more to portable, which splits the keys";
  }
  return "";
}

/// What slows the engine that serves the case; mostly nothing.
std::string remark(const std::string& engine, const Case& c) {
  if (engine == "portable" && c.sm < 80 && c.dtype == Dtype::kBFloat16) {
    return "portable multiplies bfloat16 without tensor cores before compute capability 8.0, this "
           "device has " +
           std::to_string(c.sm / 10) + "." + std::to_string(c.sm % 10) + "; float16 has them";
  }
  return "";
}

}  // namespace

const std::vector<std::string>& engine_names(bool cuda) {
  static const std::vector<std::string> kCpu = {"tiled", "naive"};
  static const std::vector<std::string> kCuda = {"hopper", "portable", "naive"};
  return cuda ? kCuda : kCpu;
}

Choice choose_engine(const Case& c, const std::string& requested) {
  Choice choice;
  for (const std::string& engine : engine_names(c.cuda)) {
    if (requested != "auto" && requested != engine) continue;
    std::string reason = refusal(engine, c);
    if (reason.empty() && requested == "auto") reason = deferral(engine, c);
    if (reason.empty()) {
      choice.engine = engine;
      reason = remark(engine, c);
      if (!reason.empty()) choice.reasons.push_back(reason);
      return choice;
    }
    choice.reasons.push_back(reason);
  }
  if (choice.reasons.empty()) {
    choice.reasons.push_back("there is no engine " + requested + " for " +
                             (c.cuda ? "CUDA" : "CPU") + " tensors");
  }
  return choice;
}

}  // namespace sparse_attn
