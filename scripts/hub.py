"""Write the folder that Hugging Face's kernel builder takes, ``make hub``: build/hub.

    build.toml, flake.nix          what to build: the lists and flags of CMakeLists.txt
    csrc/                          the sources as they are, generated headers written out
    torch-ext/torch_binding.cpp    registers the ops in the namespace that the builder chooses
    torch-ext/sparse_attn/         the Python package; the builder adds _ops.py, which names that
                                   namespace and loads the library

A variant serves one backend: CUDA's holds no CPU engines. Parts that need other packages
(integrations, quality) stay out, and what only annotations need is imported for type checkers.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from .digests import ROOT

FOLDER = ROOT / "build" / "hub"
NAME = "sparse_attn"
VERSION = 0  # of the interface on the hub; 0 is not yet fixed
STABLE_ABI = "2.11"  # the oldest that the builder has; the sources take 2.10
TOOLS = ("advisor", "cli.py", "_cli_inputs.py", "__main__.py")
PRIVATE = ("_binding.py", "_progress.py", "_info.pyi", "_ops.py")
LEFT_OUT = ("integrations", "quality", *PRIVATE, *TOOLS)
#: Names that the package on the hub has not.
DROPPED = ("integrations", "quality", "Advice", "Profile", "advise", "profile")
ISAS = ("plain", "avx2", "avx512")
X86 = ["-DSPARSE_ATTN_X86", "-DSPARSE_ATTN_AMX"]

TYPES_ONLY = r"from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    \1"

BINDING = """// Registers the ops of one backend in the namespace that the builder chose.
#define SPARSE_ATTN_NAMESPACE TORCH_EXTENSION_NAME
#include "registration.h"
#include "../csrc/ops/register_schemas.h"
#if defined(CUDA_KERNEL)
#include "../csrc/ops/register_cuda.h"
#else
#include "../csrc/ops/register_cpu.h"
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
"""
LOAD = '''"""The builder's ``_ops.py`` loads the library, so there is nothing to look for."""

from __future__ import annotations

__all__ = ["cuda_error"]

#: Why there are no CUDA engines: unknown to this build.
cuda_error: str | None = None
'''
FLAKE = """{
  description = "Sparse attention for inference";
  inputs.kernel-builder.url = "github:huggingface/kernels";
  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}
"""


def fill(template: str, words: dict[str, str]) -> str:
    """Return a template with its words put in."""
    for name, word in words.items():
        template = template.replace(name, word)
    return template


def hopper_kernels() -> dict[str, str]:
    """Return the files that CMake writes for the head dims of Hopper's table, by path.

    As cmake/hopper_kernels.cmake: a file for each part of a head dim's kernels, one more where
    top-k has a kernel.
    """
    room = ROOT / "csrc/cuda/hopper"
    table = (room / "table.h").read_text()

    def numbers(row: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", re.findall(row, table)[0])]

    def keys(features: str) -> list[int]:
        return numbers(rf"{{\d, {features}, .*{{([\d, ]+)}}}}")

    head_dims = numbers(r"kHeadDims\[\] = {([\d, ]+)}")
    sinks, biased, ragged = keys("kSinkCalls"), keys("kBiasedCalls"), keys("kScoredRaggedCalls")
    plain_ragged, topk = keys("kPlainRaggedCalls"), keys("kTopCalls")
    part, top = (room / "part.cu.in").read_text(), (room / "topk_head_dim.cu.in").read_text()
    files: dict[str, str] = {}
    for i, head_dim in enumerate(head_dims):
        named = {"@head_dim@": str(head_dim)}
        parts = {"kWhole": 1, "kBiased": biased[i], "kRagged": ragged[i] + plain_ragged[i]}
        made: dict[str, str] = {}
        for name, there in parts.items():
            lines = {
                dtype: f"template Status launch_part<Part::{name}, Dtype::{dtype}, {head_dim}>"
                "(int32_t, const Arguments&);"
                for dtype in ("kFloat16", "kBFloat16")
            }
            if name == "kWhole" and sinks[i]:
                made_of = {f"{name}_{dtype}": line for dtype, line in lines.items()}
            else:
                made_of = {name: "\n".join(lines.values())} if there else {}
            for file, kernels in made_of.items():
                made[file] = fill(part, named | {"@part@": name, "@kernels@": kernels})
        if topk[i]:
            made["topk_head_dim"] = fill(top, named)
        files |= {f"csrc/cuda/hopper/{name}_{head_dim}.cu": text for name, text in made.items()}
    return files


class Project:
    """What CMakeLists.txt says of sources and flags, and cuda_archs.cmake of architectures."""

    def __init__(self) -> None:
        files = (ROOT / "CMakeLists.txt", ROOT / "cmake" / "cuda_archs.cmake")
        self.text = "".join(re.sub(r"#.*", "", file.read_text()) for file in files)
        self.lists = {
            name: words.replace('"', "").split()
            for name, words in re.findall(r"set\((\w+)((?:\s+[^()\s]+)*)[^()]*\)", self.text)
        }
        self.generated = hopper_kernels()
        self.lists["HOPPER_KERNEL_SOURCES"] = list(self.generated)
        self.lists["HOPPER_TOPK_SOURCES"] = [path for path in self.generated if "topk" in path]

    def words(self, name: str) -> list[str]:
        """Return a list with the lists that it names put in."""
        found: list[str] = []
        for word in self.lists[name]:
            inner = re.fullmatch(r"\$\{(\w+)\}", word)
            found += self.words(inner[1]) if inner else [word]
        return found

    def capabilities(self, archs: list[str]) -> list[str]:
        """Return the builder's words for architectures such as 80-real, or a list's name.

        As cmake/cuda_archs.cmake makes the lists: code for every GPU, since it runs elsewhere.
        """
        everything = self.words("ALL_CUDA_ARCHS")
        dense = [arch for arch in everything if not re.match(r"[1-7]\d-", arch)]
        lists = {
            "${CUDA_ARCHS}": everything,
            "${CUDA_DENSE_ARCHS}": dense,
            "${CUDA_DEPENDENT_ARCHS}": [*everything, "90-real"],
            "${CUDA_DECODE_ARCHS}": [*dense, "90-real"],
        }
        archs = lists.get(archs[0], archs)
        levels: dict[str, bool] = {}
        for arch in archs:
            number, _, kind = arch.partition("-")
            level = f"{number[0]}.{number[1:]}"
            levels[level] = levels.get(level, False) or kind == "virtual"
        return [f"{level}+PTX" if ptx else level for level, ptx in levels.items()]

    def engines(self) -> list[tuple[str, list[str], list[str], list[str]]]:
        """Return name, sources, flags and capabilities of each CUDA engine."""
        own = {
            file: flag
            for files, flag in re.findall(
                r"set_source_files_properties\(([^)]*?)PROPERTIES COMPILE_OPTIONS ([^)\s]+)\)",
                self.text,
            )
            for word in files.split()
            for file in (self.words(word[2:-1]) if word.startswith("$") else [word])
        }
        found = []
        for call in re.findall(r"add_cuda_engine\(([^)]*)\)", self.text):
            name, *words = call.split()
            parts: dict[str, list[str]] = {}
            for word in words:
                if re.fullmatch("[A-Z_]+", word):
                    current = parts.setdefault(word, [])
                else:
                    current.append(word)
            capabilities = self.capabilities(parts["ARCHS"])
            sources = [file for name in parts["SOURCES"] for file in self.words(name[2:-1])]
            flags = parts.get("FLAGS", [])
            for flag in ["", *sorted(set(own.values()))]:
                part = [source for source in sources if own.get(source, "") == flag]
                if part:
                    title = f"{name}{'_' + flag.strip('-').replace('=', '_') if flag else ''}"
                    found.append((title, part, [*flags, *([flag] if flag else [])], capabilities))
        return found


def listed(words: list[str]) -> str:
    """Return words as a list of TOML."""
    return "[" + ", ".join(f'"{word}"' for word in words) + "]"


def section(name: str, backend: str, sources: list[str], **more: list[str]) -> str:
    """Return the section of one kernel."""
    lines = [f"[kernel.{name}]", f'backend = "{backend}"', 'depends = ["torch"]']
    lines += [f"src = {listed(sources)}", 'include = ["csrc"]']
    lines += [f"{key.replace('_', '-')} = {listed(words)}" for key, words in more.items() if words]
    return "\n".join(lines) + "\n"


def build_toml(project: Project, headers: list[str]) -> str:
    """Return what the builder reads."""
    binding = ["torch-ext/torch_binding.cpp", *headers]
    shared = project.words("COMMON_SOURCES") + project.words("OPS_SOURCES")
    parts = [
        f'[general]\nname = "{NAME}"\nversion = {VERSION}\nedition = 5\nlicense = "bsd-3-clause"\n'
        'backends = ["cpu", "cuda"]\n',
        f'[torch]\nsrc = {listed(binding)}\ninclude = ["csrc"]\n',
        f'[torch.stable-abi]\ncpu = "{STABLE_ABI}"\ncuda = "{STABLE_ABI}"\n',
        section("ops_cpu", "cpu", shared, cxx_flags=X86),
        section("ops_cuda", "cuda", shared),
        section("cpu", "cpu", project.words("CPU_SOURCES"), cxx_flags=X86),
        section(
            "cpu_amx",
            "cpu",
            project.words("CPU_AMX_SOURCES"),
            cxx_flags=[*X86, *project.words("ISA_FLAGS_avx512"), *project.words("AMX_FLAGS")],
        ),
    ]
    for isa in ISAS:
        flags = [*X86, "-ffp-contract=fast", *project.words(f"ISA_FLAGS_{isa}")]
        source = f"csrc/cpu/vector/vector_math_{isa}.cpp"
        parts.append(section(f"cpu_{isa}", "cpu", [source], cxx_flags=flags))
    for name, sources, flags, capabilities in project.engines():
        parts.append(
            section(
                f"cuda_{name}", "cuda", sources, cuda_flags=flags, cuda_capabilities=capabilities
            )
        )
    return "\n".join(parts)


def python_source(path: Path) -> str:
    """Return a file of the package as it stands on the hub."""
    if path.name == "_load.py":
        return LOAD
    text = path.read_text()
    text = re.sub(r"^(from typing_extensions .*)$", TYPES_ONLY, text, flags=re.MULTILINE)
    if path == ROOT / NAME / "__init__.py":
        text = re.sub(r"^from \.advisor import .*\n", "", text, flags=re.MULTILINE)
        for name in DROPPED:
            text = re.sub(rf'^    "{name}",\n', "", text, flags=re.MULTILINE)
            text = re.sub(
                rf"^(from \. import .*?)\b{name}\b(?:, )?", r"\1", text, flags=re.MULTILINE
            )
        text = re.sub(r"^(from \. import .*?),? *$", r"\1", text, flags=re.MULTILINE)
    return text


def write(folder: Path) -> None:
    """Write the folder, in place of one that is there."""
    shutil.rmtree(folder, ignore_errors=True)
    project = Project()
    shutil.copytree(ROOT / "csrc", folder / "csrc", ignore=shutil.ignore_patterns("info"))
    for path in (folder / "csrc" / "ops").glob("register_*.cpp"):
        path.rename(path.with_suffix(".h"))  # the binding includes it
    for isa in ISAS:
        wrapper = f'#define SPARSE_ATTN_ISA {isa}\n#include "vector_math.cpp"\n'
        (folder / "csrc" / "cpu" / "vector" / f"vector_math_{isa}.cpp").write_text(wrapper)
    for source, text in project.generated.items():
        (folder / source).write_text(text)
    generator = project.words("CUDA_HOPPER_GENERATOR")[0]
    generated = (folder / generator).parent / "wgmma_generated.cuh"
    subprocess.run([sys.executable, str(folder / generator), str(generated)], check=True)
    package = folder / "torch-ext" / NAME
    for path in sorted((ROOT / NAME).rglob("*.py")):
        inside = path.relative_to(ROOT / NAME)
        if inside.parts[0] not in LEFT_OUT:
            (package / inside).parent.mkdir(parents=True, exist_ok=True)
            (package / inside).write_text(python_source(path))
    (folder / "torch-ext" / "torch_binding.cpp").write_text(BINDING)
    headers = sorted(p.relative_to(folder).as_posix() for p in (folder / "csrc").rglob("*.*h"))
    (folder / "build.toml").write_text(build_toml(project, headers))
    (folder / "flake.nix").write_text(FLAKE)
    shutil.copy(ROOT / "LICENSE", folder)


if __name__ == "__main__":
    write(FOLDER)
    print(FOLDER)
