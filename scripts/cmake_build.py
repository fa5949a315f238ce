"""Run the CMake project with Ninja; called by setup.py and by scripts/build.py.

The build reads torch's headers, so an isolated build takes the torch of the environment that
started it where there is one; any torch from 2.10 on serves, whichever runs later.

Environment: ``CMAKE_ARGS`` adds options for CMake, ``MAX_JOBS`` limits parallel compilers.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def torch_folder() -> Path | None:
    """Return the folder of torch: importable, or hidden from an isolated build."""
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0])
    hidden = [Path(sysconfig.get_path("platlib"))]
    if "VIRTUAL_ENV" in os.environ:
        hidden += Path(os.environ["VIRTUAL_ENV"]).glob("lib/python3*/site-packages")
    return next((folder / "torch" for folder in hidden if (folder / "torch").is_dir()), None)


def tool(name: str) -> str:
    """Return the path of `name`: of this Python's own packages first, else the system's."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise RuntimeError(f"building sparse_attn needs {name}: pip install {name}")
    return found


def build(
    output_dir: Path,
    targets: tuple[str, ...] = (),
    build_dir: Path = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}",
    options: tuple[str, ...] = (),
) -> None:
    """Configure a build folder, this Python's own, and build what is missing into `output_dir`."""
    cmake = tool("cmake")
    configure = [
        cmake,
        f"-S{ROOT}",
        f"-B{build_dir}",
        "-GNinja",
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DSPARSE_ATTN_TORCH={torch_folder() or ''}",
        f"-DSPARSE_ATTN_OUTPUT_DIR={output_dir}",
        *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        *options,
    ]
    jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 2)
    compile_all = [cmake, "--build", str(build_dir), "--parallel", jobs]
    subprocess.run(configure, check=True)
    subprocess.run([*compile_all, *(["--target", *targets] if targets else [])], check=True)
