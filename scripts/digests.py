"""Digests of groups of source files, for builds and recorded runs to name the tree they come from.

Needs nothing but Python; paths are relative to the repository's root.
"""

from __future__ import annotations

import hashlib
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


def files_of(patterns: Iterable[str]) -> list[Path]:
    """Return the files that match, sorted, caches and dot files left out."""
    found = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    return sorted(p for p in found if p.suffix != ".pyc" and not p.name.startswith("."))


def digest_of(patterns: Iterable[str]) -> str:
    """Return the SHA-256 over names and contents of the files that match."""
    total = hashlib.sha256()
    for path in files_of(patterns):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(ROOT).as_posix()} {content}\n".encode())
    return total.hexdigest()


def evidence_digests() -> dict[str, str]:
    """Return the digest of each group that a recorded GPU run depends on."""
    return {name: digest_of(patterns) for name, patterns in EVIDENCE_GROUPS.items()}


def library_hashes() -> dict[str, str]:
    """Return the SHA-256 of each built op library."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((ROOT / "sparse_attn").glob("_C*.so"))
    }
