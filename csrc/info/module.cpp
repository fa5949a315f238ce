// sparse_attn._info: what was built. Holds no tensors and no torch, so it is compiled once per
// Python and the op libraries need no Python; no call needs it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <sstream>

#include "capability.h"

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

}  // namespace
}  // namespace sparse_attn

PYBIND11_MODULE(_info, module) {
  module.doc() = "Build facts of sparse_attn.";
  module.def(
      "build_facts", &sparse_attn::build_facts,
      "Version, compiler, instruction sets, and CUDA's version (or None) and architectures.");
  module.def("engine_names", &sparse_attn::engine_names, py::arg("cuda"),
             "Names of the device's engines, fastest first.");
}
