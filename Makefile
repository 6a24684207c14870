# galley: every task by name. `make` alone explains them; the work itself is in scripts/.
SHELL := /bin/bash
MODEL ?= models/SmolLM2-135M-Instruct.Q4_1.gguf
ARGS  ?=
PYTHON := .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup setup-test build build-all model serve test test-unit test-rust test-asan test-tsan test-parity \
        test-server parity bench quality peer format lint clean distclean

help:
	@echo 'galley: a server for large language models that advances every conversation in one stroke'
	@echo
	@echo 'Start here'
	@echo '  make serve        set up, build, fetch the default model and serve it with 16 rows (flags: ARGS="--port 9000")'
	@echo '  make test         set up, build and run every test suite'
	@echo
	@echo 'Step by step'
	@echo '  make setup        system packages, Rust toolchain, Python environment with MLX'
	@echo '  make build        the program, build/galley'
	@echo '  make model        the default model, in models/'
	@echo
	@echo 'Test suites, each on its own'
	@echo '  make test-unit    C++ unit tests            make test-rust    tests of the text crate'
	@echo '  make test-asan    AddressSanitizer, UBSan   make test-tsan    ThreadSanitizer'
	@echo '  make test-parity  against mlx-lm            make test-server  the real program, driven by the official SDKs'
	@echo
	@echo 'Measure'
	@echo '  make parity       the parity table, docs/parity.md'
	@echo '  make bench        speed against llama.cpp, on a quiet machine (docs/bench.json, docs/bench.svg)'
	@echo '  make quality      KL divergence and top-1 agreement of the fused kernels'
	@echo
	@echo 'Work on the code'
	@echo '  make format       clang-format                make lint         clang-format and clang-tidy, checking only'
	@echo '  make clean        removes what was built      make distclean    also environment, model, caches'

setup:
	@scripts/setup.sh

setup-test:
	@scripts/setup.sh test

build: setup
	@scripts/build.sh release galley

build-all: setup
	@scripts/build.sh release

model: setup
	@scripts/model.sh

serve: build model
	build/galley serve $(MODEL) --batch 16 $(ARGS)

# scripts/test.py runs suites, adds up what passed and failed, and ends in one line: N passed, M failed.
test: setup-test model
	@$(PYTHON) scripts/test.py

test-unit: setup model
	@$(PYTHON) scripts/test.py unit

test-rust: setup
	@$(PYTHON) scripts/test.py rust

test-asan: setup model
	@$(PYTHON) scripts/test.py asan

test-tsan: setup
	@$(PYTHON) scripts/test.py tsan

test-parity: setup-test
	@$(PYTHON) scripts/test.py parity

test-server: setup-test model
	@$(PYTHON) scripts/test.py server

parity: setup-test
	@scripts/build.sh release
	@$(PYTHON) tests/parity/run.py

peer: setup
	@scripts/peer-llama.sh

bench: setup-test build model peer
	@scripts/build.sh release bench_prefix_index
	@$(PYTHON) bench/run.py $(ARGS)
	@$(PYTHON) bench/kv.py

quality: setup-test build model peer
	@$(PYTHON) bench/quality.py --kv-quant 8 4 $(ARGS)

format:
	@scripts/format.sh

lint: setup
	@scripts/build.sh release
	@scripts/lint.sh

clean:
	rm -rf build build-debug build-asan build-tsan bench/out .cache/rust .cache/stamps/configure-* .cache/lint .cache/test

distclean: clean
	rm -rf .venv .cache models
