// The two sentences that leave the package: a wrong call, and a right call that nothing serves.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace sparse_attn {

/// Joins anything printable.
template <class... T>
std::string text(const T&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

/// Raises `sparse_attn::<op>: expected <what>, got <value>`.
[[noreturn]] inline void fail_expected(const std::string& op, const std::string& what,
                                       const std::string& got) {
  throw std::runtime_error(text("sparse_attn::", op, ": expected ", what, ", got ", got));
}

/// Raises `sparse_attn::<op>: not served: <why>`.
[[noreturn]] inline void fail_not_served(const std::string& op, const std::string& why) {
  throw std::runtime_error(text("sparse_attn::", op, ": not served: ", why));
}

}  // namespace sparse_attn
