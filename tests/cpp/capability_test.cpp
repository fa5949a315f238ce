// The choice of engine: what each engine accepts, why `auto` skips one, and that a feature which
// nobody has listed is refused by all of them.
#include "capability.cpp"

#include <vector>

#include "check.h"
#include "choice.cpp"

using namespace sparse_attn;

namespace {

Case plain_case(int32_t sm, int32_t head_dim, Dtype dtype = Dtype::kBFloat16) {
  Case c;
  c.cuda = sm > 0;
  c.sm = sm;
  c.problem.batch = c.problem.heads_q = c.problem.heads_kv = 1;
  c.problem.seq_q = c.problem.seq_kv = 300;
  c.problem.head_dim = c.problem.value_dim = head_dim;
  c.problem.dtype = dtype;
  c.features.add(Feature::kFloat32, dtype == Dtype::kFloat32);
  return c;
}

std::string engine_of(const Case& c, const char* requested = "auto") {
  return choose_engine(c, requested).engine;
}

void test_a_feature_that_nobody_has_listed_is_refused() {
  constexpr auto kMadeUp = static_cast<Feature>(60);
  for (const EngineLimits& engine : kEngines) {
    Case c = plain_case(engine.cuda ? 90 : 0, 64);
    c.problem.seq_q = 1;
    c.problem.seq_kv = 64;
    CHECK(engine_of(c, engine.name) == engine.name, std::string(engine.name) + " serves the case");
    c.features.add(kMadeUp);
    const Choice choice = choose_engine(c, engine.name);
    CHECK(choice.engine.empty() && choice.reasons.size() == 1, engine.name);
    CHECK(
        choice.reasons[0] == std::string(engine.name) + " takes no feature that it has not listed",
        choice.reasons[0]);
  }
  Case c = plain_case(90, 64);
  c.features.add(kMadeUp);
  CHECK(engine_of(c).empty(), "no engine takes it");
}

void test_every_feature_has_words() {
  for (int32_t f = 0; f < static_cast<int32_t>(Feature::kCount); ++f) {
    CHECK(std::string(words_of(static_cast<Feature>(f))) != words_of(Feature::kCount),
          std::to_string(f));
  }
}

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

void test_cases_are_alike_where_all_fields_are() {
  const Case one = plain_case(90, 64);
  CHECK(one == plain_case(90, 64), "alike");
  Case others[16];
  for (Case& other : others) other = one;
  others[0].cuda = false;
  others[1].sm = 80;
  others[2].problem.batch = 7;
  others[3].problem.heads_q = 7;
  others[4].problem.heads_kv = 7;
  others[5].problem.seq_q = 7;
  others[6].problem.seq_kv = 7;
  others[7].problem.head_dim = 7;
  others[8].problem.value_dim = 7;
  others[9].problem.dtype = Dtype::kFloat32;
  others[10].features.add(Feature::kSoftcap);
  others[11].block_q = 7;
  others[12].topk = 7;
  others[13].packed_keys = 7;
  others[14].may_split = true;
  others[15].cut_small = true;
  for (int32_t i = 0; i < 16; ++i) CHECK(!(one == others[i]), std::to_string(i));
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

void test_hopper_takes_top_k_of_scaled_scores_alone() {
  for (int32_t head_dim : {64, 96, 128, 256}) {
    Case c = plain_case(90, head_dim);
    c.features.add(Feature::kTopK);
    CHECK(engine_of(c) == (head_dim == 64 || head_dim == 128 ? "hopper" : "portable"),
          std::to_string(head_dim));
  }
  for (Feature feature : {Feature::kKeyBounds, Feature::kSoftcap, Feature::kOddScale}) {
    Case c = plain_case(90, 128);
    c.features.add(Feature::kTopK);
    c.features.add(feature);
    const Choice choice = choose_engine(c, "auto");
    CHECK(choice.engine == "portable" && engine_of(c, "hopper").empty(), choice.engine);
    CHECK(choice.reasons[0].find("with token top-k") != std::string::npos, choice.reasons[0]);
  }
}

/// Token top-k of few queries and few kept keys.
void test_decode_keeps_highest() {
  for (int32_t sm : {80, 90, 120}) {
    Case c = plain_case(sm, 96);
    c.problem.seq_q = kFewQueries;
    c.features.add(Feature::kTopK);
    c.topk = cuda::decode::kMostKept;
    CHECK(engine_of(c) == "decode", engine_of(c));
    ++c.topk;
    CHECK(engine_of(c) != "decode", "keeps more than decode holds");
    c.topk = 1;
    for (int32_t rows : {17, cuda::decode::kMostRanking}) {
      c.problem.seq_q = rows;
      for (int32_t keys : {512 * rows - 1, 512 * rows}) {
        c.problem.seq_kv = keys;
        CHECK(engine_of(c) == (keys == 512 * rows ? "decode" : "portable"), engine_of(c));
        CHECK(engine_of(c, "decode") == "decode", "by name");
      }
      Case ragged = c;
      ragged.features.add(Feature::kUsedKeys);
      CHECK(engine_of(ragged) == "portable", "what a sequence takes follows from all of them");
    }
    ++c.problem.seq_q;
    CHECK(engine_of(c, "decode").empty(), "more than few queries");
    c.problem.seq_q = 1;
    c.features.add(Feature::kSoftcap);
    const Choice choice = choose_engine(c, "decode");
    CHECK(choice.reasons[0] == "decode takes no softcap with token top-k", choice.reasons[0]);
  }
}

/// Head dims between those of the table take the next one, whose lists may be of low blocks.
void test_hopper_takes_every_head_dim() {
  for (int32_t head_dim = 8; head_dim <= 256; head_dim += 8) {
    Case c = plain_case(90, head_dim);
    CHECK(engine_of(c) == "hopper", std::to_string(head_dim));
    c.features.add(Feature::kList);
    for (int32_t block_q : {32, 64, 128}) {
      c.block_q = block_q;
      const bool served = block_q == 128 || (block_q == 64 && head_dim <= 192);
      CHECK(engine_of(c) == (served ? "hopper" : "portable"), std::to_string(head_dim));
    }
  }
  const Choice choice = choose_engine(plain_case(90, 264), "hopper");
  CHECK(choice.reasons[0] == "hopper is built for head dims up to 256, not 264", choice.reasons[0]);
}

void test_the_wider_head_dim_chooses_the_kernel() {
  Case c = plain_case(90, 64);
  c.problem.value_dim = 192;
  c.features.add(Feature::kValueDim);
  CHECK(engine_of(c) == "hopper", engine_of(c));
  c.features.add(Feature::kList);
  c.block_q = 64;
  CHECK(engine_of(c) == "hopper", "lists of 64 rows");
  c.problem.value_dim = 200;
  CHECK(engine_of(c) == "portable", "lists of 64 rows end at head dim 192");
  c = plain_case(90, 64);
  c.features.add(Feature::kValueDim);
  c.features.add(Feature::kTopK);
  CHECK(engine_of(c) == "portable", "token top-k");
}

void test_hopper_takes_biases() {
  for (Feature feature : {Feature::kMask, Feature::kAlibi}) {
    for (int32_t head_dim = 8; head_dim <= 256; head_dim += 8) {
      const std::string text = std::to_string(head_dim);
      Case c = plain_case(90, head_dim);
      c.features.add(feature);
      CHECK(engine_of(c) == "hopper", text);
      c.features.add(Feature::kList);
      for (int32_t block_q : {64, 128, 192}) {
        c.block_q = block_q;
        const Choice choice = choose_engine(c, "auto");
        CHECK(choice.engine == (head_dim <= 128 ? "hopper" : "portable"), text + choice.engine);
        if (head_dim <= 128) continue;
        CHECK(choice.reasons[0].find(" with block lists at head dims up to 128, not " + text) !=
                  std::string::npos,
              choice.reasons[0]);
      }
    }
    Case c = plain_case(90, 128);
    c.features.add(feature);
    c.features.add(Feature::kTopK);
    CHECK(engine_of(c) == "portable", "token top-k");
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

void test_small_says_what_it_leaves() {
  Case c = plain_case(90, 64);
  CHECK(choose_engine(c, "small").reasons[0] == "small takes up to 128 keys, not 300", "");
  c.problem.seq_kv = 64;
  CHECK(engine_of(c) == "small", "queries of any number");
  c.features.add(Feature::kPacked);
  CHECK(choose_engine(c, "small").reasons[0] ==
            "small takes up to 128 queries of packed sequences, not 300",
        "");
  CHECK(engine_of(c) == "hopper", "another serves them");
  c = plain_case(90, 136);
  c.problem.seq_q = c.problem.seq_kv = 128;
  CHECK(choose_engine(c, "small").reasons[0] == "small takes up to 128 columns of a head, not 136",
        "");
  for (Feature feature : {Feature::kFloat32, Feature::kUnaligned, Feature::kList, Feature::kTopK,
                          Feature::kPaged, Feature::kFloat8Keys}) {
    c = plain_case(90, 64);
    c.problem.seq_q = c.problem.seq_kv = 64;
    c.features.add(feature);
    const std::string reason = choose_engine(c, "small").reasons[0];
    CHECK(reason == std::string("small takes no ") + words_of(feature), reason);
    CHECK(engine_of(c) != "small" && !engine_of(c).empty(), "another serves it");
  }
}

/// Whether or not some of them may be split.
void test_hopper_takes_sequences() {
  for (Feature lengths : {Feature::kPacked, Feature::kUsedKeys, Feature::kPaged}) {
    for (Feature feature :
         {Feature::kSoftcap, Feature::kColumns, Feature::kGlobalRows, Feature::kDilation}) {
      for (int32_t head_dim = 8; head_dim <= 256; head_dim += 8) {
        const std::string text = std::to_string(head_dim);
        Case c = plain_case(90, head_dim);
        c.features.add(lengths);
        CHECK(engine_of(c) == "hopper", text + " plain");
        c.features.add(feature);
        CHECK(engine_of(c) == "hopper", text + " " + std::to_string(static_cast<int>(feature)));
        c.may_split = true;
        CHECK(engine_of(c) == "hopper", text + " split");
      }
    }
  }
}

}  // namespace

int main() {
  test_a_feature_that_nobody_has_listed_is_refused();
  test_every_feature_has_words();
  test_few_queries_on_many_keys_are_split();
  test_few_rows_of_hopper_have_one_engine_wherever_keys_lie();
  test_few_biased_rows_are_left_to_decode();
  test_cases_are_alike_where_all_fields_are();
  test_keys_of_float8_are_read_in_place_by_few_queries();
  test_bfloat16_without_tensor_cores_is_told();
  test_hopper_takes_top_k_of_scaled_scores_alone();
  test_decode_keeps_highest();
  test_hopper_takes_every_head_dim();
  test_the_wider_head_dim_chooses_the_kernel();
  test_hopper_takes_biases();
  test_short_sequences_are_left_to_small();
  test_small_takes_what_has_the_bits_of_longer_calls();
  test_small_says_what_it_leaves();
  test_hopper_takes_sequences();
  return check::summary();
}
