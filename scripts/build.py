"""Build the libraries in place, only what is missing; called by ``make``.

Op libraries serve every Python and torch, so those carried from another machine stay when the
record beside them names this tree's sources and their own hashes; then only the info module, which
belongs to one Python, is built where it is missing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sysconfig
from collections.abc import Mapping

from .cmake_build import build
from .digests import BUILD_SOURCES, ROOT, digest_of, library_hashes

PACKAGE = ROOT / "sparse_attn"
RECORD = PACKAGE / ".built_from"


def libraries_stand(state: Mapping[str, object]) -> bool:
    """Return whether the op libraries in place are what a build would make."""
    if os.environ.get("CMAKE_ARGS") or not RECORD.exists():
        return False
    if shutil.which("nvcc") and "_C_cuda.so" not in library_hashes():
        return False
    return bool(json.loads(RECORD.read_text()) == state)


def main() -> None:
    """Build what is missing and record what the libraries were made from."""
    state = {"sources": digest_of(BUILD_SOURCES), "libraries": library_hashes()}
    if not libraries_stand(state):
        build(PACKAGE)
        state["libraries"] = library_hashes()
        RECORD.write_text(json.dumps(state, indent=2) + "\n")
        return
    print("The op libraries in sparse_attn/ were built from these sources.")
    info = PACKAGE / f"_info{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not info.exists() and importlib.util.find_spec("pybind11"):
        build(PACKAGE, targets=("_info",))


if __name__ == "__main__":
    main()
