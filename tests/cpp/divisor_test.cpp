// Division by a number that is known before: the same as the processor's, for every dividend.
#include "divisor.h"

#include <limits>
#include <random>

#include "check.h"

using namespace sparse_attn;

namespace {

constexpr int32_t kLargest = std::numeric_limits<int32_t>::max();

void test_divides(int32_t divisor, int32_t number) {
  const std::string text = std::to_string(number) + " / " + std::to_string(divisor);
  const Divisor by(divisor);
  CHECK(by.divide(number) == number / divisor, text);
  CHECK(by.remainder(number) == number % divisor, text);
}

/// Dividends beside multiples of the divisor, where a product that is rounded would show first.
void test_beside_multiples(int32_t divisor, int32_t quotient) {
  const int64_t multiple = int64_t{divisor} * quotient;
  for (int64_t number : {multiple - 1, multiple, multiple + 1}) {
    if (number >= 0 && number <= kLargest) test_divides(divisor, static_cast<int32_t>(number));
  }
}

}  // namespace

int main() {
  std::mt19937 random(0);
  auto below = [&](int64_t end) { return static_cast<int32_t>(random() % end); };
  for (int32_t shift = 0; shift < 31; ++shift) {
    for (int32_t beside : {-1, 0, 1}) {
      const int32_t divisor = (1 << shift) + beside;
      if (divisor < 1) continue;
      for (int32_t number : {0, 1, divisor, kLargest - 1, kLargest}) test_divides(divisor, number);
      test_beside_multiples(divisor, kLargest / divisor);
    }
  }
  test_divides(kLargest, kLargest - 1);
  test_divides(kLargest, kLargest);
  for (int32_t i = 0; i < 200000; ++i) {
    const int32_t divisor = 1 + below(int64_t{1} << below(31));
    test_beside_multiples(divisor, below(int64_t{kLargest} / divisor + 1));
    test_beside_multiples(divisor, kLargest / divisor);
  }
  return check::summary();
}
