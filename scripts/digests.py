"""Digests of groups of source files, for builds and recorded runs to name the tree they come from.

Needs nothing but Python; paths are relative to the repository's root. ``sparse_attn/_load.py`` runs
this file by its path.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

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
# Written beside the libraries by every build: the digest of their sources, and their hashes.
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
    record = package / RECORD
    state = {"sources": digest_of(BUILD_SOURCES), "libraries": library_hashes(package)}
    return record.exists() and bool(json.loads(record.read_text()) == state)


def is_copy(package: Path) -> bool:
    """Return whether `package` holds this tree's Python files and libraries built from it."""
    python = digest_of(["**/*.py"], ROOT / "sparse_attn")
    return digest_of(["**/*.py"], package) == python and libraries_match(package)


def write_record(package: Path, sources: str) -> None:
    """Record which sources the libraries in `package` were built from."""
    state = {"sources": sources, "libraries": library_hashes(package)}
    (package / RECORD).write_text(json.dumps(state, indent=2) + "\n")
