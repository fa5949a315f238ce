"""The registered ops and their namespace, which every build of the libraries may name its own.

No other file names it. The builder of the kernel hub writes a file of this interface in place of
this one.
"""

from __future__ import annotations

import torch

from . import _load

__all__ = ["add_op_namespace_prefix", "ops"]

#: As the libraries were built: SPARSE_ATTN_NAMESPACE of csrc/ops/namespace.h.
NAMESPACE = "sparse_attn"

_load.load()

#: The ops by name.
ops = getattr(torch.ops, NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    """Return the name under which torch knows an op."""
    return f"{NAMESPACE}::{op_name}"
