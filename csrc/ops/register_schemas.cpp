// Schemas of all ops, registered once for every device.
#include "namespace.h"
#include "schema.h"

SPARSE_ATTN_OPS(library) {
  using namespace sparse_attn;
  for (int index = 0; index < kNumOps; ++index) {
    for (OpForm form : kOpForms) library.def(schema_of(op_at(index), form).c_str());
  }
  library.def(selection_schema().c_str());
  library.def("list_from_mask(Tensor mask) -> (Tensor counts, Tensor indices)");
  library.def(
      "merge_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor out, "
      "Tensor lse)");
  library.def(
      "merge_states_out(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, *, Tensor(a!) "
      "out, Tensor(b!) lse) -> ()");
  library.def(
      "append_to_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor slot_mapping, Tensor? key_scale=None, Tensor? value_scale=None) -> ()");
  library.def(
      "append_to_sketch(Tensor key, Tensor(a!) codes, Tensor(b!) ranges, Tensor(c!) open_keys, "
      "Tensor(d!) lengths) -> ()");
  library.def(
      "sketch_pages(Tensor key_cache, Tensor slots, Tensor(a!) codes, Tensor(b!) ranges, "
      "Tensor(c!) lengths, Tensor? key_scale=None) -> ()");
}
