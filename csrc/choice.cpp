// Which of the engines that serve a call is the fastest.
#include "choice.h"

#include "cuda/hopper/table.h"

namespace sparse_attn {
namespace {

using F = Feature;
namespace hopper = cuda::hopper;

/// Queries up to which decode is faster than hopper on any number of keys.
constexpr int32_t kFewest = 8;

bool serves(const std::string& engine, const Case& c) { return refusal(engine, c).empty(); }

/// The keys by which engines that split them are chosen: those that there are, not the bound of a
/// sequence's, since a larger bound changes no bit.
int32_t keys_of(const Case& c) { return imax(c.problem.seq_kv, c.packed_keys); }

/// Whether hopper's kernels of few queries serve a call of so many that its tiles, which heads
/// share, are worth more than decode's, contiguous or not, so that pages have the engine of
/// contiguous keys; but where the device alone knows where queries stand, which decode serves
/// better (docs/kernels/decode.md).
bool fills_tiles_of_hopper(const Case& c) {
  const Features own = c.features.without(hopper::kLengths);
  if (c.problem.seq_q <= kFewest || !own.within(hopper::kFewRaggedCalls)) return false;
  if (own.has(F::kQueryOffsets)) return false;
  const int32_t head_dim = c.problem.widest_dim();
  const Features packed = own.with(Features::of(F::kPacked));
  const hopper::Entry alone = hopper::find_kernel(head_dim, {own, hopper::Split::kAll});
  const hopper::Entry shared = hopper::find_kernel(head_dim, {packed, hopper::Split::kAll});
  return alone.exists() && hopper::kKernels[alone.kernel].is_plain() && shared.exists() &&
         hopper::are_alike(shared, alone) &&
         hopper::are_alike(shared, hopper::find_kernel(head_dim, {packed}));
}

/// From how many keys on decode, which splits them, is faster than hopper: where products for 16
/// queries take longer than a merge, and for the fewest queries on any, since hopper has a tile of
/// them for each query head. Never where query heads fill hopper's tiles, whose thread blocks split
/// keys too (docs/kernels/decode.md).
int32_t least_keys_of_decode(const Case& c) {
  constexpr int32_t kLeast = 1024;
  if (fills_tiles_of_hopper(c)) return kUnlimited;
  // Under a mask or ALiBi hopper has a tile for each query head.
  if (c.features.any(hopper::kBiases) && !c.features.has(F::kList)) return 0;
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
/// heads are narrow, of which a multiprocessor holds many (docs/kernels/small.md), but not on many
/// queries of wide heads. A sequence that may be packed beside longer ones has the bits of their
/// engine: small has hopper's where scores are only scaled, and the fewest queries are decode's.
bool is_left_to_small(const Case& c) {
  constexpr int32_t kFewKeys = 64, kFewRows = 80, kMasked = 128;
  constexpr Features kNeverPacked = Features::of(F::kMask, F::kKeyBounds);
  constexpr Features kAsHopper =
      Features::of(F::kWindow, F::kLead, F::kGlobalRows, F::kKeyOrigins, F::kSinkLogits,
                   F::kQueryOffsets, F::kValueDim, F::kPacked, F::kUsedKeys);
  if (!serves("small", c)) return false;
  const bool as_hopper =
      c.problem.seq_q > kFewest && c.features.within(kAsHopper) && serves("hopper", c);
  if (!as_hopper && !c.features.any(kNeverPacked)) return false;
  const int32_t head_dim = c.problem.widest_dim();
  if (c.problem.seq_kv <= kFewKeys || head_dim <= 32) return true;
  if (head_dim <= 64 && c.problem.seq_q <= kFewRows) return true;
  return c.features.has(F::kMask) && c.problem.seq_q > kFewest &&
         (head_dim <= 64 || c.problem.seq_q <= kMasked);
}

/// Why `auto` skips a supported engine for one that is faster here.
std::string deferral(const std::string& name, const Case& c) {
  const bool ranks = c.features.has(F::kTopK);
  const bool ranked_by_decode = ranks && is_ranked_by_decode(c);
  const auto calls = [&c] {  // made where a sentence asks for it: most calls need none
    return std::to_string(c.problem.seq_q) + " queries on " + std::to_string(keys_of(c)) + " keys";
  };
  if (name == "decode" && ranks && !ranked_by_decode) {
    return "decode leaves token top-k of " + calls() + " to engines that store no scores";
  }
  const bool to_small = is_left_to_small(c);
  if (name == "small" && !to_small) {
    return "small leaves " + calls() + " to engines that serve longer sequences too";
  }
  if ((name == "hopper" || name == "decode") && to_small) {
    return name + " leaves " + calls() +
           " to small, whose thread blocks hold all keys of a sequence";
  }
  if (name != "hopper") return "";
  if (c.cut_small) {
    return "hopper leaves windows that reach little of a large cache of float8 to engines that "
           "read it in place";
  }
  const bool float8 = c.features.has(F::kFloat8Keys);
  if (c.features.has(F::kGlobalIndices) || !serves("decode", c)) return "";
  if (float8) {
    return "hopper leaves up to " + std::to_string(kFewQueries) +
           " queries on keys of float8 to decode, which reads them in place";
  }
  if (ranked_by_decode) {
    return "hopper leaves token top-k of " + calls() + " to decode, which reads keys once";
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
std::string remark(const std::string& name, const Case& c) {
  if (name == "portable" && c.sm < 80 && c.problem.dtype == Dtype::kBFloat16) {
    return "portable multiplies bfloat16 without tensor cores before compute capability 8.0, this "
           "device has " +
           capability_of(c.sm) + "; float16 has them";
  }
  return "";
}

}  // namespace

Choice choose_engine(const Case& c, const std::string& requested) {
  const bool any = requested == "auto";
  const std::vector<std::string> alone = {requested};
  Choice choice;
  for (const std::string& name : any ? engine_names(c.cuda) : alone) {
    std::string reason = refusal(name, c);
    if (reason.empty() && any) reason = deferral(name, c);
    if (reason.empty()) {
      choice.engine = name;
      reason = remark(name, c);
    }
    if (!reason.empty()) choice.reasons.push_back(reason);
    if (!choice.engine.empty()) break;
  }
  return choice;
}

}  // namespace sparse_attn
