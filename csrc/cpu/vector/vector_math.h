// The loops of the CPU engines that are not matrix products: online softmax over a tile of scores,
// score transforms, conversions and products with few rows. Compiled once per instruction set and
// chosen once at run time. Plain data and functions only: an inline function or a template shared
// with other files would be compiled for AVX-512 here and could be the copy that the linker keeps.
#pragma once

#include <cstdint>
#include <limits>

namespace sparse_attn::cpu {

constexpr float kLog2E = 1.44269504088896341f;
/// The score of a key that a row does not see, and the lse of a row that sees none.
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

/// Element types, numbered as Dtype.
enum class Element : int32_t { kFloat32, kFloat16, kBFloat16 };

/// Columns [begin, end) of a tile that a row sees.
struct Span {
  int32_t begin = 0;
  int32_t end = 0;
};

/// Rows of `head_dim` elements, `stride` elements apart.
struct Rows {
  const void* data = nullptr;
  int64_t stride = 0;
  Element element = Element::kFloat32;
};

/// Keys whose elements lie together, for products with small tiles: panel[d * kPanelKeys + key].
constexpr int32_t kPanelKeys = 16;

/// Values that lie together; the weights of one run follow those of the run before.
struct ValueRun {
  const float* values = nullptr;
  int32_t count = 0;
};

/// One step of the online softmax over a tile of scores: scores become P, and m, l
/// and out take the tile in. P = 2^(factor * (score - m)), with m in the unit of the scores: a
/// product with the factor would round or overflow before the difference is taken, and by more than
/// 1 where scores are huge, as under masks of -1e12 or the lowest float.
struct SoftmaxTile {
  float* scores = nullptr;  // rows `stride` apart
  int64_t stride = 0;
  int32_t rows = 0;
  const Span* visible = nullptr;  // [rows]
  const Span* read = nullptr;     // [rows], of P, which is 0 there outside `visible`; may be null
  float factor = 1.0f;            // positive; from scores to exponents of 2
  float* m = nullptr;             // [rows], -inf before the first tile
  float* l = nullptr;             // [rows], 0 before the first tile
  float* out = nullptr;           // [rows, value_dim], contiguous
  int32_t value_dim = 0;

  /// The same for one row alone.
  SoftmaxTile row(int32_t index) const {
    SoftmaxTile one = *this;
    one.scores += index * stride;
    one.rows = 1;
    one.visible += index;
    if (read != nullptr) one.read += index;
    one.m += index;
    one.l += index;
    one.out += int64_t{index} * value_dim;
    return one;
  }
};

/// Rows of values that a bfloat16 product takes at a time.
constexpr int32_t kBfloatRows = 32;
/// Numbers of bfloat16 that make an element.
constexpr int32_t kMaxParts = 3;
/// Columns of rows for bfloat16 products: zeros follow those of the head dim.
constexpr int32_t bfloat_columns(int32_t head_dim) {
  return (head_dim + kBfloatRows - 1) / kBfloatRows * kBfloatRows;
}

/// A block of values in pairs (bfloat_rows.h): row i, if inside, has the weight of column
/// `column` + i.
struct BfloatBlock {
  const uint16_t* values = nullptr;
  int32_t column = 0;
  Span inside;
};

/// Products of bfloat16 with float32 sums, for up to 32 rows and head dims in steps of 32; rows are
/// computed in steps of 16, so what lies after them is read and written too. Elements are the sums
/// of `parts` numbers, up to 3; a row has all first parts, then all second ones.
struct BfloatMath {
  void (*begin)();  // before and after a thread's products
  void (*end)();
  /// Makes two parts of n elements of float16, three of float32: their sum is exact.
  void (*split)(Element element, const void* source, int32_t n, uint16_t* parts);
  /// scores[row, key] = query[row] . key for the keys of consecutive panels.
  void (*scores)(const uint16_t* query, int32_t rows, int32_t head_dim, int32_t parts,
                 const uint16_t* panels, int32_t num_panels, float* scores, int64_t stride);
  /// out[row] += weights[row] . values over the blocks.
  void (*values)(const float* weights, int64_t stride, int32_t rows, const BfloatBlock* blocks,
                 int32_t num_blocks, int32_t head_dim, int32_t parts, float* out);
};

constexpr int32_t kMaxChannels = 256;
/// Keys whose mass a sketch tells.
constexpr int32_t kMassKeys = 16;

/// Rows of codes of one group of a key sketch (sketch_params.h).
struct SketchCodes {
  const uint32_t* rows = nullptr;
  int32_t count = 0;  // a multiple of 16 for scores
  int32_t row_words = 0, used_words = 0;
  int32_t bits = 2;
};

/// What a key sketch is made by and read by. Rows are float32, up to kMaxChannels long, `stride`
/// apart; what lies after head_dim up to a multiple of 16 is read, and counts where it is not 0.
struct SketchMath {
  /// The least and the greatest number of each channel over n rows, NaN where none is one.
  void (*range)(const float* rows, int64_t stride, int32_t n, int32_t head_dim, float* least,
                float* greatest);
  /// Rows of codes of n rows, read in steps of 16.
  void (*codes)(const float* rows, int64_t stride, int32_t n, int32_t head_dim, int32_t bits,
                const float* least, const float* greatest, uint32_t* codes, int32_t row_words);
  /// sums[channel] = the sum of the codes, of all channels of the words that are used.
  void (*sums)(const SketchCodes& codes, float* sums);
  /// scores[row, token] = query[row] . sketched key, with the same bits for any number of rows.
  void (*scores)(const SketchCodes& codes, const float* least, const float* greatest,
                 const float* query, int64_t query_stride, int32_t rows, float* scores,
                 int64_t stride);
  /// masses[i] = sum over the i-th kMassKeys scores of 2^(factor * (score - highest)), of `count`;
  /// returns the highest. NaN where a score is, or where the highest is infinite; 0 for all where
  /// it is -infinity.
  float (*masses)(const float* scores, int32_t count, float factor, float* masses);
};

struct VectorMath {
  const char* isa;
  const BfloatMath* bfloat;  // null where float32 products are as fast
  SketchMath sketch;
  void (*to_float)(Element element, const void* source, float* target, int64_t n);
  /// target = factor * source
  void (*from_float)(Element element, const float* source, float factor, void* target, int64_t n);
  /// s = softcap(scale * s) + mask; softcap 0 is off, mask may be null, a score of -inf stays.
  void (*transform)(float* scores, int64_t n, float scale, float softcap, const float* mask);
  void (*online_softmax)(const SoftmaxTile& tile);
  /// scores[row, j] = query[row] . keys[j] for n keys, with the same bits for any number of rows
  void (*row_scores)(const float* query, int64_t query_stride, int32_t rows, Rows keys, int64_t n,
                     int32_t head_dim, float* scores, int64_t stride);
  /// out[row] += sum over i < n of weights[row, i] * values[i]; a row reads no values of weight 0.
  void (*row_values)(const float* weights, int64_t stride, int32_t rows, Rows values, int64_t n,
                     int32_t head_dim, float* out);
  /// out += sum over i < n of weights[i] * values[columns[i]]; values of weight 0 are not read.
  void (*row_accumulate)(const float* weights, const int32_t* columns, int64_t n, Rows values,
                         int32_t head_dim, float* out);
  /// Elements of a vector.
  int32_t lanes;
  /// Rows of a product with panels, at most; 0 where BLAS is as good.
  int32_t group_rows;
  /// Up to here panels are faster than BLAS even where many rows share a tile.
  int32_t panel_head_dim;
  /// Writes a panel from kPanelKeys rows that are `stride` apart.
  void (*pack_panel)(const float* keys, int64_t stride, int32_t head_dim, float* panel);
  /// scores[row, key] = query[row] . key for the keys of panels, wherever each lies; the head dim
  /// is a multiple of 8.
  void (*panel_scores)(const float* query, int64_t query_stride, int32_t rows, int32_t head_dim,
                       const float* const* panels, int32_t num_panels, float* scores,
                       int64_t stride);
  /// out[row] += sum of weights[row, i] * values[i] over the runs, whose rows are `value_stride`
  /// apart.
  void (*panel_values)(const float* weights, int64_t stride, int32_t rows, const ValueRun* runs,
                       int32_t num_runs, int64_t value_stride, int32_t head_dim, float* out);
  /// Appends the scores above the threshold, and NaN, with their columns, which count from `first`;
  /// returns how many. Writes whole vectors, up to 16 entries past them.
  int32_t (*collect)(const float* scores, int32_t n, float threshold, int32_t first,
                     float* candidates, int32_t* columns);
  /// Keeps, in their order, the highest of n candidates, k < n: k of them, of equal ones the first,
  /// or somewhat more where `most` allows. Returns how many; what is not above the threshold that
  /// it writes, and comes later, is not among the k highest. NaN is the highest. Room for 16
  /// entries past n.
  int32_t (*keep_highest)(float* candidates, int32_t* columns, int32_t n, int32_t k, int32_t most,
                          float* threshold);
  /// A threshold that the k highest of what the row sees are above, and few more; more than k are
  /// seen. Entries outside the span are written, up to whole vectors.
  float (*low_threshold)(float* scores, Span seen, int32_t k);
  /// Writes -inf over all that the row sees but its k highest, of equal ones the first; more than k
  /// are seen. Entries outside the span are written too, up to whole vectors. NaN is the highest.
  void (*keep_only)(float* scores, Span seen, int32_t k);
};

/// The functions for this processor; SPARSE_ATTN_CPU_ISA=plain|avx2|avx512|amx forces a lesser set.
const VectorMath& vector_math();

}  // namespace sparse_attn::cpu
