// The table of ops: each argument is declared once, with how it is read; an op is a list of names.
#pragma once

#include <string>
#include <vector>

#include "arguments.h"

namespace sparse_attn {

/// One argument: its schema text and how its stack value enters CallArguments.
struct Argument {
  const char* name;
  const char* declaration;
  void (*read)(CallArguments&, StableIValue);
};

/// The forms of an attention op: `<op>` returns what it makes, `<op>_out` writes out= and lse=,
/// `<op>_engine` says which engine would serve the call, and why faster ones are skipped.
enum class OpForm { kFunctional, kOut, kEngine };
constexpr OpForm kOpForms[] = {OpForm::kFunctional, OpForm::kOut, OpForm::kEngine};

/// One attention op; its other forms follow from it.
struct Op {
  const char* name;
  PatternKind kind;
  std::vector<const char*> own_arguments;  // beside query, key, value and the common ones
  Holding holding = Holding::kTensors;

  /// The baseline: any pattern by the naive engine.
  bool is_naive() const { return kind == PatternKind::kAny && holding == Holding::kTensors; }
};

constexpr int kNumOps = 10;

/// The attention ops, in a fixed order.
const Op& op_at(int index);

/// Arguments in the order of the schema.
std::vector<const Argument*> arguments_of(const Op& op, OpForm form);

/// The op's name in a form, and its schema.
std::string name_of(const Op& op, OpForm form);
std::string schema_of(const Op& op, OpForm form);

/// Block selection shares the arguments of block top-k and what places queries and keys.
std::vector<const Argument*> selection_arguments();
std::string selection_schema();

}  // namespace sparse_attn
