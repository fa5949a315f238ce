"""The registered ops and their namespace, which every build of the libraries may name its own.

No other file names it. The builder of the kernel hub writes a file of this interface in place of
this one.
"""

from __future__ import annotations

import torch

from . import _load

__all__ = ["add_op_namespace_prefix", "ops"]

_load.load()

#: The ops by name.
ops = torch.ops.sparse_attn


def add_op_namespace_prefix(op_name: str) -> str:
    """Return the name under which torch knows an op."""
    return f"sparse_attn::{op_name}"
