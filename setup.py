"""Put what CMake builds (op libraries, info module) into the package, in every form of install.

``python setup.py bdist_wheel --in-tree`` packs the op libraries that stand in the source folder
instead, without the info module: a wheel for every Python.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import ClassVar

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from scripts.cmake_build import build, check_tools, torch_folder  # noqa: E402
from scripts.digests import RECORD, libraries_match  # noqa: E402

PACKAGE = "sparse_attn"
BUILD_TORCH = "torch==2.13.0"
BUILDS = {"bdist_wheel", "build", "build_ext", "develop", "editable_wheel", "install"}


class CMakeBuild(build_ext):
    """Build everything with one CMake project instead of one extension at a time."""

    def output_dir(self) -> Path:
        """Return the package folder that takes the libraries."""
        in_place = self.inplace or getattr(self, "editable_mode", False)
        return (ROOT if in_place else Path(self.build_lib).resolve()) / PACKAGE

    def run(self) -> None:
        """Build what is missing."""
        if not self.distribution.get_command_obj("bdist_wheel").in_tree:
            build(self.output_dir())
            return
        source = ROOT / PACKAGE
        if not libraries_match(source):
            raise SystemExit(
                "sparse_attn: the libraries in sparse_attn/ are not built from these sources: "
                "run make"
            )
        for path in (*source.glob("_C*.so"), source / RECORD):
            shutil.copy(path, self.output_dir())

    def get_outputs(self) -> list[str]:
        """Return the libraries that stand in the package folder."""
        return [str(path) for path in sorted(self.output_dir().glob("*.so"))]

    def get_output_mapping(self) -> dict[str, str]:
        """Return no mapping: an editable install has its libraries in place."""
        return {}


class FreshPackage(build_py):
    """Start from an empty folder: what an earlier build left there is not installed."""

    def run(self) -> None:
        """Copy the Python files."""
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / PACKAGE, ignore_errors=True)
        super().run()


class Wheel(bdist_wheel):
    """Only the info module belongs to one Python: a wheel without it serves all."""

    user_options: ClassVar = [*bdist_wheel.user_options, ("in-tree", None, "pack what is built")]
    boolean_options: ClassVar = [*bdist_wheel.boolean_options, "in-tree"]

    def initialize_options(self) -> None:
        """Build, unless asked otherwise."""
        super().initialize_options()
        self.in_tree = False

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, ABI and platform."""
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if self.in_tree else (python, abi, platform)


if BUILDS.intersection(sys.argv) and "--in-tree" not in sys.argv:
    check_tools()
setup(
    ext_modules=[Extension(f"{PACKAGE}._info", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "build_py": FreshPackage, "bdist_wheel": Wheel},
    # Torch's headers are all that the build needs, so only a place without any torch gets one.
    setup_requires=[] if torch_folder() else [BUILD_TORCH],
)
