// A check that counts and prints, enough for a plain executable: CHECK(condition, text) states what
// should hold and shows the text when it does not. summary() prints the closing line and gives the
// exit code. The first failures are printed, the rest only counted.
#pragma once

#include <cstdio>
#include <string>

namespace check {

constexpr int kMaxPrinted = 20;

struct Counts {
  long passed = 0;
  long failed = 0;
};

inline Counts& counts() {
  static Counts instance;
  return instance;
}

inline bool record(bool ok, const char* condition, const char* file, int line,
                   const std::string& text) {
  Counts& c = counts();
  if (ok) {
    ++c.passed;
  } else if (++c.failed <= kMaxPrinted) {
    std::printf("%s:%d: expected %s: %s\n", file, line, condition, text.c_str());
  }
  return ok;
}

inline int summary() {
  std::printf("%ld passed, %ld failed\n", counts().passed, counts().failed);
  return counts().failed == 0 ? 0 : 1;
}

}  // namespace check

#define CHECK(condition, text)                                           \
  ((condition) ? check::record(true, #condition, __FILE__, __LINE__, {}) \
               : check::record(false, #condition, __FILE__, __LINE__, (text)))
