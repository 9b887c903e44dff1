# make demo | test | test-all | lint | docs | clean: needs python3, make and a C++ compiler (for DeepSpeed's CPU operators).
PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

export OMP_NUM_THREADS := 1
export PATH := $(BIN):$(PATH)
# Every process would compile all modules of this repository, where Python is told to keep none.
export PYTHONDONTWRITEBYTECODE :=
# What DeepSpeed and torch compile belongs to this environment: no lock or build of another one is in the way.
export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(VENV)/torch_extensions

.PHONY: demo test test-all lint docs clean

# Keeps the output readable: DeepSpeed need not search for a GPU where there is none, nor torch tell of its plans.
demo: export PYTHONWARNINGS := ignore::FutureWarning
demo: export DS_ACCELERATOR ?= $(if $(shell command -v nvidia-smi),cuda,cpu)
demo: $(STAMP)
	$(BIN)/deepspeed --num_gpus 2 --log_level error examples/train_gpt.py --deepspeed --deepspeed_config examples/ds_config.json

# Some cases of every promise: of each test a sample, chosen by the commit. WORKERS processes share the tests
# (tests/support/parallel.py); WORKERS=0 runs one after the other.
WORKERS ?= 3
test: export CDP_TEST_SEED ?= $(shell git rev-parse HEAD 2>/dev/null || echo 0)
test: $(STAMP)
	$(BIN)/python -m pytest -q -n $(WORKERS) -m "not slow" tests

# All tests and all cases; where the time goes is printed last.
test-all: $(STAMP)
	$(BIN)/python -m pytest -q -n $(WORKERS) --durations=25 tests

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

# The site, in build/docs; fails on broken links and on docstrings that name what is not there. (--quiet would hide both.)
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(STAMP)
	$(BIN)/mkdocs build --strict

# torch comes first: DeepSpeed's build looks for it. The operators take about 2 minutes.
$(STAMP): pyproject.toml setup.py constraints.txt deepspeed_cdp_autoload.pth tests/support/operators.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) setuptools torch
	$(PIP) deepspeed
	$(PIP) --no-build-isolation -e '.[test,docs]'
	$(BIN)/python tests/support/operators.py
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
