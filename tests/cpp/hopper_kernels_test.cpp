// The list of Hopper's kernels: who serves a call has code for all its features, and the least head
// dim; lists, thresholds and lengths are served by kernels of theirs alone, and a feature that no
// row has by none.
#include "check.h"
#include "cuda/hopper/table.h"

using namespace sparse_attn;
using namespace sparse_attn::cuda::hopper;

namespace {

constexpr Features kMarks = kLengths.with(Features::of(Feature::kList, Feature::kTopK));

/// What the list says, asked plainly.
void test_serves(int32_t head_dim, const Wanted& wanted) {
  const Entry entry = find_kernel(head_dim, wanted);
  const std::string text = "head dim " + std::to_string(head_dim) + " is served by kernel " +
                           std::to_string(entry.kernel) + " of head dim " +
                           std::to_string(entry.head_dim);
  if (!entry.exists()) return;
  const Kernel& kernel = kKernels[entry.kernel];
  CHECK(entry.head_dim >= head_dim && entry.keys() > 0, text);
  CHECK(wanted.features.within(kernel.accepts), text);
  CHECK(wanted.block_q % kernel.rows() == 0, text);
  CHECK(kernel.accepts.any(kMarks) == wanted.features.any(kMarks), text);
  CHECK(!wanted.raw_values || kernel.takes_raw_values(), text);
  CHECK(wanted.split == Split::kNone || kernel.splits != Split::kNone, text);
  for (const Kernel& other : kKernels) {
    const int32_t least = other.serves(wanted) ? other.head_dim_from(head_dim) : 0;
    CHECK(least == 0 || least >= entry.head_dim, text);
  }
}

void test_every_row_serves_what_it_accepts() {
  for (const Kernel& kernel : kKernels) {
    Wanted wanted = {kernel.accepts, kernel.splits, kernel.takes_raw_values()};
    if (kernel.is_listed()) wanted.block_q = kernel.rows();
    CHECK(kernel.serves(wanted), std::to_string(&kernel - kKernels));
    for (int32_t f = 0; f < static_cast<int32_t>(Feature::kCount); ++f) {
      const Features one = Features::of(static_cast<Feature>(f));
      if (one.within(kMarks)) continue;
      wanted.features = kernel.accepts.without(one);
      CHECK(kernel.serves(wanted), "without feature " + std::to_string(f));
      for (int32_t head_dim = 8; head_dim <= 264; head_dim += 8) test_serves(head_dim, wanted);
    }
    wanted.features = kernel.accepts.with(Features::of(Feature::kCount));  // one that nobody has
    CHECK(!kernel.serves(wanted), "a feature that no row has");
  }
}

void test_marked_kernels_keep_to_their_calls() {
  for (const Kernel& kernel : kKernels) {
    if (!kernel.accepts.any(kMarks)) continue;
    CHECK(!kernel.serves({}), "a call without marks");
    CHECK(!kernel.serves({kernel.accepts.without(kMarks)}), "features without their mark");
  }
}

/// Plain calls of sequences have the tiles of plain calls and of other sequences; up to head dim
/// 128 and at 224 they take kernels that write no masks.
void test_plain_sequences_take_plain_kernels() {
  for (int32_t head_dim = 8; head_dim <= kHeadDims[kNumHeadDims - 1]; head_dim += 8) {
    const Entry plain = find_kernel(head_dim, {kPlainRaggedCalls}),
                other = find_kernel(head_dim, {kScoredRaggedCalls});
    const std::string text = std::to_string(head_dim);
    const bool has_its_own = plain.head_dim <= 128 || plain.head_dim == 224;
    CHECK(plain.exists() && kKernels[plain.kernel].is_plain() == has_its_own, text);
    CHECK(plain_tiles_have(head_dim, plain.keys()), text);
    CHECK(plain.head_dim != other.head_dim || plain.keys() == other.keys(), text);
  }
}

/// Calls with lists take the kernel of least code that has what they need, of one tile size.
void test_lists_take_kernels_of_little_code() {
  const Features packed = Features::of(Feature::kPacked);
  for (const int32_t head_dim : {64, 128}) {
    for (const int32_t block_q : {64, 128}) {
      const std::string text = std::to_string(head_dim) + ", blocks of " + std::to_string(block_q);
      auto takes = [&](Features features, bool raw_values, Features accepts) {
        const Entry entry = find_kernel(head_dim, {features, Split::kNone, raw_values, block_q});
        const Kernel& kernel = kKernels[entry.kernel];
        CHECK(entry.head_dim == head_dim && kernel.rows() == block_q, text);
        CHECK(kernel.accepts.within(accepts) && accepts.within(kernel.accepts), text);
        CHECK(entry.keys() == 128, text);
      };
      takes(kPlainListedCalls, false, kPlainListedCalls);
      takes(kPlainListedCalls, true, kListedCalls);
      takes(kPlainListedCalls.with(Features::of(Feature::kPartialBlocks)), false, kListedCalls);
      takes(kPlainListedCalls.with(Features::of(Feature::kSoftcap)), false,
            block_q == 64 ? kScoredHalfListedCalls : kScoredListedCalls);
      if (block_q == 64) continue;
      takes(kPlainListedCalls.with(packed), false, kPlainRaggedListedCalls);
      takes(kListedCalls.without(Features::of(Feature::kKeyBounds)).with(packed), true,
            kRaggedListedCalls);
    }
  }
}

/// Ranges take the kernel of least code that has what they need, of one tile size: those that
/// bounds alone cut have one of their own, and strided columns.
void test_ranges_take_kernels_of_little_code() {
  const Features columns = Features::of(Feature::kLead, Feature::kColumns);
  for (const int32_t head_dim : {64, 128}) {
    auto takes = [&](Features features, Features accepts) {
      const Entry entry = find_kernel(head_dim, {features, Split::kNone, true});
      const Kernel& kernel = kKernels[entry.kernel];
      const std::string text = "head dim " + std::to_string(head_dim);
      CHECK(entry.head_dim == head_dim && entry.keys() == 128, text);
      CHECK(kernel.accepts.within(accepts) && accepts.within(kernel.accepts), text);
    };
    takes(kCutCalls, kCutCalls);
    takes(kRangeCalls, kRangeCalls);
    takes(columns, kStridedCalls);
    takes(kRangeCalls.with(columns), kStridedCalls);
    takes(columns.with(Features::of(Feature::kSoftcap)), kScoredCalls);
  }
}

/// Few queries and any masks are served wherever plain calls are.
void test_every_range_is_served() {
  for (int32_t head_dim = 8; head_dim <= kHeadDims[kNumHeadDims - 1]; head_dim += 8) {
    CHECK(find_kernel(head_dim, {}).exists(), std::to_string(head_dim));
    for (const Features features : {Features(), kGeneralCalls}) {
      CHECK(find_chunked(head_dim, features).head_dim == find_kernel(head_dim, {}).head_dim,
            std::to_string(head_dim));
    }
    CHECK(find_kernel(head_dim, {kGeneralCalls, Split::kAll, true}).exists(),
          std::to_string(head_dim));
  }
  CHECK(!find_kernel(kHeadDims[kNumHeadDims - 1] + 8, {}).exists(), "larger head dims");
}

/// Where more than few rows are split, so are those of which the device alone knows where they
/// stand, in the same tiles, by kernels that sum chunks.
void test_many_rows_are_split_whoever_knows() {
  int32_t some = 0;
  for (int32_t head_dim = 8; head_dim <= 256; head_dim += 8) {
    const Entry plain = find_kernel(head_dim, {Features(), Split::kAll});
    const Entry cut = find_kernel(head_dim, {kCutCalls, Split::kAll, true});
    if (!splits_many_rows(plain.head_dim)) continue;
    const std::string text = "head dim " + std::to_string(head_dim);
    CHECK(cut.head_dim == plain.head_dim && cut.keys() == plain.keys(), text);
    CHECK(kKernels[plain.kernel].folds(plain.head_dim), text);
    CHECK(kKernels[cut.kernel].folds(cut.head_dim), text);
    ++some;
  }
  CHECK(some > 0, "no head dim");
}

}  // namespace

int main() {
  test_every_row_serves_what_it_accepts();
  test_marked_kernels_keep_to_their_calls();
  test_plain_sequences_take_plain_kernels();
  test_lists_take_kernels_of_little_code();
  test_ranges_take_kernels_of_little_code();
  test_every_range_is_served();
  test_many_rows_are_split_whoever_knows();
  return check::summary();
}
