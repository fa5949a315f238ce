"""The registered ops by name, and the arguments of a call by name."""

from __future__ import annotations

from typing import Any

from ._ops import ops

__all__ = ["ATTENTION_OPS", "TOOL_OPS", "WRITING_OPS", "named_arguments", "overload", "written_by"]

#: Ops with the common arguments; each has a twin ``<op>_out``.
ATTENTION_OPS = (
    "naive",
    "fused",
    "band",
    "dilated",
    "strided",
    "block_sparse",
    "topk",
    "block_topk",
    "varlen",
    "paged",
)
#: Ops that write into their arguments and return nothing.
WRITING_OPS = ("append_to_cache", "append_to_sketch", "sketch_pages")
#: Ops that prepare or combine; ``merge_states`` has a twin ``merge_states_out``.
TOOL_OPS = ("select_blocks", "list_from_mask", "merge_states", *WRITING_OPS)


def overload(name: str) -> Any:
    """Return the registered op."""
    return getattr(ops, name).default


def named_arguments(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call by name, with the schema's defaults."""
    arguments = {}
    for index, argument in enumerate(op._schema.arguments):
        if index < len(args):
            arguments[argument.name] = args[index]
        else:
            arguments[argument.name] = kwargs.get(argument.name, argument.default_value)
    return arguments


def written_by(op: Any) -> list[str]:
    """Names of the arguments that an op writes into."""
    return [argument.name for argument in op._schema.arguments if argument.is_write]
