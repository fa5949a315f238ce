"""Digests of groups of source files, for builds and recorded runs to name the tree they come from.

Needs nothing but Python; paths are relative to the repository's root. ``sparse_attn/_load.py`` runs
this file by its path.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# What the recorded GPU run depends on.
EVIDENCE_GROUPS = {
    "device sources": [
        "csrc/cuda/**/*",
        "csrc/ops/*",
        "csrc/*",
        "cmake/*",
        "CMakeLists.txt",
    ],
    "Python package": ["sparse_attn/**/*.py"],
    "tests": ["tests/**/*.py"],
}
# What the libraries are made from.
BUILD_SOURCES = ["csrc/**/*", "cmake/*", "CMakeLists.txt"]
# Written beside the libraries by every build: the digest of their sources, their hashes, and which
# architectures were asked for (cmake/cuda_archs.cmake).
RECORD = ".built_from"


def files_of(patterns: Iterable[str], root: Path = ROOT) -> list[Path]:
    """Return the files that match, sorted, caches and dot files left out."""
    found = {path for pattern in patterns for path in root.glob(pattern) if path.is_file()}
    return sorted(p for p in found if p.suffix != ".pyc" and not p.name.startswith("."))


def digest_of(patterns: Iterable[str], root: Path = ROOT) -> str:
    """Return the SHA-256 over names and contents of the files that match."""
    total = hashlib.sha256()
    for path in files_of(patterns, root):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return total.hexdigest()


def evidence_digests() -> dict[str, str]:
    """Return the digest of each group that a recorded GPU run depends on."""
    return {name: digest_of(patterns) for name, patterns in EVIDENCE_GROUPS.items()}


def library_hashes(package: Path = ROOT / "sparse_attn") -> dict[str, str]:
    """Return the SHA-256 of each built op library."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(package.glob("_C*.so"))
    }


def libraries_match(package: Path) -> bool:
    """Return whether the libraries in `package` are those that a build of this tree put there."""
    state = {"sources": digest_of(BUILD_SOURCES), "libraries": library_hashes(package)}
    return state.items() <= _record_of(package).items()


def cuda_archs_of(package: Path) -> str | None:
    """Return what the libraries in `package` were built for: AUTO, ALL or architectures."""
    return _record_of(package).get("cuda_archs")


def _record_of(package: Path) -> dict[str, Any]:
    record = package / RECORD
    return json.loads(record.read_text()) if record.exists() else {}


def is_copy(package: Path) -> bool:
    """Return whether `package` holds this tree's Python files and libraries built from it."""
    python = digest_of(["**/*.py"], ROOT / "sparse_attn")
    return digest_of(["**/*.py"], package) == python and libraries_match(package)


def write_record(package: Path, sources: str, cuda_archs: str | None = None) -> None:
    """Record which sources the libraries in `package` were built from, and for which GPUs."""
    libraries = library_hashes(package)
    state = {"sources": sources, "libraries": libraries, "cuda_archs": cuda_archs}
    (package / RECORD).write_text(json.dumps(state, indent=2) + "\n")
