// What each engine accepts: a set of features, and limits of sizes and devices, a sentence each.
#include "capability.h"

#include <tuple>

#include "cuda/decode/plan.h"
#include "cuda/hopper/table.h"
#include "cuda/small/plan.h"

namespace sparse_attn {
namespace {

using F = Feature;
namespace hopper = cuda::hopper;

// Groups of features that engines serve together. They do not grow: one that comes later is named
// by each engine that serves it.

/// Windows, and the leading keys and rows beside them.
constexpr Features kRanges =
    Features::of(F::kKeyOrigins, F::kWindow, F::kDilation, F::kLead, F::kColumns, F::kGlobalRows);
constexpr Features kLists = Features::of(F::kList, F::kPartialBlocks);
/// Rows that stand anywhere and have keys of their own, and scores that are functions of q.k.
constexpr Features kScored = Features::of(F::kKeyBounds, F::kQueryOffsets, F::kSoftcap,
                                          F::kOddScale, F::kSinkLogits, F::kValueDim);
/// Scores that depend on their row and key too.
constexpr Features kBiased = Features::of(F::kMask, F::kAlibi);
/// Sequences that differ in length, packed or in pages, and keys of 8 bits.
constexpr Features kSequences = Features::of(F::kPacked, F::kUsedKeys, F::kPaged, F::kFloat8Keys);

/// What hopper and decode both serve, ...
constexpr Features kShared =
    kRanges.with(kLists).with(kScored).with(kBiased).with(kSequences).with(Features::of(F::kTopK));
/// ... and what engines do that serve whatever others refuse.
constexpr Features kEverything =
    kShared.with(Features::of(F::kFloat32, F::kUnaligned, F::kGlobalIndices));

struct EngineLimits {
  const char* name;
  bool cuda;
  int32_t least_sm;
  Features accepts;
};

/// Of each device the fastest engines first.
constexpr EngineLimits kEngines[] = {
    {"tiled", false, 0, kEverything},
    {"naive", false, 0, kEverything},
    {"hopper", true, 90, kShared.with(Features::of(F::kGlobalIndices))},
    {"decode", true, 80, kShared.with(Features::of(F::kUnaligned))},
    {"small", true, 80,
     kRanges.with(kScored).with(kBiased).with(Features::of(F::kPacked, F::kUsedKeys))},
    {"portable", true, 75, kEverything},
    {"naive", true, 0, kEverything},
};

/// A feature's words in a sentence "<engine> takes no ...".
const char* words_of(Feature feature) {
  switch (feature) {
    case F::kFloat32:
      return "float32, but float16 and bfloat16";
    case F::kUnaligned:
      return "pointers or strides that are not multiples of 16 bytes";
    case F::kMask:
      return "attn_mask";
    case F::kKeyBounds:
      return "key_bounds";
    case F::kQueryOffsets:
      return "query_offset given as a tensor";
    case F::kKeyOrigins:
      return "key_origin";
    case F::kSoftcap:
      return "softcap";
    case F::kOddScale:
      return "scale that is not above 0 and below 1024";
    case F::kSinkLogits:
      return "sink_logits";
    case F::kAlibi:
      return "alibi_slopes";
    case F::kWindow:
      return "window";
    case F::kDilation:
      return "dilation";
    case F::kLead:
      return "sinks or global columns";
    case F::kColumns:
      return "strided columns";
    case F::kGlobalRows:
      return "rows of global tokens";
    case F::kGlobalIndices:
      return "global_tokens given as indices";
    case F::kList:
      return "block lists";
    case F::kPartialBlocks:
      return "partial blocks";
    case F::kTopK:
      return "token top-k";
    case F::kValueDim:
      return "value head dim that differs from the key's";
    case F::kPacked:
      return "packed sequences";
    case F::kUsedKeys:
      return "seqused_k";
    case F::kPaged:
      return "paged keys";
    case F::kFloat8Keys:
      return "keys of float8";
    default:
      return "feature that it has not listed";
  }
}

/// The head dims that have a Hopper kernel of their own, as a sentence lists them.
std::string head_dims_with(const hopper::Wanted& wanted) {
  std::string list;
  for (const int32_t head_dim : hopper::kHeadDims) {
    if (hopper::find_kernel(head_dim, wanted).head_dim != head_dim) continue;
    list += (list.empty() ? "" : " and ") + std::to_string(head_dim);
  }
  return list.empty() ? "none" : list;
}

/// What the Hopper engine leaves out of sequences that differ in length.
std::string ragged_refusal(const Case& c) {
  const std::string with =
      c.features.has(F::kPaged) ? " with paged keys" : " with packed sequences";
  const bool listed = c.features.has(F::kList);
  const Features served = listed ? hopper::kRaggedListedCalls : hopper::kScoredRaggedCalls;
  const std::string words = unlisted(c.features, served);
  if (!words.empty()) return "hopper takes no " + words + with;
  if (c.block_q % 128 != 0) {
    return "hopper takes no query blocks of " + std::to_string(c.block_q) + " rows" + with;
  }
  const int32_t head_dim = c.problem.widest_dim();
  const hopper::Entry entry = hopper::find_kernel(head_dim, {c.features});
  const hopper::Entry alone = listed ? hopper::find_kernel(head_dim, {Features::of(F::kList)})
                                     : hopper::find_chunked(head_dim, c.features);
  const bool plain = c.features.without(hopper::kLengths).within(hopper::kPlainCalls);
  const bool as_plain = plain && hopper::plain_tiles_have(head_dim, entry.keys());
  const bool as_others =
      plain ? hopper::are_alike(entry, alone) : hopper::are_alike_unsplit(entry, alone);
  if (plain ? !as_plain || (c.may_split && !as_others) : !as_others) {
    return "hopper takes no head dim " + std::to_string(head_dim) + with +
           ": its tiles would be others than those of a sequence alone";
  }
  return "";
}

/// What the Hopper engine leaves out of calls whose keys have 8 bits: kernels that know no scales
/// by head.
std::string float8_refusal(const Case& c) {
  const std::string with = " with keys of float8";
  constexpr Features kServed =
      kRanges.with(kLists).with(kScored).with(kSequences).with(Features::of(F::kGlobalIndices));
  const std::string words = unlisted(c.features, kServed);
  if (!words.empty()) return "hopper takes no " + words + with;
  if (c.block_q % 128 != 0) {
    return "hopper takes no query blocks of " + std::to_string(c.block_q) + " rows" + with;
  }
  return "";
}

/// Limits of the hopper engine.
std::string hopper_refusal(const Case& c) {
  const int32_t head_dim = c.problem.widest_dim();
  if (c.features.any(hopper::kBiases)) {
    const std::string bias = words_of(c.features.has(F::kMask) ? F::kMask : F::kAlibi);
    const bool listed = c.features.has(F::kList);
    Features wanted = hopper::kBiases;
    wanted.add(F::kList, listed);
    if (!hopper::find_kernel(head_dim, {wanted}).exists()) {
      return "hopper takes " + bias + (listed ? " with block lists" : "") + " at head dims up to " +
             std::to_string(hopper::largest_head_dim({wanted})) + ", not " +
             std::to_string(head_dim);
    }
  }
  Features kind;  // of kernels: lists, lengths, both or neither
  kind.add(F::kList, c.features.has(F::kList));
  kind.add(F::kPacked, c.features.any(hopper::kLengths));
  if (!hopper::find_kernel(head_dim, {kind}).exists()) {
    return "hopper is built for head dims up to " +
           std::to_string(hopper::largest_head_dim({kind})) + ", not " + std::to_string(head_dim);
  }
  if (c.features.has(F::kFloat8Keys)) {
    const std::string reason = float8_refusal(c);
    if (!reason.empty()) return reason;
  }
  if (kind.has(F::kPacked)) {
    const std::string reason = ragged_refusal(c);
    if (!reason.empty()) return reason;
  }
  if (c.features.has(F::kTopK)) {
    constexpr hopper::Wanted kTopK = {Features::of(F::kTopK)};
    if (hopper::find_kernel(head_dim, kTopK).head_dim != head_dim) {
      return "hopper takes token top-k at head dims " + head_dims_with(kTopK) + ", not " +
             std::to_string(head_dim);
    }
    const std::string words = unlisted(c.features, hopper::kTopCalls);
    if (!words.empty()) return "hopper takes no " + words + " with token top-k";
  }
  // Gathered with the sinks, global keys are one lead view for all batch entries, whose positions a
  // bias would need.
  if (c.features.has(F::kGlobalIndices)) {
    constexpr Features kServed = kScored.with(
        Features::of(F::kWindow, F::kLead, F::kGlobalRows, F::kGlobalIndices, F::kFloat8Keys));
    const std::string words = unlisted(c.features, kServed);
    if (!words.empty()) return "hopper takes no " + words + " with global_tokens given as indices";
  }
  if (c.block_q % 128 == 0) return "";
  hopper::Wanted half = {Features::of(F::kList)};
  half.block_q = 64;
  const int32_t least_rows = hopper::find_kernel(head_dim, half).exists() ? 64 : 128;
  if (c.block_q % least_rows != 0) {
    return "hopper takes query blocks that are multiples of " + std::to_string(least_rows) +
           " at head dim " + std::to_string(head_dim) + ", not " + std::to_string(c.block_q);
  }
  return "";
}

/// Limits of the decode engine.
std::string decode_refusal(const Case& c) {
  if (c.features.has(F::kFloat8Keys)) {  // whose kernels know no strided views
    constexpr Features kServed = kLists.with(kScored)
                                     .with(kBiased)
                                     .with(kSequences)
                                     .with(Features::of(F::kUnaligned, F::kKeyOrigins, F::kWindow,
                                                        F::kLead, F::kGlobalRows, F::kTopK));
    const std::string words = unlisted(c.features, kServed);
    if (!words.empty()) return "decode takes no keys of float8 with " + words;
  }
  const bool ranks = c.features.has(F::kTopK);
  const int32_t most = ranks ? cuda::decode::kMostRanking : kFewQueries;
  if (c.problem.seq_q > most) {
    return "decode takes up to " + std::to_string(most) + " queries" +
           (ranks ? " of token top-k" : "") + ", not " + std::to_string(c.problem.seq_q);
  }
  if (!ranks) return "";
  constexpr Features kTopCalls =
      Features::of(F::kTopK, F::kKeyBounds, F::kQueryOffsets, F::kSinkLogits, F::kValueDim,
                   F::kMask, F::kSoftcap, F::kOddScale, F::kAlibi)
          .with(Features::of(F::kPacked, F::kUsedKeys, F::kPaged));
  const std::string words = unlisted(c.features, kTopCalls);
  if (!words.empty()) return "decode takes no " + words + " with token top-k";
  if (c.topk > cuda::decode::kMostKept) {
    return "decode takes token top-k of up to " + std::to_string(cuda::decode::kMostKept) +
           " keys, not " + std::to_string(c.topk);
  }
  return "";
}

/// What the small engine leaves to those that walk over keys.
std::string small_refusal(const Case& c) {
  namespace small = cuda::small;
  const int32_t packed_queries = c.features.has(F::kPacked) ? c.problem.seq_q : 0;
  const struct {
    const char* words;
    int32_t size, most;
  } limits[] = {{"queries of packed sequences", packed_queries, small::kMostPackedQueries},
                {"keys", c.problem.seq_kv, small::kMostKeys},
                {"columns of a head", c.problem.widest_dim(), small::kMostHeadDim}};
  for (const auto& limit : limits) {
    if (limit.size <= limit.most) continue;
    return "small takes up to " + std::to_string(limit.most) + " " + limit.words + ", not " +
           std::to_string(limit.size);
  }
  return "";
}

/// Limits of an engine beside the features that it accepts.
std::string limits_refusal(const std::string& name, const Case& c) {
  if (name == "hopper") return hopper_refusal(c);
  if (name == "decode") return decode_refusal(c);
  if (name == "small") return small_refusal(c);
  return "";
}

std::vector<std::string> names_of(bool cuda) {
  std::vector<std::string> names;
  for (const EngineLimits& engine : kEngines) {
    if (engine.cuda == cuda) names.push_back(engine.name);
  }
  return names;
}

/// All fields of a case, which the compiler counts.
auto fields_of(const Case& c) {
  const auto& [cuda, sm, problem, features, block_q, topk, packed_keys, may_split, cut_small] = c;
  const auto& [batch, heads_q, heads_kv, seq_q, seq_kv, head_dim, value_dim, dtype] = problem;
  return std::tie(cuda, sm, batch, heads_q, heads_kv, seq_q, seq_kv, head_dim, value_dim, dtype,
                  features, block_q, topk, packed_keys, may_split, cut_small);
}

}  // namespace

bool operator==(const Case& a, const Case& b) { return fields_of(a) == fields_of(b); }

std::string capability_of(int32_t sm) {
  return std::to_string(sm / 10) + "." + std::to_string(sm % 10);
}

std::string unlisted(Features features, Features listed) {
  if (features.within(listed)) return "";
  const Features rest = features.without(listed);
  for (int32_t f = 0; f < static_cast<int32_t>(F::kCount); ++f) {
    if (rest.has(static_cast<F>(f))) return words_of(static_cast<F>(f));
  }
  return words_of(F::kCount);
}

const std::vector<std::string>& engine_names(bool cuda) {
  static const std::vector<std::string> kCpu = names_of(false), kCuda = names_of(true);
  return cuda ? kCuda : kCpu;
}

std::string refusal(const std::string& name, const Case& c) {
  for (const EngineLimits& engine : kEngines) {
    if (engine.cuda != c.cuda || engine.name != name) continue;
    if (c.cuda && c.sm < engine.least_sm) {
      return name + " needs compute capability " + capability_of(engine.least_sm) +
             ", this device has " + capability_of(c.sm);
    }
    if (name == "hopper" && c.sm != engine.least_sm) {
      return "hopper needs compute capability 9.0, this device has " + capability_of(c.sm);
    }
    const std::string words = unlisted(c.features, engine.accepts);
    return words.empty() ? limits_refusal(name, c) : name + " takes no " + words;
  }
  return "there is no engine " + name + " for " + (c.cuda ? "CUDA" : "CPU") + " tensors";
}

}  // namespace sparse_attn
