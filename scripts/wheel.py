"""Build the op libraries for every GPU and pack them into one wheel, ``make wheel``.

A build has code for the GPUs of its machine unless options name others; a wheel runs elsewhere, so
libraries of such a build are completed first. The wheel serves every Python and every torch that
the package serves: the libraries hold no Python and take torch's stable ABI alone; the info module,
which belongs to one Python, stays out. auditwheel names the oldest manylinux that they run on;
torch's own libraries come with torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .build import PACKAGE, libraries_stand
from .cmake_build import build, find_tool
from .digests import ROOT, cuda_archs_of

DIST = ROOT / "dist"
TORCH_LIBRARIES = ("libtorch.so", "libtorch_cpu.so", "libc10.so")
LARGEST = 100 * 10**6  # bytes that package indexes take


def build_for_all() -> None:
    """Build what is missing, with code for every GPU unless ``CMAKE_ARGS`` names architectures."""
    if libraries_stand() and cuda_archs_of(PACKAGE) not in (None, "AUTO"):
        return
    named = "SPARSE_ATTN_CUDA_ARCHS" in os.environ.get("CMAKE_ARGS", "")
    build(PACKAGE, options=() if named else ("-DSPARSE_ATTN_CUDA_ARCHS=ALL",))


def check_size(wheel: Path) -> None:
    """Exit where no package index would take the wheel."""
    size = wheel.stat().st_size
    if size > LARGEST:
        raise SystemExit(f"sparse_attn: expected a wheel of at most {LARGEST} bytes, got {size}")


def pack(folder: Path) -> Path:
    """Write the wheel of the libraries in place into `folder` and return its path."""
    options = [f"--exclude={name}" for name in TORCH_LIBRARIES]
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        command = [sys.executable, "-W", "ignore", "setup.py", "--quiet"]
        command += [
            "build",
            f"--build-base={scratch}",
            "bdist_wheel",
            "--in-tree",
            f"--dist-dir={scratch}",
        ]
        command += [f"--bdist-dir={scratch / 'files'}"]
        subprocess.run(command, cwd=ROOT, check=True)
        (plain,) = scratch.glob("*.whl")
        repaired = scratch / "repaired"
        repair = [
            find_tool("auditwheel"),
            "repair",
            *options,
            f"--wheel-dir={repaired}",
        ]
        tools = os.pathsep.join((str(Path(find_tool("patchelf")).parent), os.environ["PATH"]))
        subprocess.run([*repair, str(plain)], check=True, env=os.environ | {"PATH": tools})
        (wheel,) = repaired.glob("*-py3-none-manylinux*.whl")
        check_size(wheel)
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, folder))


if __name__ == "__main__":
    build_for_all()
    print(pack(DIST))
