"""Build the libraries in place, only what is missing; called by ``make``.

Op libraries serve every Python and torch, so those carried from another machine stay when the
record beside them names this tree's sources and their own hashes; then only the info module, which
belongs to one Python, is built where it is missing.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig

from .cmake_build import build
from .digests import ROOT, libraries_match

PACKAGE = ROOT / "sparse_attn"


def libraries_stand() -> bool:
    """Return whether the op libraries in place are what a build would make."""
    if os.environ.get("CMAKE_ARGS"):
        return False
    if shutil.which("nvcc") and not (PACKAGE / "_C_cuda.so").exists():
        return False
    return libraries_match(PACKAGE)


def main() -> None:
    """Build what is missing."""
    if not libraries_stand():
        build(PACKAGE)
        return
    print("The op libraries in sparse_attn/ were built from these sources.")
    info = PACKAGE / f"_info{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not info.exists() and importlib.util.find_spec("pybind11"):
        build(PACKAGE, targets=("_info",))


if __name__ == "__main__":
    main()
