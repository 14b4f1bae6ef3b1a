# What a person types and what CI runs. `make` alone lists the targets.
#
# The environment is .venv, made by the first target that needs it and remade when a pin changes.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help env demo test check format bench matrix soak clean

VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/installed

# Set for every command below, and only here.
export VLLM_CPU_KVCACHE_SPACE ?= 1
export VLLM_LOGGING_LEVEL := INFO
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

# A progress bar for a person, silence for CI, whose log keeps every line.
PIP_FLAGS := $(if $(filter true,$(CI)),--quiet)

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: $(STAMP) ## Create .venv: CPU build of vLLM, this package (editable), test tools

demo: $(STAMP) ## Serve long prompts from a small device pool; MODEL=checkpoint, RECORD=dir for a trace
	$(PYTHON) -m examples.demo

test: $(STAMP) ## Run all tests
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest --numprocesses 2 --dist loadfile

check: $(STAMP) ## Check format, lint, types and the rules of the repository
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m ruff check
	$(PYTHON) -m mypy
	$(PYTHON) -m pytest tests/repository

format: $(STAMP) ## Rewrite the code in the repository's format
	$(PYTHON) -m ruff check --fix-only
	$(PYTHON) -m ruff format

bench: $(STAMP) ## Run the benchmarks
	$(PYTHON) -m benchmarks

matrix: $(STAMP) ## Run every combination of features with and without UlaCache (an hour)
	PYTHONPATH=tests $(PYTHON) -m matrix.full benchmarks/results/matrix.csv

soak: $(STAMP) ## Play requests of every kind for 20 minutes and count leaks; MINUTES=n, DRAFTS=mtp
	PYTHONPATH=tests $(PYTHON) -m soak.full --minutes $(or $(MINUTES),20) --drafts $(or $(DRAFTS),mtp) \
		--json benchmarks/results/soak.json

clean: ## Remove what the targets made, except .venv
	rm -rf build dist *.egg-info requirements/vllm-alias/build requirements/vllm-alias/*.egg-info
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	rm -rf .demo
	find . -name $(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# The checks are make functions, not shell commands: a failed one prints its line and nothing else.
find_python = $(firstword $(foreach p,python3.11 python3 python,$(shell $p -c \
	'import sys, ensurepip; sys.version_info[:2] == (3, 11) and print("$p")' 2>/dev/null)))
require_platform = $(if $(and $(filter Linux-x86_64,$(shell uname -sm | tr ' ' -)),$(find_python)),,\
	$(error vllm-ula needs Linux x86-64 and Python 3.11 with venv; here: $(shell uname -sm), $(shell \
	for p in python3.11 python3; do $$p --version 2>/dev/null && exit; done || echo no Python)))

TORCH := $(shell grep '^torch==' requirements/cpu.txt)
TORCH_INDEX := https://download.pytorch.org/whl/cpu
find_torch = $(findstring $(TORCH_INDEX),$(PIP_EXTRA_INDEX_URL))$(shell \
	$(PYTHON) -m pip install --quiet --dry-run --no-deps '$(TORCH)' >/dev/null 2>&1 && echo found)
require_torch = $(if $(find_torch),,$(error \
	pip finds no $(TORCH) here; run: PIP_EXTRA_INDEX_URL=$(TORCH_INDEX) make $(MAKECMDGOALS)))

# pip is the last file that venv writes.
$(VENV)/bin/pip:
	$(require_platform)
	$(find_python) -m venv $(VENV)

$(STAMP): requirements/cpu.txt requirements/vllm-alias/pyproject.toml setup.py | $(VENV)/bin/pip
	$(require_torch)
	$(PYTHON) -m pip install $(PIP_FLAGS) --no-deps -r requirements/cpu.txt
	$(PYTHON) -m pip install $(PIP_FLAGS) --no-deps --no-build-isolation -e .
	touch $@
