// How decode cuts a call: thread blocks for each row tile, and who makes a row's output.
#include "check.h"
#include "cuda/decode/plan.h"

using namespace sparse_attn;
using namespace sparse_attn::cuda;
using namespace sparse_attn::cuda::decode;

namespace {

AttentionParams case_of(int32_t batch, int32_t seq_q, int32_t seq_kv) {
  AttentionParams params;
  params.problem = {batch, 8, 2, seq_q, seq_kv, 64, 64, Dtype::kFloat16};
  params.sequences.rows = seq_q;
  params.sequences.keys = seq_kv;
  params.sequences.query_offset = seq_kv - seq_q;
  return params;
}

/// Chunks that a device of `resident` thread blocks walks over one after the other.
int64_t time_of(int64_t blocks, int64_t splits, int64_t chunks, int64_t resident) {
  return ceil_div64(blocks * splits, resident) * ceil_div64(chunks, splits);
}

void test_no_last_wave_is_mostly_empty() {
  for (int32_t resident : {1, 40, 264}) {
    for (int32_t chunks : {1, 2, 3, 8, 12, 16, 33}) {
      for (int64_t blocks = 1; blocks < 700; ++blocks) {
        const int64_t splits = count_splits(blocks, chunks, resident);
        const std::string text = std::to_string(blocks) + " tiles of " + std::to_string(chunks) +
                                 " chunks, " + std::to_string(resident) + " at once";
        CHECK(splits >= 1 && splits <= chunks, text);
        const int64_t time = time_of(blocks, splits, chunks, resident);
        for (int64_t other = 1; other <= chunks && other * blocks <= 4 * resident; ++other) {
          CHECK(9 * time <= 10 * time_of(blocks, other, chunks, resident), text);
        }
      }
    }
  }
  CHECK(count_splits(8, 32, 264) == 32, "a long text alone");
  CHECK(count_splits(128, 32, 264) == 2, "one wave where two take as long");
  CHECK(count_splits(160, 12, 264) == 3, "four hundred and eighty, not three hundred and twenty");
}

void test_who_makes_the_output() {
  DeviceShape device;
  device.multiprocessors = 132;
  for (bool clusters : {false, true}) {
    device.clusters = clusters;
    for (int32_t seq_q : {1, 5, 16}) {
      for (int32_t keys : {0, 1, 128, kShortSequence}) {
        const SplitGrid grid = plan_grid(case_of(3, seq_q, keys), device);
        CHECK(grid.merging == Merging::kNone && grid.splits == 1, std::to_string(keys));
      }
    }
    const Merging few = plan_grid(case_of(1, 1, kShortSequence + 1), device).merging;
    CHECK(few == (clusters ? Merging::kByCluster : Merging::kByKernel), "a short text");
    const SplitGrid alone = plan_grid(case_of(120, 1, 400), device);
    CHECK(alone.merging == (clusters ? Merging::kByCluster : Merging::kByKernel), "all at once");
    CHECK(!clusters || alone.splits == 1, std::to_string(alone.splits));
    CHECK(plan_grid(case_of(140, 1, 400), device).merging == Merging::kByKernel,
          "more than at once");
    CHECK(plan_grid(case_of(1, 1, 100000), device).merging == Merging::kByKernel, "a long text");
  }
  AttentionParams params = case_of(2, 1, 100);
  const int32_t origins[2] = {};
  params.sequences.key_origins = origins;
  CHECK(plan_grid(params, device).merging != Merging::kNone, "leading keys may be a chunk more");
}

/// Thread blocks that have all of a row need not store what they keep from chunk to chunk: of the 4
/// rows of one query in flat tiles, or the 32 of 8 queries in tall ones.
void test_large_batches_store_no_partial_results() {
  for (bool tall : {false, true}) {
    DeviceShape device;
    device.multiprocessors = 132;
    device.clusters = true;
    const int32_t seq_q = tall ? 8 : 1, rows = 4 * seq_q;
    for (int32_t kept_rows : {0, rows - 1, rows, 32}) {
      (tall ? device.tall : device.flat) = {2, kept_rows};
      const bool kept = kept_rows >= rows;
      const Merging merging = kept ? Merging::kNone : Merging::kByKernel;
      const SplitGrid grid = plan_grid(case_of(300, seq_q, 5000), device);
      CHECK(grid.tile_rows == (tall ? kTallRows : kFragmentRows), std::to_string(grid.tile_rows));
      CHECK(grid.splits == 1 && grid.group == kInARow, "one group");
      CHECK(grid.merging == merging, std::to_string(kept_rows));
      CHECK(!grid.gaps, "all is stored, or nothing");
      const SplitGrid several = plan_grid(case_of(300, seq_q, 20000), device);
      CHECK(several.merging == Merging::kByKernel && several.gaps == kept, "more than a group");
      CHECK(several.group == kGroup, "more than a group");
      AttentionParams window = case_of(300, seq_q, 20000);
      window.features.add(Feature::kWindow);
      window.pattern.left = 9000;
      window.pattern.right = 0;
      const SplitGrid own = plan_grid(window, device);
      CHECK(own.group == kInARow && own.merging == merging, "a window");
      AttentionParams bounded = case_of(1, seq_q, 20000);
      bounded.features.add(Feature::kKeyBounds);
      CHECK(plan_grid(bounded, device).gaps, "the first group may be visited in part");
      AttentionParams lengths = case_of(300, seq_q, 5000);
      static const int32_t kUsed[300] = {};
      lengths.sequences.used_keys = kUsed;
      lengths.features.add(Feature::kUsedKeys);
      const SplitGrid shared = plan_grid(lengths, device);
      CHECK(shared.merging == Merging::kByKernel && shared.gaps == kept, "parts by lengths");
      CHECK(shared.group == kGroup, "a sequence of fewer queries may have more chunks");
    }
    CHECK(!plan_grid(case_of(8, seq_q, 16384), device).gaps, "some chunks of a group each");
  }
}

/// A long text's groups are shared out among thread blocks while they are as many as the device
/// runs; its chunks where few key heads leave it idle.
void test_few_heads_of_long_texts_fill_the_device() {
  const DeviceShape device = {132, {2, 16}, {2, 32}, true};
  for (int32_t keys : {kLongText + 1, 40000, 2 * kLongText, 100000, 131072, 1000000}) {
    for (int32_t heads_kv : {1, 2, 4, 8, 32}) {
      AttentionParams params = case_of(1, 1, keys);
      params.problem.heads_q = 4 * heads_kv;
      params.problem.heads_kv = heads_kv;
      const SplitGrid plan = plan_grid(params, device);
      const int32_t chunks = ceil_div(keys, plan.chunk_steps * kStepKeys);
      const int32_t groups = ceil_div(chunks, plan.group);
      const std::string text = std::to_string(heads_kv) + " heads of " + std::to_string(keys);
      CHECK(groups > 24 && groups <= 32, text);
      CHECK(plan.group == group_size(chunks) && plan.gaps, text);
      CHECK(heads_kv > 4 || plan.splits >= imin(chunks, 118 / heads_kv), text);
      CHECK(heads_kv < 8 || plan.splits <= groups, text);
      params.problem.batch = 40;
      CHECK(plan_grid(params, device).splits <= groups, text);
    }
  }
  AttentionParams lengths = case_of(2, 16, 70000);
  static const int32_t kUsed[2] = {};
  lengths.sequences.used_keys = kUsed;
  lengths.features.add(Feature::kUsedKeys);
  CHECK(plan_grid(lengths, device).group == kSmallestGroup, "a sequence of fewer keys");
}

/// What a row of a call has room for: a result of each small group where those are shared out, of
/// lists, windows and codes one of each chunk; only few key heads ask for more.
void test_partial_results_have_no_more_room_than_they_need() {
  const DeviceShape device = {132, {2, 16}, {2, 32}, true};
  constexpr int32_t kBatch = 64, kRoom = kMostResults + kOffEdges;
  static const int32_t kUsed[kBatch] = {};
  for (int32_t keys : {5000, 40000, 131072, 1000000}) {
    for (int32_t heads_kv : {1, 4, 8, 32}) {
      for (bool same : {false, true}) {
        AttentionParams params = case_of(kBatch, 1, keys);
        params.problem.heads_q = 4 * heads_kv;
        params.problem.heads_kv = heads_kv;
        if (!same) {
          params.sequences.used_keys = kUsed;
          params.features.add(Feature::kUsedKeys);
        }
        const std::string text = std::to_string(heads_kv) + " heads of " + std::to_string(keys);
        const SplitGrid plan = plan_grid(params, device);
        const bool fills = same || heads_kv >= 4;
        CHECK(plan.places <= (fills ? kRoom : kMostOfLong + kOffEdges), text);
        CHECK(!plan.whole_groups || (plan.gaps && plan.group <= kSmallGroup), text);
        CHECK(plan.whole_groups == (fills && keys > kLongText), text);
        CHECK(plan.whole_groups || plan.places == plan.max_chunks, text);
        AttentionParams codes = params;
        codes.keys.dtype = Dtype::kFloat8;
        codes.features.add(Feature::kFloat8Keys);
        CHECK(plan_grid(codes, device).places <= kRoom, "codes, " + text);
        AttentionParams window = params;
        window.pattern.left = 500000;
        window.pattern.right = 0;
        window.features.add(Feature::kWindow);
        CHECK(plan_grid(window, device).places <= kRoom, "a window, " + text);
      }
    }
  }
}

/// A window of several queries touches no more chunks than a cluster has thread blocks; which
/// merges them, where one sequence is alone.
void test_windows_fit_a_cluster() {
  const DeviceShape device = {132, {2, 16}, {}, true};
  for (int32_t window : {2048, 3000, 4096}) {
    for (int32_t seq_q : {2, 4}) {
      AttentionParams params = case_of(1, seq_q, 32768);
      params.pattern.left = window - 1;
      params.pattern.right = 0;
      params.pattern.causal = true;
      params.features = Features::of(Feature::kWindow);
      const SplitGrid plan = plan_grid(params, device);
      const std::string text = std::to_string(seq_q) + " queries, " + std::to_string(window);
      CHECK(plan.max_chunks <= kMostMerged, text);
      CHECK(plan.merging == Merging::kByCluster, text);
    }
  }
}

/// Clusters that have a thread block for each chunk merge longer texts than others, while they
/// leave half of the device free.
void test_few_heads_of_short_texts_are_merged_by_clusters() {
  const DeviceShape device = {132, {2, 16}, {2, 32}, true};
  for (int32_t keys : {6000, 8192, 12000, 16384}) {
    for (int32_t heads_kv : {1, 2, 4, 8, 16}) {
      AttentionParams params = case_of(1, 1, keys);
      params.problem = {1, 4 * heads_kv, heads_kv, 1, keys, 128, 128, Dtype::kBFloat16};
      const SplitGrid plan = plan_grid(params, device);
      const bool merged = heads_kv <= 4;
      const std::string text = std::to_string(heads_kv) + " heads of " + std::to_string(keys);
      CHECK(plan.merging == (merged ? Merging::kByCluster : Merging::kByKernel), text);
      CHECK(!merged || plan.splits == kMostMerged, text);
    }
  }
}

void test_what_lies_on_the_device_is_waited_for() {
  DeviceShape device;
  for (Feature feature : {Feature::kMask, Feature::kSoftcap, Feature::kAlibi, Feature::kWindow,
                          Feature::kDilation, Feature::kSinkLogits}) {
    AttentionParams params = case_of(1, 1, 5000);
    params.features.add(feature);
    CHECK(plan_grid(params, device).early, "the host knows the tiles");
  }
  for (Feature feature :
       {Feature::kKeyBounds, Feature::kQueryOffsets, Feature::kKeyOrigins, Feature::kPacked,
        Feature::kUsedKeys, Feature::kPaged, Feature::kFloat8Keys, Feature::kList}) {
    AttentionParams params = case_of(1, 1, 5000);
    params.features.add(feature);
    CHECK(!plan_grid(params, device).early, "what the kernel in front may write");
  }
}

void test_a_feature_that_nobody_has_listed_is_not_taken_for_plain() {
  AttentionParams params = case_of(1, 1, 5000);
  CHECK(kind_of(params) == Kind::kPlain && has_plain_scores(params), "plain");
  params.features.add(static_cast<Feature>(60));
  CHECK(kind_of(params) == Kind::kGeneral, "a kernel that leaves nothing out");
  CHECK(!has_plain_scores(params), "scores may be transformed");
  CHECK(!plan_grid(params, DeviceShape()).early, "tiles may depend on tensors");
}

void test_chunks_have_room_whatever_the_length() {
  for (int32_t head_dim : {8, 64, 72, 256}) {
    for (int32_t seq_q : {1, 4, 16}) {
      for (int32_t block_kv : {0, 16, 128}) {
        BlockList list;
        list.block_kv = block_kv;
        list.block_q = block_kv == 0 ? 0 : 16;
        static const int32_t kCount = 1;
        list.counts = block_kv == 0 ? nullptr : &kCount;
        int32_t room = 0, room_of_all = 0;
        for (int32_t keys = 1; keys < 200000; keys += 1 + keys / 100) {
          const int32_t chunk = chunk_steps(keys, seq_q, list, head_dim, false) * kStepKeys;
          const int32_t of_codes = chunk_steps(keys, seq_q, list, head_dim, true) * kStepKeys;
          const bool many = keys > 4096 && block_kv < 128 && seq_q == 1 && head_dim > 64;
          CHECK(chunk <= of_codes, "codes are read in half of the time");
          CHECK(!many || keys > 8192 || of_codes > chunk, "more of them where chunks are short");
          room = imax(room, most_chunks(keys, false));
          room_of_all = imax(room_of_all, most_chunks(keys, true));
          CHECK(most_chunks(keys, false) == room && most_chunks(keys, true) == room_of_all,
                "a longer bound has room for shorter sequences");
          CHECK(ceil_div(keys, chunk) <= room, std::to_string(keys));
          const int32_t of_all = chunk_steps(Pattern(), {}, keys, seq_q, head_dim) * kStepKeys;
          CHECK(ceil_div(keys, of_all) <= room_of_all, "of a text: " + std::to_string(keys));
        }
      }
    }
  }
}

}  // namespace

int main() {
  test_chunks_have_room_whatever_the_length();
  test_no_last_wave_is_mostly_empty();
  test_who_makes_the_output();
  test_large_batches_store_no_partial_results();
  test_what_lies_on_the_device_is_waited_for();
  test_a_feature_that_nobody_has_listed_is_not_taken_for_plain();
  test_partial_results_have_no_more_room_than_they_need();
  test_windows_fit_a_cluster();
  test_few_heads_of_long_texts_fill_the_device();
  test_few_heads_of_short_texts_are_merged_by_clusters();
  return check::summary();
}
