"""For which GPUs a build has code: those of its machine, and a wheel for all."""

import subprocess
from pathlib import Path

import pytest

from scripts import cmake_build, digests, wheel

ROOT = Path(__file__).resolve().parents[2]
QUERY = "--query-gpu=compute_cap --format=csv,noheader"
SCRIPT = f"""cmake_minimum_required(VERSION 3.25)
include({ROOT}/cmake/cuda_archs.cmake)
choose_cuda_archs()
foreach(list CUDA_ARCHS CUDA_DENSE_ARCHS CUDA_DEPENDENT_ARCHS CUDA_DECODE_ARCHS)
  message(STATUS "${{list}}=${{${{list}}}}")
endforeach()
"""
NOTHING = "75-virtual;80-virtual"
ALL = "75-real;80-real;80-virtual"


@pytest.fixture
def choose(tmp_path, monkeypatch):
    """Calls choose_cuda_archs on a machine whose nvidia-smi prints `said`; returns its lists."""
    try:
        cmake = cmake_build.find_tool("cmake")
    except SystemExit:
        pytest.skip("no compiler: cmake is missing")
    (tmp_path / "choose.cmake").write_text(SCRIPT)

    def run(asked="AUTO", said="", status=0):
        (tmp_path / "said").write_text(said)
        program = tmp_path / "nvidia-smi"
        program.write_text(
            f'#!/bin/sh\n[ "$*" = "{QUERY}" ] || exit 1\ncat {tmp_path}/said\nexit {status}\n'
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        command = [cmake, f"-DSPARSE_ATTN_CUDA_ARCHS={asked}", "-P", tmp_path / "choose.cmake"]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            return " ".join(result.stderr.split())
        lines = (line.removeprefix("-- ") for line in result.stdout.splitlines())
        return dict(line.split("=") for line in lines if "=" in line)

    return run


MACHINES = {
    "turing": ("7.5\n", "75-real;80-virtual"),
    "ampere": ("8.0\n", "75-virtual;80-real;80-virtual"),
    "two-of-a-kind": ("8.6\n8.6\n", "75-virtual;80-real;80-virtual"),
    "ada-windows-lines": ("8.9\r\n", "75-virtual;80-real;80-virtual"),
    "hopper": ("9.0\n", NOTHING),
    "blackwell": ("12.0\n10.3\n", NOTHING),
    "volta": ("7.0\n", NOTHING),
    "many": ("7.5\n8.6\n9.0\n", ALL),
    "no-gpu": ("", NOTHING),
    "no-driver": ("NVIDIA-SMI has failed; version 8.6 of [driver\n", NOTHING),
    "old-driver": ('Field "compute_cap" is not a valid field to query.\n', NOTHING),
    "other-numbers": ("17.5\n18.6\n8.6.1\n8.65\n[N/A]\n", NOTHING),
}


@pytest.mark.parametrize("said, archs", MACHINES.values(), ids=MACHINES)
def test_code_for_the_gpus_of_this_machine(choose, said, archs):
    assert choose(said=said)["CUDA_ARCHS"] == archs


def test_an_nvidia_smi_that_fails_is_no_gpu(choose):
    assert choose(status=9)["CUDA_ARCHS"] == NOTHING


LISTS = {
    "ALL": (ALL, "80-real;80-virtual", f"{ALL};90-real", "80-real;80-virtual;90-real"),
    "AUTO": (NOTHING, "80-virtual", f"{NOTHING};90-real", "80-virtual;90-real"),
    "75-virtual": ("75-virtual", "80-virtual", "75-virtual;90-real", "80-virtual;90-real"),
    "90-real;75": ("90-real;75", "90-real", "90-real;75", "90-real"),
}


@pytest.mark.parametrize("asked", LISTS)
def test_lists_of_the_engines(choose, asked):
    assert tuple(choose(asked).values()) == LISTS[asked]


@pytest.mark.parametrize("asked", ["auto", "native", "80-real;sm_86"])
def test_other_words_are_refused(choose, asked):
    wrong = asked.rpartition(";")[2]
    sentence = "SPARSE_ATTN_CUDA_ARCHS: expected AUTO, ALL or a list as 80-real;80-virtual, got "
    assert sentence + wrong in choose(asked)


class TestWheel:
    """A wheel runs elsewhere: libraries for the GPUs of this machine alone are completed first."""

    @pytest.fixture
    def builds(self, tmp_path, monkeypatch):
        """The options of the builds that ``make wheel`` starts, with libraries in `tmp_path`."""
        found = []
        monkeypatch.delenv("CMAKE_ARGS", raising=False)
        monkeypatch.setattr(wheel, "PACKAGE", tmp_path)
        monkeypatch.setattr(wheel, "libraries_stand", lambda: digests.libraries_match(tmp_path))
        monkeypatch.setattr(wheel, "build", lambda folder, options: found.append(options))
        return found

    @pytest.mark.parametrize("archs", ["ALL", "80-real"])
    def test_takes_what_was_asked_for(self, builds, tmp_path, archs):
        digests.write_record(tmp_path, digests.digest_of(digests.BUILD_SOURCES), archs)
        wheel.build_for_all()
        assert builds == []

    @pytest.mark.parametrize("archs", ["AUTO", None])
    def test_completes_libraries_of_this_machine(self, builds, tmp_path, archs):
        digests.write_record(tmp_path, digests.digest_of(digests.BUILD_SOURCES), archs)
        wheel.build_for_all()
        assert builds == [("-DSPARSE_ATTN_CUDA_ARCHS=ALL",)]

    def test_builds_what_is_missing(self, builds, tmp_path):
        wheel.build_for_all()
        digests.write_record(tmp_path, "of other sources", "ALL")
        wheel.build_for_all()
        assert builds == [("-DSPARSE_ATTN_CUDA_ARCHS=ALL",)] * 2

    def test_leaves_the_choice_to_cmake_args(self, builds, monkeypatch):
        monkeypatch.setenv("CMAKE_ARGS", "-DSPARSE_ATTN_CUDA_ARCHS=80-real")
        wheel.build_for_all()
        assert builds == [()]


def test_a_build_records_its_architectures(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda command, check: None)
    (tmp_path / "CMakeCache.txt").write_text("OTHER:STRING=1\nSPARSE_ATTN_CUDA_ARCHS:STRING=ALL\n")
    (tmp_path / "_info.abi.so").touch()
    cmake_build.build(tmp_path, build_dir=tmp_path)
    assert digests.cuda_archs_of(tmp_path) == "ALL" and digests.libraries_match(tmp_path)
