# Needs Python (3.10 or newer), pip, gcc and make; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest
QUICK := not slow and not gpu and not faults

.DEFAULT_GOAL := help
.PHONY: help install demo check format lint types layers test test-slow test-faults test-gpu bench

help:
	@echo "make demo         tiny model, SFT, GRPO, before and after, a plot: a few minutes on a CPU"
	@echo "make check        format, lint, types, layers, tests"
	@echo "make test         the tests that run everywhere (test-slow, test-faults, test-gpu: the others)"
	@echo "make lint format  ruff; make types: mypy; make bench: measurements"

install: $(STAMP)

# The stamp makes this happen once, and again when the dependencies change.
$(STAMP): pyproject.toml requirements/cpu-overrides.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python \
	    $(if $(PIP_FIND_LINKS),--find-links "$(PIP_FIND_LINKS)") \
	    --overrides requirements/cpu-overrides.txt -e ".[cpu,dev]"
	touch $(STAMP)

demo: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/scripts/demo.sh

format: $(STAMP)
	$(BIN)/ruff format openrlhf tests examples benchmarks

lint: $(STAMP)
	$(BIN)/ruff format --check openrlhf tests examples benchmarks
	$(BIN)/ruff check openrlhf tests examples benchmarks

types: $(STAMP)
	$(BIN)/mypy

layers: $(STAMP)
	$(PYTEST) -q tests/test_layers.py tests/test_budgets.py

test: $(STAMP)
	$(PYTEST) -m "$(QUICK)" tests

test-slow: $(STAMP)
	$(PYTEST) -m "slow and not gpu" tests

test-faults: $(STAMP)
	$(PYTEST) -m "faults and not gpu" tests

# On a GPU machine torch and its friends are there already: use that Python as it is.
test-gpu:
	$(PYTHON) -m pytest -m gpu tests

check: lint types layers test

# TRL is what the whole step is compared with; nothing else needs it.
bench: $(STAMP)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --overrides requirements/cpu-overrides.txt -e ".[bench]"
	$(BIN)/python -m benchmarks.run
