// sparse_attn._info: what was built, and which engine serves a case. Called by can_use; holds no
// tensors and no torch, so it is compiled once per Python and the op libraries need no Python.
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

Dtype dtype_from(const std::string& name) {
  if (name == "float32") return Dtype::kFloat32;
  if (name == "float16") return Dtype::kFloat16;
  if (name == "bfloat16") return Dtype::kBFloat16;
  throw py::value_error("expected dtype float32, float16 or bfloat16, got " + name);
}

py::tuple choose(const std::string& requested, const std::string& dtype, Case c) {
  c.dtype = dtype_from(dtype);
  Choice choice = choose_engine(c, requested);
  py::object engine = choice.engine.empty() ? py::object(py::none()) : py::str(choice.engine);
  return py::make_tuple(engine, choice.reasons);
}

}  // namespace
}  // namespace sparse_attn

PYBIND11_MODULE(_info, module) {
  using sparse_attn::Case;
  module.doc() = "Build facts and the capability table of sparse_attn.";
  module.def(
      "build_facts", &sparse_attn::build_facts,
      "Version, compiler, instruction sets, and CUDA's version (or None) and architectures.");
  module.def("engine_names", &sparse_attn::engine_names, py::arg("cuda"),
             "Names of the device's engines, fastest first.");
  const Case defaults;
  module.def(
      "choose_engine",
      [](const std::string& requested, bool cuda, int32_t sm, const std::string& dtype,
         int32_t head_dim, int32_t seq_q, int32_t seq_kv, bool aligned, bool dense_mask,
         bool scattered_globals, bool topk, bool key_bounds, float scale, float softcap,
         int32_t block_q, int32_t block_kv) {
        Case c;
        c.cuda = cuda;
        c.sm = sm;
        c.head_dim = head_dim;
        c.seq_q = seq_q;
        c.seq_kv = seq_kv;
        c.aligned = aligned;
        c.dense_mask = dense_mask;
        c.scattered_globals = scattered_globals;
        c.topk = topk;
        c.key_bounds = key_bounds;
        c.scale = scale;
        c.softcap = softcap;
        c.block_q = block_q;
        c.block_kv = block_kv;
        return sparse_attn::choose(requested, dtype, c);
      },
      py::arg("requested") = "auto", py::kw_only(), py::arg("cuda") = defaults.cuda,
      py::arg("sm") = defaults.sm, py::arg("dtype") = "float32",
      py::arg("head_dim") = defaults.head_dim, py::arg("seq_q") = defaults.seq_q,
      py::arg("seq_kv") = defaults.seq_kv, py::arg("aligned") = defaults.aligned,
      py::arg("dense_mask") = defaults.dense_mask,
      py::arg("scattered_globals") = defaults.scattered_globals, py::arg("topk") = defaults.topk,
      py::arg("key_bounds") = defaults.key_bounds, py::arg("scale") = defaults.scale,
      py::arg("softcap") = defaults.softcap, py::arg("block_q") = defaults.block_q,
      py::arg("block_kv") = defaults.block_kv,
      "The engine that serves the case (or None), and why the others stood aside.");
}
