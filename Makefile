# make demo | test | lint | docs | clean: all that is needed is python3, make and a C++ compiler (DeepSpeed builds one CPU op).
PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

export OMP_NUM_THREADS := 1
export PATH := $(BIN):$(PATH)

.PHONY: demo test lint docs clean

# Keeps the output readable: DeepSpeed need not search for a GPU where there is none, nor torch tell of its plans.
demo: export PYTHONWARNINGS := ignore::FutureWarning
demo: export DS_ACCELERATOR ?= $(if $(shell command -v nvidia-smi),cuda,cpu)
demo: $(STAMP)
	$(BIN)/deepspeed --num_gpus 2 --log_level error examples/train_gpt.py --deepspeed --deepspeed_config examples/ds_config.json

# Two pytest workers (tests/parallel.py says what runs beside what); make test WORKERS=0 runs one test after the other.
WORKERS ?= 2
test: $(STAMP)
	$(BIN)/python -m pytest -q -n $(WORKERS) tests

lint: $(STAMP)
	$(BIN)/ruff check .

# The site, in build/docs; fails on broken links and on docstrings that name what is not there. (--quiet would hide both.)
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(STAMP)
	$(BIN)/mkdocs build --strict

# torch comes first: DeepSpeed's build looks for it.
$(STAMP): pyproject.toml setup.py constraints.txt deepspeed_cdp_autoload.pth
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) setuptools torch
	$(PIP) deepspeed
	$(PIP) --no-build-isolation -e '.[test,docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
