// What each engine accepts: a set of features, and limits of sizes and devices, a sentence each.
#include "capability.h"

#include <algorithm>

#include "cuda/common/log2_units.h"
#include "cuda/decode/plan.h"
#include "cuda/hopper/table.h"
#include "cuda/small/plan.h"

namespace sparse_attn {
namespace {

using F = Feature;
namespace hopper = cuda::hopper;

/// What calls of (B, H, S, D) tensors bring, whatever their pattern.
constexpr Features kContiguous =
    Features::of(F::kFloat32, F::kUnaligned, F::kMask, F::kKeyBounds, F::kQueryOffsets,
                 F::kKeyOrigins, F::kSoftcap, F::kOddScale, F::kSinkLogits, F::kAlibi, F::kWindow,
                 F::kDilation, F::kLead, F::kColumns, F::kGlobalRows, F::kGlobalIndices, F::kList,
                 F::kPartialBlocks, F::kTopK, F::kValueDim);

/// Sequences that differ in length, packed or in pages, and keys of 8 bits.
constexpr Features kSequences = Features::of(F::kPacked, F::kUsedKeys, F::kPaged, F::kFloat8Keys);

struct EngineLimits {
  const char* name;
  bool cuda;
  int32_t least_sm;
  Features accepts;
};

/// Of each device the fastest engines first.
constexpr EngineLimits kEngines[] = {
    {"tiled", false, 0, kContiguous.with(kSequences)},
    {"naive", false, 0, kContiguous.with(kSequences)},
    {"hopper", true, 90,
     kContiguous.without(Features::of(F::kFloat32, F::kUnaligned)).with(kSequences)},
    {"decode", true, 80,
     kContiguous.without(Features::of(F::kFloat32, F::kGlobalIndices)).with(kSequences)},
    {"small", true, 80,
     kContiguous
         .without(Features::of(F::kFloat32, F::kUnaligned, F::kGlobalIndices, F::kList,
                               F::kPartialBlocks, F::kTopK))
         .with(Features::of(F::kPacked, F::kUsedKeys))},
    {"portable", true, 75, kContiguous.with(kSequences)},
    {"naive", true, 0, kContiguous.with(kSequences)},
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

std::string capability_of(int32_t sm) {
  return std::to_string(sm / 10) + "." + std::to_string(sm % 10);
}

/// The first feature of the case that is not listed, as words; empty when all are.
std::string unlisted(Features features, Features listed) {
  if (features.within(listed)) return "";
  const Features rest = features.without(listed);
  for (int32_t f = 0; f < static_cast<int32_t>(F::kCount); ++f) {
    if (rest.has(static_cast<F>(f))) return words_of(static_cast<F>(f));
  }
  return words_of(F::kCount);
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
  const bool folds = hopper::kKernels[entry.kernel].folds(entry.head_dim);
  if (c.may_split && !folds) {
    return "hopper takes no " +
           std::string(c.features.has(F::kGlobalRows) ? words_of(F::kGlobalRows)
                                                      : "few queries on many keys") +
           with + ", where a sequence alone would have its keys split";
  }
  const hopper::Entry alone = listed ? hopper::find_kernel(head_dim, {Features::of(F::kList)})
                                     : hopper::find_chunked(head_dim, false);
  const bool plain = c.features.without(hopper::kLengths).within(hopper::kPlainCalls);
  const bool as_plain = plain && hopper::plain_tiles_have(head_dim, entry.keys());
  const bool as_others = entry.keys() == alone.keys();
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
  const Features served =
      kContiguous.with(kSequences).without(Features::of(F::kMask, F::kAlibi, F::kTopK));
  const std::string words = unlisted(c.features, served);
  if (!words.empty()) return "hopper takes no " + words + with;
  if (c.block_q % 128 != 0) {
    return "hopper takes no query blocks of " + std::to_string(c.block_q) + " rows" + with;
  }
  return "";
}

/// Limits of the Hopper engine that are no single features.
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
    const Features served = kContiguous.with(Features::of(F::kFloat8Keys))
                                .without(Features::of(F::kMask, F::kAlibi, F::kKeyOrigins));
    const std::string words = unlisted(c.features, served);
    if (!words.empty()) return "hopper takes no " + words + " with global_tokens given as indices";
  }
  hopper::Wanted half = {Features::of(F::kList)};
  half.block_q = 64;
  const int32_t least_rows = hopper::find_kernel(head_dim, half).exists() ? 64 : 128;
  if (c.block_q % least_rows != 0) {
    return "hopper takes query blocks that are multiples of " + std::to_string(least_rows) +
           " at head dim " + std::to_string(head_dim) + ", not " + std::to_string(c.block_q);
  }
  return "";
}

/// Limits of the decode engine that are no single features.
std::string decode_refusal(const Case& c) {
  const bool strided = c.features.any(Features::of(F::kDilation, F::kColumns));
  if (c.features.has(F::kFloat8Keys) && strided) {
    return "decode takes no keys of float8 with dilation or strided columns";
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
                   F::kPacked, F::kUsedKeys, F::kPaged);
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
  const struct {
    const char* words;
    int32_t size, most;
  } limits[] = {{"queries", c.problem.seq_q, small::kMostQueries},
                {"keys", c.problem.seq_kv, small::kMostKeys},
                {"columns of a head", c.problem.widest_dim(), small::kMostHeadDim}};
  for (const auto& limit : limits) {
    if (limit.size <= limit.most) continue;
    return "small takes up to " + std::to_string(limit.most) + " " + limit.words + ", not " +
           std::to_string(limit.size);
  }
  return "";
}

/// Why an engine does not serve the case; empty when it does.
std::string refusal(const EngineLimits& engine, const Case& c) {
  const std::string name = engine.name;
  if (c.cuda && c.sm < engine.least_sm) {
    return name + " needs compute capability " + capability_of(engine.least_sm) +
           ", this device has " + capability_of(c.sm);
  }
  if (name == "hopper" && c.sm != engine.least_sm) {
    return "hopper needs compute capability 9.0, this device has " + capability_of(c.sm);
  }
  const std::string words = unlisted(c.features, engine.accepts);
  if (!words.empty()) return name + " takes no " + words;
  if (name == "hopper") return hopper_refusal(c);
  if (name == "decode") return decode_refusal(c);
  if (name == "small") return small_refusal(c);
  return "";
}

/// Whether the engine of that name serves the case.
bool serves(const Case& c, const std::string& name) {
  for (const EngineLimits& engine : kEngines) {
    if (engine.cuda == c.cuda && name == engine.name) return refusal(engine, c).empty();
  }
  return false;
}

/// The keys by which engines that split them are chosen: those that there are, not the bound of a
/// sequence's, since a larger bound changes no bit.
int32_t keys_of(const Case& c) { return imax(c.problem.seq_kv, c.packed_keys); }

/// Whether hopper's kernels of few queries serve a call of so many that its tiles, which heads
/// share, are worth more than decode's, contiguous or not, so that pages have the engine of
/// contiguous keys; but where the device alone knows where queries stand, which decode serves
/// better (docs/kernels/decode.md).
bool fills_tiles_of_hopper(const Case& c) {
  constexpr int32_t kLeastQueries = 9;
  const Features own = c.features.without(hopper::kLengths);
  if (c.problem.seq_q < kLeastQueries || !own.within(hopper::kFewRaggedCalls)) return false;
  if (own.has(F::kQueryOffsets)) return false;
  const int32_t head_dim = c.problem.widest_dim();
  const Features packed = own.with(Features::of(F::kPacked));
  const hopper::Entry alone = hopper::find_kernel(head_dim, {own, hopper::Split::kAll});
  const hopper::Entry shared = hopper::find_kernel(head_dim, {packed, hopper::Split::kAll});
  return alone.exists() && hopper::kKernels[alone.kernel].is_plain() && shared.exists() &&
         shared.head_dim == alone.head_dim &&
         shared.head_dim == hopper::find_kernel(head_dim, {packed}).head_dim;
}

/// From how many keys on decode, which splits them, is faster than hopper: where products for 16
/// queries take longer than a merge, and for the fewest queries on any, since hopper has a tile of
/// them for each query head. Never where query heads fill hopper's tiles, whose thread blocks split
/// keys too (docs/kernels/decode.md).
int32_t least_keys_of_decode(const Case& c) {
  constexpr int32_t kFewest = 8, kLeast = 1024;
  if (fills_tiles_of_hopper(c)) return kUnlimited;
  return c.problem.seq_q <= kFewest ? 0 : kLeast;
}

/// Whether decode, which stores the scores of all pairs, is faster at token top-k than engines that
/// rank them tile by tile and, for few queries, fill little of a device. Of packed and paged
/// sequences, whose lengths only the device knows, few queries alone.
bool is_ranked_by_decode(const Case& c) {
  constexpr int32_t kKeysOfQuery = 512;
  if (c.problem.seq_q <= kFewQueries) return true;
  return !c.features.any(hopper::kLengths) && c.problem.seq_kv >= kKeysOfQuery * c.problem.seq_q;
}

/// Whether the small engine, whose thread blocks hold all keys of a sequence, is faster than those
/// that walk over them: on the fewest keys always; on more where masks are read in place, and where
/// heads are narrow, of which a multiprocessor holds many (docs/kernels/small.md). A sequence that
/// may be packed beside longer ones has the bits of their engine: small has hopper's where scores
/// are only scaled, and the fewest queries are decode's.
bool is_left_to_small(const Case& c) {
  constexpr int32_t kFewKeys = 64, kFewRows = 80, kFewest = 8;
  constexpr Features kNeverPacked = Features::of(F::kMask, F::kKeyBounds);
  constexpr Features kAsHopper =
      Features::of(F::kWindow, F::kLead, F::kGlobalRows, F::kKeyOrigins, F::kSinkLogits,
                   F::kQueryOffsets, F::kValueDim, F::kPacked, F::kUsedKeys);
  if (!serves(c, "small")) return false;
  const bool as_hopper =
      c.problem.seq_q > kFewest && c.features.within(kAsHopper) && serves(c, "hopper");
  if (!as_hopper && !c.features.any(kNeverPacked)) return false;
  const int32_t head_dim = c.problem.widest_dim();
  if (c.problem.seq_kv <= kFewKeys || head_dim <= 32) return true;
  if (head_dim <= 64 && c.problem.seq_q <= kFewRows) return true;
  return c.features.has(F::kMask) && c.problem.seq_q > kFewest;
}

/// Why `auto` skips a supported engine for one that is faster here.
std::string deferral(const EngineLimits& engine, const Case& c) {
  const std::string name = engine.name;
  const bool ranks = c.features.has(F::kTopK);
  const bool ranked_by_decode = ranks && is_ranked_by_decode(c);
  const std::string calls =
      std::to_string(c.problem.seq_q) + " queries on " + std::to_string(keys_of(c)) + " keys";
  if (name == "decode" && ranks && !ranked_by_decode) {
    return "decode leaves token top-k of " + calls + " to engines that store no scores";
  }
  const bool to_small = is_left_to_small(c);
  if (name == "small" && !to_small) {
    return "small leaves " + calls + " to engines that serve longer sequences too";
  }
  if ((name == "hopper" || name == "decode") && to_small) {
    return name + " leaves " + calls + " to small, whose thread blocks hold all keys of a sequence";
  }
  if (name != "hopper") return "";
  if (c.cut_small) {
    return "hopper leaves windows that reach little of a large cache of float8 to engines that "
           "read it in place";
  }
  const bool float8 = c.features.has(F::kFloat8Keys);
  if (c.features.has(F::kGlobalIndices) || !decode_refusal(c).empty()) return "";
  if (float8) {
    return "hopper leaves up to " + std::to_string(kFewQueries) +
           " queries on keys of float8 to decode, which reads them in place";
  }
  if (ranked_by_decode) {
    return "hopper leaves token top-k of " + calls + " to decode, which reads keys once";
  }
  if (ranks) return "";
  const int32_t least = least_keys_of_decode(c);
  if (keys_of(c) < least) return "";
  if (least == 0) {
    return "hopper leaves " + std::to_string(c.problem.seq_q) +
           " queries to decode, whose tiles are of a key head's queries";
  }
  return "hopper leaves " + std::to_string(c.problem.seq_q) + " queries on " +
         std::to_string(least) + " keys or more to decode, which splits the keys";
}

/// What slows the engine that serves the case; mostly nothing.
std::string remark(const EngineLimits& engine, const Case& c) {
  if (std::string(engine.name) == "portable" && c.sm < 80 && c.problem.dtype == Dtype::kBFloat16) {
    return "portable multiplies bfloat16 without tensor cores before compute capability 8.0, this "
           "device has " +
           capability_of(c.sm) + "; float16 has them";
  }
  return "";
}

std::vector<std::string> names_of(bool cuda) {
  std::vector<std::string> names;
  for (const EngineLimits& engine : kEngines) {
    if (engine.cuda == cuda) names.push_back(engine.name);
  }
  return names;
}

}  // namespace

const std::vector<std::string>& engine_names(bool cuda) {
  static const std::vector<std::string> kCpu = names_of(false), kCuda = names_of(true);
  return cuda ? kCuda : kCpu;
}

Choice choose_engine(const Case& c, const std::string& requested) {
  Choice choice;
  for (const EngineLimits& engine : kEngines) {
    if (engine.cuda != c.cuda || (requested != "auto" && requested != engine.name)) continue;
    std::string reason = refusal(engine, c);
    if (reason.empty() && requested == "auto") reason = deferral(engine, c);
    if (reason.empty()) {
      choice.engine = engine.name;
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
