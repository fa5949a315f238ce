"""Put what CMake builds (op libraries, info module) into the package, in every form of install."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from scripts.cmake_build import build, torch_folder  # noqa: E402

PACKAGE = "sparse_attn"
BUILD_TORCH = "torch==2.13.0"


class CMakeBuild(build_ext):
    """Build everything with one CMake project instead of one extension at a time."""

    def output_dir(self) -> Path:
        """Return the package folder that takes the libraries."""
        in_place = self.inplace or getattr(self, "editable_mode", False)
        return (ROOT if in_place else Path(self.build_lib).resolve()) / PACKAGE

    def run(self) -> None:
        """Build what is missing."""
        build(self.output_dir())

    def get_outputs(self) -> list[str]:
        """Return the libraries that stand in the package folder."""
        return [str(path) for path in sorted(self.output_dir().glob("*.so"))]

    def get_output_mapping(self) -> dict[str, str]:
        """Return no mapping: an editable install has its libraries in place."""
        return {}


setup(
    ext_modules=[Extension(f"{PACKAGE}._info", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    # Torch's headers are all that the build needs, so only a place without any torch gets one.
    setup_requires=[] if torch_folder() else [BUILD_TORCH],
)
