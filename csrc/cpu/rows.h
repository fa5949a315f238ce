// Threads share the rows of a tool's work.
#pragma once

#include "params.h"
#include "torch_host.h"

namespace sparse_attn::cpu {

/// Calls work(row) for every row, by threads that take them in turns of kRowsPerTurn.
template <class Work>
Status for_each_row(int64_t rows, const Work& work) {
  constexpr int64_t kRowsPerTurn = 64;
  bool ran =
      for_each_item(num_workers(), ceil_div64(rows, kRowsPerTurn), [&](int32_t, int64_t turn) {
        int64_t end = (turn + 1) * kRowsPerTurn < rows ? (turn + 1) * kRowsPerTurn : rows;
        for (int64_t row = turn * kRowsPerTurn; row < end; ++row) work(row);
      });
  if (!ran) return {1, "the thread pool failed"};
  return {};
}

}  // namespace sparse_attn::cpu
