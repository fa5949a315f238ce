// The choice of engine: why `auto` skips one that would serve the call for one that is faster.

#include <vector>

#include "check.h"
#include "plain_case.h"

using namespace sparse_attn;

namespace {

void test_few_queries_on_many_keys_are_split() {
  constexpr int32_t kNever = 1 << 30;
  struct Least {
    int32_t rows, keys;
  };
  for (const Least least : {Least{1, 0}, {2, 0}, {8, 0}, {9, kNever}, {17, kNever}}) {
    for (int32_t keys : {65, 1024, 1 << 17}) {
      const int32_t rows = least.rows;
      Case c = plain_case(90, 128);
      c.problem.seq_q = rows;
      c.problem.seq_kv = keys;
      const bool split = keys >= least.keys;
      const Choice choice = choose_engine(c, "auto");
      CHECK(choice.engine == (split ? "decode" : "hopper"), choice.engine);
      CHECK(choice.reasons.size() == (split ? 1u : 0u), std::to_string(choice.reasons.size()));
      CHECK(engine_of(c, "hopper") == "hopper" && engine_of(c, "portable") == "portable",
            "by name");
      CHECK(engine_of(c, "decode") == (rows <= 16 ? "decode" : ""), "by name");
    }
  }
  Case c = plain_case(80, 40);
  c.problem.seq_q = 1;
  CHECK(engine_of(c) == "decode", "on 8.0");
  c.sm = 75;
  CHECK(engine_of(c) == "portable", "on 7.5");
}

/// Up to 8 queries are left to decode, 9 to 16 from 1024 keys on, but plain calls of 9 and more, of
/// which thread blocks share the keys. Of contiguous, packed and paged keys alike.
void test_few_rows_of_hopper_have_one_engine_wherever_keys_lie() {
  struct Kind {
    std::vector<Feature> features;
    bool plain;
  };
  const Kind kinds[] = {{{}, true},
                        {{Feature::kWindow}, true},
                        {{Feature::kSinkLogits}, true},
                        {{Feature::kQueryOffsets}, false},
                        {{Feature::kWindow, Feature::kDilation}, false},
                        {{Feature::kSoftcap}, false},
                        {{Feature::kOddScale}, false},
                        {{Feature::kWindow, Feature::kLead}, false},
                        {{Feature::kKeyOrigins}, false},
                        {{Feature::kWindow, Feature::kGlobalRows}, false}};
  const std::vector<std::vector<Feature>> holdings = {
      {},
      {Feature::kPacked},
      {Feature::kUsedKeys},
      {Feature::kPacked, Feature::kUsedKeys, Feature::kPaged}};
  for (const Kind& kind : kinds) {
    for (int32_t head_dim : {8, 32, 40, 48, 56, 64, 72, 80, 96, 112, 120, 128, 136, 200, 256}) {
      for (int32_t rows : {8, 9, 16}) {
        for (int32_t keys : {1023, 1024, 4096, 1 << 17}) {
          for (const auto& holding : holdings) {
            Case c = plain_case(90, head_dim);
            c.problem.seq_q = rows;
            c.problem.seq_kv = keys;
            for (Feature feature : kind.features) c.features.add(feature);
            for (Feature feature : holding) c.features.add(feature);
            const bool shares = rows > 8 && kind.plain;
            const bool stays = (rows > 8 && keys < 1024) || shares;
            CHECK(
                engine_of(c) == (stays ? "hopper" : "decode"),
                std::to_string(head_dim) + " " + std::to_string(rows) + " " + std::to_string(keys));
          }
        }
      }
    }
  }
}

/// Of few queries under a mask or ALiBi hopper's heads share no tiles.
void test_few_biased_rows_are_left_to_decode() {
  for (Feature bias : {Feature::kMask, Feature::kAlibi}) {
    for (int32_t rows : {9, 16, 17}) {
      for (int32_t keys : {200, 1000, 5000}) {
        Case c = plain_case(90, 128);
        c.problem.seq_q = rows;
        c.problem.seq_kv = keys;
        c.features.add(bias);
        CHECK(engine_of(c) == (rows <= 16 ? "decode" : "hopper"), engine_of(c));
      }
    }
  }
}

void test_keys_of_float8_are_read_in_place_by_few_queries() {
  for (int32_t rows : {1, 16, 17}) {
    Case c = plain_case(90, 128);
    c.problem.seq_q = rows;
    c.features.add(Feature::kFloat8Keys);
    CHECK(engine_of(c) == (rows <= 16 ? "decode" : "hopper"), engine_of(c));
    CHECK(engine_of(c, "hopper") == "hopper", "by name");
    c.features.add(Feature::kDilation);
    CHECK(engine_of(c) == "hopper", "decode takes no strided keys of float8");
  }
  Case c = plain_case(90, 128);
  c.features.add(Feature::kFloat8Keys);
  c.cut_small = true;
  CHECK(engine_of(c) == "portable" && engine_of(c, "hopper") == "hopper", "small sections");
  for (Feature feature : {Feature::kMask, Feature::kAlibi, Feature::kTopK}) {
    c = plain_case(90, 128);
    c.features.add(Feature::kFloat8Keys);
    c.features.add(feature);
    const Choice choice = choose_engine(c, "auto");
    CHECK(choice.engine == "portable", choice.engine);
    CHECK(choice.reasons[0].find("with keys of float8") != std::string::npos, choice.reasons[0]);
  }
}

void test_bfloat16_without_tensor_cores_is_told() {
  for (Dtype dtype : {Dtype::kBFloat16, Dtype::kFloat16}) {
    for (int32_t sm : {75, 80}) {
      const Choice choice = choose_engine(plain_case(sm, 64, dtype), "portable");
      const bool said = !choice.reasons.empty();
      CHECK(choice.engine == "portable", choice.engine);
      CHECK(said == (sm == 75 && dtype == Dtype::kBFloat16), std::to_string(sm));
    }
  }
}

void test_short_sequences_are_left_to_small() {
  struct Expected {
    int32_t rows, keys, head_dim;
    const char *plain, *masked;
  };
  for (const Expected& e : {Expected{1, 0, 128, "decode", "small"},
                            {8, 64, 128, "decode", "small"},
                            {9, 64, 128, "small", "small"},
                            {128, 64, 128, "small", "small"},
                            {129, 64, 128, "small", "small"},
                            {1 << 20, 64, 128, "small", "small"},
                            {64, 64, 136, "hopper", "hopper"},
                            {8, 65, 128, "decode", "decode"},
                            {9, 65, 128, "hopper", "small"},
                            {128, 128, 128, "hopper", "small"},
                            {129, 128, 128, "hopper", "hopper"},
                            {129, 128, 64, "hopper", "small"},
                            {128, 129, 128, "hopper", "hopper"},
                            {128, 128, 32, "small", "small"},
                            {80, 128, 64, "small", "small"},
                            {81, 128, 64, "hopper", "small"}}) {
    Case c = plain_case(90, e.head_dim);
    c.problem.seq_q = e.rows;
    c.problem.seq_kv = e.keys;
    const std::string text = std::to_string(e.rows) + " on " + std::to_string(e.keys) + " of " +
                             std::to_string(e.head_dim);
    CHECK(engine_of(c) == e.plain, text + ": " + engine_of(c));
    c.features.add(Feature::kMask);
    CHECK(engine_of(c) == e.masked, text + " masked: " + engine_of(c));
    CHECK(engine_of(c, "hopper") == "hopper", "by name");
  }
}

/// A sequence has the bits of its neighbours' engine, unless it cannot be packed.
void test_small_takes_what_has_the_bits_of_longer_calls() {
  Case short_case = plain_case(90, 64);
  short_case.problem.seq_q = short_case.problem.seq_kv = 64;
  for (Feature feature : {Feature::kWindow, Feature::kLead, Feature::kGlobalRows,
                          Feature::kKeyOrigins, Feature::kSinkLogits, Feature::kQueryOffsets,
                          Feature::kValueDim, Feature::kPacked, Feature::kUsedKeys}) {
    Case c = short_case;
    c.features.add(feature);
    CHECK(engine_of(c) == "small", words_of(feature));
  }
  for (Feature feature : {Feature::kSoftcap, Feature::kOddScale, Feature::kAlibi,
                          Feature::kDilation, Feature::kColumns}) {
    for (Feature own : {Feature::kMask, Feature::kKeyBounds}) {
      Case c = short_case;
      c.features.add(feature);
      CHECK(engine_of(c) == "hopper", words_of(feature));
      CHECK(engine_of(c, "small") == "small", "by name");
      c.features.add(own);
      CHECK(engine_of(c) == "small", words_of(feature));
    }
  }
  Case packed = short_case;
  packed.features.add(Feature::kPacked);
  packed.packed_keys = 1 << 20;
  CHECK(engine_of(packed) == "small", "by the longest sequence, not by all of them");
  packed.problem.seq_q = 8;
  CHECK(engine_of(packed) == "decode", "as its sequences alone");
  short_case.sm = 80;
  CHECK(engine_of(short_case) == "portable", "on 8.0, where longer calls are portable's");
  short_case.features.add(Feature::kMask);
  CHECK(engine_of(short_case) == "small", "on 8.0 with a mask");
  short_case.sm = 75;
  CHECK(engine_of(short_case) == "portable", "on 7.5");
}

}  // namespace

int main() {
  test_few_queries_on_many_keys_are_split();
  test_few_rows_of_hopper_have_one_engine_wherever_keys_lie();
  test_few_biased_rows_are_left_to_decode();
  test_keys_of_float8_are_read_in_place_by_few_queries();
  test_bfloat16_without_tensor_cores_is_told();
  test_short_sequences_are_left_to_small();
  test_small_takes_what_has_the_bits_of_longer_calls();
  return check::summary();
}
