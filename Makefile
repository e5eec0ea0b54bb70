# Two commands do all the set-up: `make run` and `make test`. Each creates .venv and installs what is missing.
PYTHON ?= $(firstword $(foreach version,.11 .12 .13 .14,$(shell command -v python3$(version) 2>/dev/null)) python3)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
# what `make check` tests: 110 seconds of processor time in all
CHECKS := tests/test_layers.py tests/test_options.py tests/test_pipeline_registry.py tests/test_startup.py tests/accounting \
	tests/evaluation tests/sweep/test_grid.py tests/sweep/test_summary.py tests/system

# what `make coverage` counts, which takes a minute of processor time, and the share of lines that it was measured to run
COVERED := tests/test_options.py tests/test_layers.py tests/evaluation tests/sweep/test_grid.py tests/sweep/test_summary.py \
	tests/sweep/test_tracked.py tests/system
FLOOR := 45

# tests start dozens of processes, and each would compile the whole package anew, which takes two seconds
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test slow check lint coverage viz ui site bench track gpu clean

run: $(STAMP)            ## the demonstration: five algorithms on scikit-learn's digits
	$(BIN)/kedro run --pipelines=compare,dpsgd_minimax $(ARGS)

test: $(STAMP) lint      ## lint, types, tests
	$(BIN)/pytest -n 2 --dist loadfile -m "not slow" $(ARGS)

slow: $(STAMP)           ## the tests that `make test` leaves out: they take longer than it
	$(BIN)/pytest -n 2 --dist loadfile -m slow $(ARGS)

check: $(STAMP) lint     ## lint, types, and the tests of behaviour that need no training: for the inner loop
	$(BIN)/pytest -n 2 --dist loadfile -m "not slow" $(CHECKS) $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

viz: $(STAMP)            ## the pipelines in the browser; prints the address of an overview
	@echo "The parts alone, on one screen: http://127.0.0.1:4141/?pid=compare&types=nodes&expandAllPipelines=false"
	$(BIN)/kedro viz run --host 127.0.0.1 $(ARGS)

ui: $(STAMP)             ## the runs in MLflow's UI, on 127.0.0.1
	$(BIN)/kedro ui $(ARGS)

site: $(STAMP)           ## the documentation, into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

bench: $(STAMP)          ## speed and memory against plain SGD and Opacus
	$(BIN)/python benchmarks/speed.py $(ARGS)

coverage: $(STAMP)       ## coverage of the quick tests, with the floor that was measured
	$(BIN)/pytest -m "not slow" --cov=equidp --cov-report=term:skip-covered --cov-fail-under=$(FLOOR) $(COVERED) $(ARGS)

track: $(STAMP)          ## the speed of this commit, added to benchmarks/over_commits.jsonl and drawn
	$(BIN)/python benchmarks/over_commits.py $(ARGS)

gpu: $(STAMP)            ## whether a GPU trains rightly, and how fast
	$(BIN)/python benchmarks/gpu.py $(ARGS)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:                   ## remove what runs have made; raw data and MLflow's store stay
	rm -rf data/0[2-8]_*/*/ .pytest_cache .mypy_cache .ruff_cache .hypothesis
