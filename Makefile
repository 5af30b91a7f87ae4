# `make search` sets up and runs the main job on a shipped example; `make test` sets up and passes every check.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

MAKEFLAGS += --jobs=2  # types are checked beside the tests

.PHONY: search test lint types contracts tests hunt clean

search: $(VENV)/.runtime
	$(BIN)/autoplan search examples/llama3-70b/config.json --cluster h100-sxm:16x8 --global-batch 512 --seq-len 8192 --force
	$(BIN)/autoplan export plan.json --to megatron-lm --out launch --force

test: lint types contracts tests

lint: $(VENV)/.dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check

types: $(VENV)/.dev
	$(BIN)/mypy

contracts: $(VENV)/.dev
	$(BIN)/lint-imports

# Bytecode first: tests start hundreds of commands, which would each compile the package where PYTHONDONTWRITEBYTECODE is set.
tests: $(VENV)/.dev
	$(BIN)/python -m compileall -q autoplan profiler search
	$(BIN)/pytest -n auto --dist loadfile

# The property tests with examples that no run has drawn yet; what it finds becomes a test of its own.
hunt: $(VENV)/.dev
	$(BIN)/pytest -n auto --dist loadfile --hypothesis-profile hunt -m "not slow"

$(VENV)/.runtime: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable .
	$(BIN)/python -m compileall -q autoplan profiler search
	touch $@

# torch, for the tests alone: the CPU build of this exact version, before anything else can ask for another one.
$(VENV)/.dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/.runtime

clean:
	rm -rf $(VENV) plan.json launch
