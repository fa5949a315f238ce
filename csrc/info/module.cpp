// sparse_attn._info: what was built, and the tiles that pattern.h visits. Holds no tensors and no
// torch, so it is compiled once per Python and the op libraries need no Python; no call needs it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "info/tile_runs.h"

namespace py = pybind11;

namespace sparse_attn {
namespace {

std::vector<std::string> words(const char* text) {
  std::istringstream stream(text);
  std::vector<std::string> result;
  for (std::string word; stream >> word;) result.push_back(word);
  return result;
}

py::dict build_facts() {
  py::dict facts;
  std::string cuda = SPARSE_ATTN_CUDA_VERSION;
  facts["version"] = SPARSE_ATTN_VERSION;
  facts["compiler"] = SPARSE_ATTN_COMPILER;
  facts["instruction_sets"] = words(SPARSE_ATTN_ISAS);
  facts["cuda"] = cuda.empty() ? py::object(py::none()) : py::str(cuda);
  facts["cuda_architectures"] = words(SPARSE_ATTN_CUDA_ARCHS);
  return facts;
}

/// One run of visited tiles, in the order of the fields of `TileRun` in Python.
using TileRunFields =
    std::tuple<int32_t, int32_t, int32_t, int32_t, int32_t, int32_t, int32_t, bool>;

/// A number of Python where pattern.h can take it; None has no limit.
int32_t cut(std::optional<int64_t> number) {
  return static_cast<int32_t>(std::min<int64_t>(number.value_or(kUnlimited), kUnlimited));
}

/// Arguments are those of the ops, checked in Python; `columns` are the lead view's first key, step
/// and length.
std::vector<TileRunFields> runs_of_call(int32_t seq_q, int32_t seq_kv,
                                        std::pair<int32_t, int32_t> tile, bool is_causal,
                                        std::optional<int64_t> left, std::optional<int64_t> right,
                                        int64_t dilation,
                                        std::tuple<int64_t, int64_t, int64_t> columns,
                                        int64_t num_global,
                                        const std::vector<int32_t>& global_tokens) {
  Pattern pattern;
  pattern.left = cut(left);
  pattern.right = cut(right);
  pattern.dilation = cut(dilation);
  pattern.causal = is_causal;
  const auto [first, step, length] = columns;
  pattern.lead = {cut(first), cut(step), cut(length)};
  pattern.global_count = cut(num_global);
  std::vector<TileRunFields> runs;
  for (const TileRun& run :
       tile_runs(pattern, seq_q, seq_kv, {tile.first, tile.second}, global_tokens)) {
    runs.emplace_back(run.row, run.row_step, run.rows, run.key, run.key_step, run.keys, run.tiles,
                      run.masked);
  }
  return runs;
}

}  // namespace
}  // namespace sparse_attn

PYBIND11_MODULE(_info, module) {
  module.doc() = "Build facts of sparse_attn, and the tiles that its engines visit.";
  module.def(
      "build_facts", &sparse_attn::build_facts,
      "Version, compiler, instruction sets, and CUDA's version (or None) and architectures.");
  module.def("visited_tiles", &sparse_attn::runs_of_call, py::arg("seq_q"), py::arg("seq_kv"),
             py::arg("tile"), py::kw_only(), py::arg("is_causal"), py::arg("left"),
             py::arg("right"), py::arg("dilation"), py::arg("columns"), py::arg("num_global"),
             py::arg("global_tokens"),
             "Runs of visited tiles: first row, step, rows, first key, step, keys, tiles, masked.");
}
