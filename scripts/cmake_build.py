"""Run the CMake project with Ninja; called by setup.py and by scripts/build.py.

The build reads torch's headers, so an isolated build takes the torch of the environment that
started it where there is one; any torch from 2.10 on serves, whichever runs later.

Environment: ``CMAKE_ARGS`` adds options for CMake, ``MAX_JOBS`` limits parallel compilers.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

from .digests import BUILD_SOURCES, ROOT, digest_of, write_record

OLDEST_TORCH = (2, 10)


def _is_new_enough(torch: Path) -> bool:
    """Return whether a folder holds a torch whose headers the build can use."""
    file = torch / "version.py"
    found = re.search(r"__version__ = '(\d+)\.(\d+)", file.read_text()) if file.exists() else None
    return found is not None and (int(found[1]), int(found[2])) >= OLDEST_TORCH


def torch_folder() -> Path | None:
    """Return the folder of torch: importable, or hidden from an isolated build."""
    folders = [*sys.path, sysconfig.get_path("platlib"), site.getusersitepackages()]
    if "VIRTUAL_ENV" in os.environ:
        folders += map(str, Path(os.environ["VIRTUAL_ENV"]).glob("lib/python3*/site-packages"))
    folders.append(sysconfig.get_path("platlib", vars={"platbase": sys.base_prefix}))
    candidates = (Path(folder) / "torch" for folder in folders)
    return next((torch for torch in candidates if _is_new_enough(torch)), None)


def find_tool(name: str) -> str:
    """Return the path of `name`: of this Python's own packages first, else the system's."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise SystemExit(f"sparse_attn: the build needs {name}: pip install {name}")
    return found


def check_tools() -> None:
    """Exit with one sentence where something that every build needs is missing."""
    find_tool("cmake")
    find_tool("ninja")
    compilers = shlex.split(os.environ.get("CXX", ""))[:1] or ["c++", "g++", "clang++"]
    named = "CMAKE_CXX_COMPILER" in os.environ.get("CMAKE_ARGS", "")
    if not named and not any(map(shutil.which, compilers)):
        raise SystemExit(
            f"sparse_attn: the build needs a C++ compiler, found none ({', '.join(compilers)}): "
            "install one (apt install g++, dnf install gcc-c++) or name it in CXX"
        )


def cached(build_dir: Path, name: str) -> str | None:
    """Return the value of an option in a build folder, None where it was never configured."""
    cache = build_dir / "CMakeCache.txt"
    text = cache.read_text() if cache.exists() else ""
    found = re.search(rf"^{name}:\w+=(.*)$", text, re.MULTILINE)
    return found[1] if found else None


def build(
    output_dir: Path,
    targets: tuple[str, ...] = (),
    build_dir: Path = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}",
    options: tuple[str, ...] = (),
) -> None:
    """Configure a build folder, this Python's own, and build what is missing into `output_dir`.

    A build of all targets records its sources and architectures beside the libraries.
    """
    check_tools()
    torch = torch_folder()
    if torch is None:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise SystemExit(f"sparse_attn: the build needs torch >= {oldest}, found none")
    sources = digest_of(BUILD_SOURCES)
    cmake = find_tool("cmake")
    configure = [
        cmake,
        f"-S{ROOT}",
        f"-B{build_dir}",
        "-GNinja",
        f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DSPARSE_ATTN_TORCH={torch}",
        f"-DSPARSE_ATTN_OUTPUT_DIR={output_dir}",
        *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        *options,
    ]
    jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 2)
    compile_all = [cmake, "--build", str(build_dir), "--parallel", jobs]
    try:
        subprocess.run(configure, check=True)
        subprocess.run([*compile_all, *(["--target", *targets] if targets else [])], check=True)
    except subprocess.CalledProcessError as error:
        raise SystemExit("sparse_attn: the build failed, its output above says why") from error
    if targets:
        return
    write_record(output_dir, sources, cached(build_dir, "SPARSE_ATTN_CUDA_ARCHS"))
    if not list(output_dir.glob("_info.*.so")):
        print(
            "sparse_attn: built without its info module, which needs pybind11 and Python's headers:"
            " build facts and the tiles that patterns visit are missing, all else works"
        )
