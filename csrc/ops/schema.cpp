// Argument declarations and the op table.
#include "schema.h"

#include <cstring>
#include <stdexcept>
#include <type_traits>

namespace sparse_attn {
namespace {

/// Reads a stack value, which it consumes, into a member of CallArguments.
template <auto Member>
void read(CallArguments& args, StableIValue value) {
  using Type = std::remove_reference_t<decltype(args.*Member)>;
  args.*Member = torch::stable::detail::to<Type>(value);
}

/// The same for a tensor that is always there.
template <MaybeTensor CallArguments::* Member>
void read_tensor(CallArguments& args, StableIValue value) {
  args.*Member = torch::stable::detail::to<Tensor>(value);
}

/// The same for a number that is always there.
template <MaybeInt CallArguments::* Member>
void read_size(CallArguments& args, StableIValue value) {
  args.*Member = torch::stable::detail::to<int64_t>(value);
}

using A = CallArguments;

const Argument kArguments[] = {
    {"query", "Tensor query", read_tensor<&A::query>},
    {"key", "Tensor key", read_tensor<&A::key>},
    {"value", "Tensor value", read_tensor<&A::value>},
    {"cu_seq_q", "Tensor cu_seq_q", read_tensor<&A::cu_seq_q>},
    {"cu_seq_k", "Tensor cu_seq_k", read_tensor<&A::cu_seq_k>},
    {"max_q", "SymInt max_q", read_size<&A::max_q>},
    {"max_k", "SymInt max_k", read_size<&A::max_k>},
    {"maybe_seqused_k", "Tensor? seqused_k=None", read<&A::seqused_k>},
    {"block_table", "Tensor block_table", read_tensor<&A::block_table>},
    {"maybe_block_table", "Tensor? block_table=None", read<&A::block_table>},
    {"seqused_k", "Tensor seqused_k", read_tensor<&A::seqused_k>},
    {"maybe_cu_seq_k", "Tensor? cu_seq_k=None", read<&A::cu_seq_k>},
    {"maybe_max_k", "SymInt? max_k=None", read<&A::max_k>},
    {"maybe_cu_seq_q", "Tensor? cu_seq_q=None", read<&A::cu_seq_q>},
    {"maybe_max_q", "SymInt? max_q=None", read<&A::max_q>},
    {"left", "SymInt? left=None", read<&A::left>},
    {"right", "SymInt? right=None", read<&A::right>},
    {"dilation", "SymInt dilation=1", read<&A::dilation>},
    {"sinks", "SymInt sinks=0", read<&A::sinks>},
    {"num_global", "SymInt num_global=0", read<&A::num_global>},
    {"global_tokens", "Tensor? global_tokens=None", read<&A::global_tokens>},
    {"local", "SymInt? local=None", read<&A::local>},
    {"stride", "SymInt? stride=None", read<&A::stride>},
    {"counts", "Tensor? counts=None", read<&A::counts>},
    {"indices", "Tensor? indices=None", read<&A::indices>},
    {"partial", "Tensor? partial=None", read<&A::partial>},
    {"bits", "Tensor? bits=None", read<&A::bits>},
    {"block_q", "SymInt block_q=0", read<&A::block_q>},
    {"block_kv", "SymInt block_kv=0", read<&A::block_kv>},
    {"num_kv_blocks", "SymInt num_kv_blocks=0", read<&A::num_kv_blocks>},
    {"k", "SymInt? k=None", read<&A::k>},
    {"block_size", "SymInt block_size=64", read<&A::block_size>},
    {"block_rows", "SymInt? block_rows=None", read<&A::block_rows>},
    {"budget_count", "SymInt? budget_count=None", read<&A::budget_count>},
    {"budget_share", "float? budget_share=None", read<&A::budget_share>},
    {"mass", "float? mass=None", read<&A::mass>},
    {"selector", "str selector=\"mixed\"", read<&A::selector>},
    {"groups", "SymInt? groups=None", read<&A::groups>},
    {"row_step", "SymInt row_step=16", read<&A::row_step>},
    {"scores", "Tensor? scores=None", read<&A::scores>},
    {"sketch_codes", "Tensor? sketch_codes=None", read<&A::sketch_codes>},
    {"sketch_ranges", "Tensor? sketch_ranges=None", read<&A::sketch_ranges>},
    {"sketch_lengths", "Tensor? sketch_lengths=None", read<&A::sketch_lengths>},
    {"group", "str group=\"q\"", read<&A::group>},
    {"sink_blocks", "SymInt sink_blocks=1", read<&A::sink_blocks>},
    {"local_blocks", "SymInt local_blocks=1", read<&A::local_blocks>},
    {"attn_mask", "Tensor? attn_mask=None", read<&A::attn_mask>},
    {"is_causal", "bool is_causal=False", read<&A::is_causal>},
    {"scale", "float? scale=None", read<&A::scale>},
    {"key_bounds", "Tensor? key_bounds=None", read<&A::key_bounds>},
    {"query_offset", "SymInt? query_offset=None", read<&A::query_offset>},
    {"query_offsets", "Tensor? query_offsets=None", read<&A::query_offsets>},
    {"key_origin", "Tensor? key_origin=None", read<&A::key_origin>},
    {"softcap", "float softcap=0.0", read<&A::softcap>},
    {"sink_logits", "Tensor? sink_logits=None", read<&A::sink_logits>},
    {"alibi_slopes", "Tensor? alibi_slopes=None", read<&A::alibi_slopes>},
    {"key_scale", "Tensor? key_scale=None", read<&A::key_scale>},
    {"value_scale", "Tensor? value_scale=None", read<&A::value_scale>},
    {"return_lse", "bool return_lse=False", read<&A::return_lse>},
    {"engine", "str engine=\"auto\"", read<&A::engine>},
    {"out", "Tensor(a!) out", read_tensor<&A::out>},
    {"lse", "Tensor(b!)? lse=None", read<&A::lse>},
    {"given_out", "Tensor? out=None", read<&A::out>},
    {"given_lse", "Tensor? lse=None", read<&A::lse>},
};

using Names = std::vector<const char*>;

/// Local statics: registration runs while the library is opened, before other files' globals exist.
const Names& selection_names() {
  static const Names kNames = {"block_size",     "block_rows", "budget_count", "budget_share",
                               "mass",           "selector",   "groups",       "row_step",
                               "stride",         "scores",     "sketch_codes", "sketch_ranges",
                               "sketch_lengths", "group",      "sink_blocks",  "local_blocks"};
  return kNames;
}

/// Of ops that take a block list.
Names with_list(Names names) {
  for (const char* name :
       {"counts", "indices", "partial", "bits", "block_q", "block_kv", "num_kv_blocks"}) {
    names.push_back(name);
  }
  return names;
}

/// Of ops that take the arguments of any pattern.
Names with_any_pattern(Names names) {
  for (const char* name :
       {"left", "right", "dilation", "sinks", "num_global", "global_tokens", "local", "stride"}) {
    names.push_back(name);
  }
  names = with_list(names);
  names.push_back("k");
  return names;
}

const std::vector<Op>& ops() {
  static const std::vector<Op> kOps = {
      {"naive", PatternKind::kAny, with_any_pattern({})},
      {"fused", PatternKind::kFull, {}},
      {"band", PatternKind::kBand, {"left", "right", "sinks", "num_global", "global_tokens"}},
      {"dilated", PatternKind::kDilated, {"left", "right", "dilation", "sinks"}},
      {"strided", PatternKind::kStrided, {"local", "stride"}},
      {"block_sparse", PatternKind::kBlockSparse, with_list({})},
      {"topk", PatternKind::kTopK, with_list({"k"})},
      {"block_topk", PatternKind::kBlockTopK, selection_names()},
      {"varlen", PatternKind::kAny,
       with_any_pattern({"cu_seq_q", "cu_seq_k", "max_q", "max_k", "maybe_seqused_k"}),
       Holding::kPacked},
      {"paged", PatternKind::kAny,
       with_any_pattern({"block_table", "seqused_k", "maybe_cu_seq_q", "maybe_max_q"}),
       Holding::kPages},
  };
  return kOps;
}

const Argument* find(const char* name) {
  for (const Argument& argument : kArguments) {
    if (std::strcmp(argument.name, name) == 0) return &argument;
  }
  throw std::logic_error(std::string("no argument ") + name);
}

void append(std::vector<const Argument*>* list, const Names& names) {
  for (const char* name : names) list->push_back(find(name));
}

std::string join(const std::vector<const Argument*>& arguments) {
  std::string result;
  for (const Argument* argument : arguments) {
    if (!result.empty()) result += ", ";
    if (std::strcmp(argument->name, "out") == 0) result += "*, ";
    result += argument->declaration;
  }
  return result;
}

}  // namespace

const Op& op_at(int index) { return ops()[index]; }

std::vector<const Argument*> arguments_of(const Op& op, OpForm form) {
  std::vector<const Argument*> list;
  append(&list, {"query", "key", "value"});
  append(&list, op.own_arguments);
  append(&list,
         {"attn_mask", "is_causal", "scale", "key_bounds", "query_offset", "query_offsets",
          "key_origin", "softcap", "sink_logits", "alibi_slopes", "key_scale", "value_scale"});
  if (form == OpForm::kFunctional) append(&list, {"return_lse", "engine"});
  if (form == OpForm::kOut) append(&list, {"engine", "out", "lse"});
  if (form == OpForm::kEngine) append(&list, {"engine", "given_out", "given_lse"});
  return list;
}

std::string name_of(const Op& op, OpForm form) {
  const char* suffix = form == OpForm::kFunctional ? "" : form == OpForm::kOut ? "_out" : "_engine";
  return std::string(op.name) + suffix;
}

std::string schema_of(const Op& op, OpForm form) {
  const char* result = form == OpForm::kFunctional ? "(Tensor out, Tensor lse)"
                       : form == OpForm::kOut      ? "()"
                                                   : "str";
  return name_of(op, form) + "(" + join(arguments_of(op, form)) + ") -> " + result;
}

std::vector<const Argument*> selection_arguments() {
  std::vector<const Argument*> list;
  append(&list, {"query", "key"});
  append(&list, selection_names());
  append(&list, {"is_causal", "scale", "key_bounds", "query_offset", "query_offsets", "key_origin",
                 "softcap", "maybe_block_table", "maybe_seqused_k", "maybe_cu_seq_q",
                 "maybe_cu_seq_k", "maybe_max_q", "maybe_max_k", "key_scale"});
  return list;
}

std::string selection_schema() {
  return "select_blocks(" + join(selection_arguments()) + ") -> (Tensor counts, Tensor indices)";
}

}  // namespace sparse_attn
