# The one list of commands: by hand, by hook and in CI the same targets are called.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
RUST_SOURCES := $(shell find rust kernels -name '*.rs' -o -name '*.toml' -o -name '*.cu*') Cargo.toml Cargo.lock
NEXTEST := $(shell cargo nextest --version >/dev/null 2>&1 && echo yes)

.DEFAULT_GOAL := help
.PHONY: help setup build demo test test-rust test-py test-slow interop test-gpu fmt fmt-check lint types docs bench check wheel clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

$(VENV)/base.stamp: pyproject.toml
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "loopq needs Python 3.11 or newer"'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --upgrade "pip>=25.1"
	$(PY) -m pip install -q "maturin>=1.9,<2" "numpy>=1.26" "safetensors>=0.4.5" "torch>=2.4"
	touch $@

$(VENV)/dev.stamp: $(VENV)/base.stamp
	$(PY) -m pip install -q --group dev "transformers>=4.57,<6" "matplotlib>=3.9"
	touch $@

$(VENV)/build.stamp: $(VENV)/base.stamp $(RUST_SOURCES) pyproject.toml
	$(BIN)/maturin develop --release --quiet
	touch $@

setup: $(VENV)/dev.stamp build ## Make the environment with everything that development needs

build: $(VENV)/build.stamp ## Build the extension and install the package into the environment

demo: build ## The main job: quantize the embedded model and print the comparison
	$(BIN)/loopq demo

test: test-rust test-py ## The whole test suite

test-rust: ## Tests of the Rust core
ifeq ($(NEXTEST),yes)
	cargo nextest run --release --workspace --exclude loopq-py
else
	cargo test --release --workspace --exclude loopq-py
endif

test-py: setup ## Tests of the Python package
	$(PY) -m pytest -m "not slow and not gpu"

test-slow: setup ## Tests that take minutes
	$(PY) -m pytest -m slow

.cache/venv-gptq/stamp: $(VENV)/dev.stamp
	@# It sees torch and transformers of the development environment and has its own setuptools: pins clash.
	$(PY) -m venv .cache/venv-gptq
	$(abspath $(PY)) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$(.cache/venv-gptq/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/development.pth"
	.cache/venv-gptq/bin/python -m pip install -q --upgrade pip setuptools wheel
	.cache/venv-gptq/bin/python -m pip install -q --no-build-isolation "gptqmodel>=7.7,<8" "optimum>=2.3,<3"
	touch $@

interop: setup .cache/venv-gptq/stamp ## Load exports with the real libraries, GPTQModel and optimum too
	$(PY) -m pytest tests/interop --timeout 900 -m "slow or not slow"

test-gpu: setup ## Tests that need a CUDA device
	$(PY) -m pytest -m gpu

fmt: setup ## Format everything
	cargo fmt
	$(BIN)/ruff format python tests benches
	$(BIN)/ruff check --fix python tests benches

fmt-check: setup
	cargo fmt --check
	$(BIN)/ruff format --check python tests benches

lint: setup ## Lints, import direction
	cargo clippy --release --workspace --all-targets -- -D warnings
	$(BIN)/ruff check python tests benches
	$(BIN)/lint-imports

types: setup ## Types, and the stub against the binary
	$(BIN)/mypy
	$(PY) -m mypy.stubtest loopq._native

wheel: setup ## Wheel for manylinux_2_28 and sdist, into dist/
	$(BIN)/maturin build --release --zig --compatibility manylinux_2_28 --out dist
	$(BIN)/maturin sdist --out dist

bench: setup ## Benchmarks; records go to benches/record
	$(PY) benches/python/bench_core.py

docs: setup ## Documentation of the Rust core
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --package loopq-core

check: fmt-check lint types docs test ## All that CI runs

clean: ## Remove what was built
	rm -rf target dist $(VENV)
