// Whole numbers of patterns: intervals, strided views of an axis, and divisions that are right on
// both sides of zero. Read by pattern.h, on the host and on the device.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define SPARSE_ATTN_HD __host__ __device__ __forceinline__
#else
#define SPARSE_ATTN_HD inline
#endif

namespace sparse_attn {

/// The longest sequence. Query offsets are cut to it on either side: positions beyond see no more.
constexpr int32_t kMaxLength = (1 << 29) - 1;
/// A window side without a limit: reaches every key from every position, and the sums fit int32.
constexpr int32_t kUnlimited = 1 << 30;

SPARSE_ATTN_HD constexpr int32_t imin(int32_t a, int32_t b) { return a < b ? a : b; }
SPARSE_ATTN_HD constexpr int32_t imax(int32_t a, int32_t b) { return a > b ? a : b; }
/// Division rounded down and up, right for every `a` (b > 0), without overflow.
SPARSE_ATTN_HD constexpr int32_t floor_div(int32_t a, int32_t b) {
  return a >= 0 ? a / b : (a + 1) / b - 1;
}
SPARSE_ATTN_HD constexpr int32_t ceil_div(int32_t a, int32_t b) {
  return a > 0 ? (a - 1) / b + 1 : a / b;
}
/// x, cut to 0 .. end.
SPARSE_ATTN_HD constexpr int32_t cut_to(int32_t end, int64_t x) {
  return x < 0 ? 0 : x < end ? static_cast<int32_t>(x) : end;
}
/// Division rounded up, of larger numbers (a >= 0).
SPARSE_ATTN_HD constexpr int64_t ceil_div64(int64_t a, int64_t b) { return (a + b - 1) / b; }
SPARSE_ATTN_HD constexpr int64_t round_up(int64_t x, int64_t multiple) {
  return ceil_div64(x, multiple) * multiple;
}

/// The integers begin <= x < end.
struct Interval {
  int32_t begin = 0;
  int32_t end = 0;
  SPARSE_ATTN_HD constexpr bool contains(int32_t x) const { return begin <= x && x < end; }
  SPARSE_ATTN_HD constexpr bool holds(Interval x) const { return begin <= x.begin && x.end <= end; }
  SPARSE_ATTN_HD constexpr bool empty() const { return end <= begin; }
  SPARSE_ATTN_HD constexpr int32_t size() const { return end > begin ? end - begin : 0; }
};

SPARSE_ATTN_HD constexpr Interval intersect(Interval a, Interval b) {
  return {imax(a.begin, b.begin), imin(a.end, b.end)};
}

/// Elements offset, offset + step, ... of an axis, `length` of them.
struct View {
  int32_t offset = 0;
  int32_t step = 1;
  int32_t length = 0;
  /// The axis position of the view's element u.
  SPARSE_ATTN_HD constexpr int32_t at(int32_t u) const { return offset + u * step; }
  /// The same of an element that may lie past the view, cut to `last`: int32 may not hold it.
  SPARSE_ATTN_HD constexpr int32_t at_most(int32_t u, int32_t last) const {
    const int64_t x = offset + int64_t{u} * step;
    return x < last ? static_cast<int32_t>(x) : last;
  }
  /// How many of the view's elements lie before axis position x, whatever x is.
  SPARSE_ATTN_HD constexpr int32_t before(int32_t x) const {
    if (x <= offset) return 0;
    return imin(length, step == 1 ? x - offset : ceil_div(x - offset, step));
  }
  /// The view's elements whose axis positions lie in `x`.
  SPARSE_ATTN_HD constexpr Interval inside(Interval x) const {
    return {before(x.begin), before(x.end)};
  }
};

/// The elements of residue class `residue` of an axis of `size` elements.
SPARSE_ATTN_HD constexpr View residue_class(int32_t residue, int32_t step, int32_t size) {
  return {residue, step, imax(0, ceil_div(size - residue, step))};
}

}  // namespace sparse_attn
