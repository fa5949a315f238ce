// What each engine accepts, and that a feature which nobody has listed is refused by all of them.

#include "check.h"
#include "plain_case.h"
#include "select_features.h"

using namespace sparse_attn;

namespace {

void test_a_feature_that_nobody_has_listed_is_refused() {
  constexpr auto kMadeUp = static_cast<Feature>(60);
  for (const EngineLimits& engine : kEngines) {
    Case c = plain_case(engine.cuda ? 90 : 0, 64);
    c.problem.seq_q = 1;
    c.problem.seq_kv = 64;
    CHECK(engine_of(c, engine.name) == engine.name, std::string(engine.name) + " serves the case");
    c.features.add(kMadeUp);
    const Choice choice = choose_engine(c, engine.name);
    const std::string reason = choice.reasons.empty() ? "none" : choice.reasons[0];
    CHECK(choice.engine.empty() && choice.reasons.size() == 1, engine.name);
    CHECK(reason == std::string(engine.name) + " takes no feature that it has not listed", reason);
  }
  Case c = plain_case(90, 64);
  c.features.add(kMadeUp);
  CHECK(engine_of(c).empty(), "no engine takes it");
  CHECK(!kSelections.has(kMadeUp), "no selection does");
}

/// Features are computed from a selection's parts as from a call's, so that a field of these which
/// selections do not serve shows.
void test_selections_list_what_they_serve() {
  SelectParams params;
  params.keys.dtype = params.problem.dtype;
  CHECK(features_of(params).within(kSelections), "plain");
  params.sequences.first_keys = params.sequences.used_keys = params.sequences.key_origins =
      params.keys.table = params.scores.bounds.data = &params.num_q;
  params.scores.softcap = 1.0f;
  CHECK(features_of(params).within(kSelections), "all that is listed");
  const float number = 1.0f;
  for (int32_t field = 0; field < 3; ++field) {
    SelectParams others = params;
    if (field == 0) others.scores.mask.kind = MaskKind::kBool;
    if (field == 1) others.scores.sink_logits = &number;
    if (field == 2) others.scores.alibi.slopes = &number;
    const Feature feature[] = {Feature::kMask, Feature::kSinkLogits, Feature::kAlibi};
    CHECK(unlisted(features_of(others), kSelections) == words_of(feature[field]),
          std::to_string(field));
  }
}

void test_every_feature_has_words() {
  for (int32_t f = 0; f < static_cast<int32_t>(Feature::kCount); ++f) {
    CHECK(std::string(words_of(static_cast<Feature>(f))) != words_of(Feature::kCount),
          std::to_string(f));
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
    c.features.add(Feature::kKeyOrigins);
    const Choice choice = choose_engine(c, "decode");
    CHECK(choice.reasons[0] == "decode takes no key_origin with token top-k", choice.reasons[0]);
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
  // Kernels of few queries have tiles of their own at some, which a sequence alone has not.
  for (Feature lengths : {Feature::kPacked, Feature::kUsedKeys, Feature::kPaged}) {
    for (int32_t head_dim = 8; head_dim <= 256; head_dim += 8) {
      for (int32_t seq_q : {17, 64, 300}) {
        Case c = plain_case(90, head_dim);
        c.problem.seq_q = seq_q;
        c.features.add(lengths);
        c.features.add(Feature::kFloat8Keys);
        CHECK(engine_of(c) == "hopper", std::to_string(head_dim));
      }
    }
  }
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

/// Keys past all windows are left out where rows see their windows alone: never under a feature
/// that shows others, nor under one that nobody has listed.
void test_rows_see_more_than_windows_unless_a_list_says() {
  for (Feature feature :
       {Feature::kKeyOrigins, Feature::kLead, Feature::kColumns, Feature::kGlobalRows,
        Feature::kGlobalIndices, Feature::kList, Feature::kPartialBlocks, static_cast<Feature>(60)})
    CHECK(!Features::of(feature).within(kWindowsAlone), std::to_string(static_cast<int>(feature)));
  CHECK(Features::of(Feature::kWindow, Feature::kDilation).within(kWindowsAlone), "windows");
}

}  // namespace

int main() {
  test_a_feature_that_nobody_has_listed_is_refused();
  test_selections_list_what_they_serve();
  test_every_feature_has_words();
  test_cases_are_alike_where_all_fields_are();
  test_hopper_takes_top_k_of_scaled_scores_alone();
  test_decode_keeps_highest();
  test_hopper_takes_every_head_dim();
  test_the_wider_head_dim_chooses_the_kernel();
  test_hopper_takes_biases();
  test_small_says_what_it_leaves();
  test_hopper_takes_sequences();
  test_rows_see_more_than_windows_unless_a_list_says();
  return check::summary();
}
