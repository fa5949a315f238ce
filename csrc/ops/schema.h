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

/// One attention op; its `_out` twin follows from it.
struct Op {
  const char* name;
  PatternKind kind;
  std::vector<const char*> pattern_arguments;
};

constexpr int kNumOps = 8;

/// The attention ops, in a fixed order.
const Op& op_at(int index);

/// Arguments in the order of the schema; `outputs` adds out and lse and drops return_lse.
std::vector<const Argument*> arguments_of(const Op& op, bool outputs);

/// `name(arguments) -> (Tensor out, Tensor lse)`, or the `_out` twin's schema.
std::string schema_of(const Op& op, bool outputs);

/// Block selection shares the arguments of block top-k and what places queries and keys.
std::vector<const Argument*> selection_arguments();
std::string selection_schema();

}  // namespace sparse_attn
