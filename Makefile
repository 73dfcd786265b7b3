# Everything runs in a virtual environment of its own, made from pyproject.toml and pinned by constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= $(shell nproc)
SLOW ?= tests
MINUTES ?= 40
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-fast test-slow test-gpu sweep lint docs wheel bench clean

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

demo: $(VENV)/.installed  ## train a packed Llama on 2 CPU processes and on 1, compare, print report and graph diff
	$(BIN)/python examples/train_packed.py --world-size 2

test: $(VENV)/.installed  ## what a newcomer runs: within 7 minutes on 2 idle cores
	$(BIN)/python -m pytest -n 2 --dist loadgroup

test-fast: $(VENV)/.installed  ## what starts no processes and captures few graphs, within a minute on 2 cores
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m 'not slow and not sweep and not gpu and not long'

test-slow: $(VENV)/.installed  ## trainers, every rule on processes, drawn cases of each day: within 30 minutes on 2 idle cores
	CP_MINUTES=$(MINUTES) $(BIN)/python -m pytest -n 2 --dist loadgroup -m 'slow and not sweep and not gpu' $(SLOW)

sweep: $(VENV)/.installed  ## every test and case that needs no GPU, every model of transformers: hours of a core
	$(BIN)/python -m pytest -n $(WORKERS) --dist load -m 'not gpu'
	$(BIN)/python -m tests.sweep --workers $(WORKERS) --deadline 7200
	$(BIN)/python -m tests.sweep --trainer --workers $(WORKERS) --out called.jsonl

test-gpu: ## on a machine with GPUs, in the environment that is active there
	$(PYTHON) -m pytest -m gpu

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

docs: $(VENV)/.installed  ## the site with the reference of all names, in out/site; a link to nothing is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q
	@echo "open out/site/index.html"

wheel: $(VENV)/.installed  ## source distribution and wheel, in dist/
	$(BIN)/python -m build -q

bench: $(VENV)/.installed  ## benchmarks that need no GPU
	$(BIN)/python examples/bench/plan.py
	$(BIN)/python examples/bench/compile_time.py
	$(BIN)/python examples/bench/agree.py

clean:
	rm -rf $(VENV) build dist out *.egg-info
